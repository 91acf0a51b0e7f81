"""A circuit breaker in front of one Redis node: after some failures in a row nobody waits any more. Pure.

Closed, calls go through. After `failures_to_open` failures in a row it opens: calls are refused at once,
and one probe at a time, `probe_seconds` apart, asks whether the node is back. The first good probe closes it.
Real calls never probe: the one that did would wait a deadline's length, and a lookup must not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CircuitSettings:
    """When to give up, and how often to look again.

    Attributes:
        failures_to_open: failures in a row after which calls are refused.
        probe_seconds: time between two probes of an open circuit.
    """

    failures_to_open: int = 3
    probe_seconds: float = 0.5


class Circuit:
    """State of one breaker.

    Args:
        clock: monotonic seconds.
        settings: when to open and how often to probe.
    """

    def __init__(self, clock: Callable[[], float], settings: CircuitSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or CircuitSettings()
        self._failures = 0
        self._life = 0
        self._probe_at: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are refused."""
        return self._probe_at is not None

    def enter(self) -> int | None:
        """Let a call through and return its ticket, or None where it is refused.

        The ticket names the closed period in which the call began: what a straggler of an earlier one reports
        says nothing of now.
        """
        return None if self.is_open else self._life

    def succeeded(self, ticket: int) -> None:
        """Take the good end of a call."""
        if ticket == self._life:
            self._failures = 0

    def failed(self, ticket: int) -> bool:
        """Take the bad end of a call and return whether it opened the circuit."""
        if self.is_open or ticket != self._life:
            return False
        self._failures += 1
        if self._failures < self._settings.failures_to_open:
            return False
        self._probe_at = self._clock() + self._settings.probe_seconds
        return True

    def begin_probe(self) -> bool:
        """Return whether a probe is due, and count it as begun."""
        if self._probe_at is None or self._probing or self._clock() < self._probe_at:
            return False
        self._probing = True
        return True

    def end_probe(self, *, good: bool) -> None:
        """Take a probe's end: a good one closes the circuit, a bad one sets the time of the next."""
        if not self._probing:
            return
        self._probing = False
        if good:
            self._probe_at = None
            self._failures = 0
            self._life += 1
        else:
            self._probe_at = self._clock() + self._settings.probe_seconds

    def seconds_to_probe(self) -> float:
        """Return how long until the next probe may begin; 0 for a closed circuit and for a due probe."""
        return 0.0 if self._probe_at is None else max(0.0, self._probe_at - self._clock())
