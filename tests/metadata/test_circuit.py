"""The circuit breaker: opens after failures in a row, one probe at a time, closes on the first good one."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from metadata.circuit import Circuit, CircuitSettings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock, failures: int = 2) -> Circuit:
    circuit = Circuit(clock, CircuitSettings(failures, 5.0))
    tickets = [circuit.enter() for _ in range(failures)]
    assert [circuit.failed(t) for t in tickets] == [False] * (failures - 1) + [True]
    return circuit


def test_it_opens_at_the_nth_failure_in_a_row_and_not_before():
    circuit = Circuit(Clock(), CircuitSettings(3, 1.0))
    ticket = circuit.enter()
    assert ticket is not None
    assert not circuit.failed(ticket)
    assert not circuit.failed(ticket)
    circuit.succeeded(ticket)
    assert not circuit.failed(ticket)
    assert not circuit.failed(ticket)
    assert not circuit.is_open
    assert circuit.failed(ticket)
    assert circuit.is_open
    assert circuit.enter() is None


def test_by_default_three_failures_open_it():
    circuit = Circuit(Clock())
    assert [circuit.failed(0) for _ in range(3)] == [False, False, True]
    assert circuit.seconds_to_probe() == CircuitSettings().probe_seconds


def test_a_further_failure_of_an_open_circuit_does_not_put_the_probe_off():
    clock = Clock()
    circuit = opened(clock)
    clock.now += 3
    assert not circuit.failed(0)
    assert circuit.seconds_to_probe() == 2.0


def test_a_probe_begins_when_it_is_due_and_only_one_at_a_time():
    clock = Clock()
    circuit = opened(clock)
    clock.now += 4.9
    assert not circuit.begin_probe()
    clock.now += 0.1
    assert circuit.seconds_to_probe() == 0.0
    assert circuit.begin_probe()
    assert not circuit.begin_probe()
    assert circuit.enter() is None, "a probe in flight lets no call through"


def test_a_good_probe_closes_it_and_old_failures_are_forgotten():
    clock = Clock()
    circuit = opened(clock)
    clock.now += 5
    circuit.begin_probe()
    circuit.end_probe(good=True)
    ticket = circuit.enter()
    assert ticket is not None
    assert not circuit.is_open
    assert circuit.seconds_to_probe() == 0.0
    assert not circuit.failed(ticket), "one failure of two"
    assert circuit.failed(ticket)


def test_a_bad_probe_sets_the_time_of_the_next_from_its_end():
    clock = Clock()
    circuit = opened(clock)
    clock.now += 5
    circuit.begin_probe()
    clock.now += 2
    circuit.end_probe(good=False)
    assert circuit.is_open
    assert circuit.seconds_to_probe() == 5.0
    assert not circuit.begin_probe()


def test_a_closed_circuit_has_nothing_to_probe():
    circuit = Circuit(Clock(), CircuitSettings(2, 5.0))
    assert not circuit.begin_probe()
    circuit.end_probe(good=False)
    assert not circuit.is_open


@pytest.mark.parametrize("good", [True, False])
def test_an_end_without_a_beginning_changes_nothing(good):
    circuit = opened(Clock())
    circuit.end_probe(good=good)
    assert circuit.is_open


def test_a_straggler_of_an_earlier_life_says_nothing_of_now():
    clock = Clock()
    circuit = opened(clock, failures=1)
    old = 0
    clock.now += 5
    circuit.begin_probe()
    circuit.end_probe(good=True)
    assert circuit.enter() != old
    assert not circuit.failed(old)
    assert not circuit.is_open


def test_a_stragglers_success_does_not_reset_the_count():
    clock = Clock()
    circuit = opened(clock)
    clock.now += 5
    circuit.begin_probe()
    circuit.end_probe(good=True)
    ticket = circuit.enter()
    circuit.failed(ticket)
    circuit.succeeded(0)
    assert circuit.failed(ticket)


class CircuitRules(RuleBasedStateMachine):
    """Any history of calls, probes and time keeps the promises."""

    @initialize(failures=st.integers(1, 4), seconds=st.sampled_from([0.5, 3.0]))
    def begin(self, failures, seconds):
        self.clock = Clock()
        self.settings = CircuitSettings(failures, seconds)
        self.circuit = Circuit(self.clock, self.settings)
        self.in_flight: list[tuple[int, int]] = []
        self.row = 0
        self.life = 0
        self.probing = False
        self.open_since: float | None = None

    @rule()
    def call(self):
        ticket = self.circuit.enter()
        assert (ticket is None) == (self.open_since is not None)
        if ticket is not None:
            self.in_flight.append((ticket, self.life))

    @precondition(lambda self: self.in_flight)
    @rule(good=st.booleans(), which=st.integers(0, 50))
    def ends(self, good, which):
        ticket, life = self.in_flight.pop(which % len(self.in_flight))
        counts = life == self.life and self.open_since is None
        if good:
            self.circuit.succeeded(ticket)
            self.row = 0 if counts else self.row
        else:
            self.row += counts
            opens = counts and self.row == self.settings.failures_to_open
            assert self.circuit.failed(ticket) == opens
            if opens:
                self.open_since = self.clock.now

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule()
    def probe(self):
        due = (
            self.open_since is not None
            and not self.probing
            and self.clock.now >= self.open_since + self.settings.probe_seconds
        )
        assert self.circuit.begin_probe() == due
        self.probing = self.probing or due

    @precondition(lambda self: self.probing)
    @rule(good=st.booleans())
    def probe_ends(self, good):
        self.circuit.end_probe(good=good)
        self.probing = False
        self.open_since = None if good else self.clock.now
        if good:
            self.row, self.life = 0, self.life + 1

    @invariant()
    def agrees(self):
        if hasattr(self, "circuit"):
            assert self.circuit.is_open == (self.open_since is not None)
            assert 0 <= self.circuit.seconds_to_probe() <= self.settings.probe_seconds


TestCircuitRules = CircuitRules.TestCase
