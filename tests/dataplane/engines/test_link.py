"""The thread that keeps a rank attached: what it tries again, and what it does while nobody answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.control_plane import ControlPlaneAway
from dataplane.engines import link as link_module
from dataplane.engines.link import EngineLink

PATIENCE = 20.0


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


class Plane:
    """A control plane as a link sees it: its client and its attachment in one."""

    def __init__(self) -> None:
        self.away = False
        self.broken: Exception | None = None
        self.registered: list[tuple[Any, ...]] = []

    def heartbeat(self, _epoch: int) -> None:
        if self.away:
            raise ControlPlaneAway("away")

    def join(self, _bound: Any, registered: Any) -> Any:
        if self.away:
            raise ControlPlaneAway("away")
        if self.broken is not None:
            raise self.broken
        self.registered.append(tuple(p.spec.name for p in registered))
        return SimpleNamespace(
            namespace_id="0" * 16, registration=SimpleNamespace(epoch=1, lease_seconds=30.0), store=None
        )

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass


def pool(name: str) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(name=name))


@pytest.fixture
def plane() -> Plane:
    return Plane()


@pytest.fixture
def link(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLink]:
    monkeypatch.setattr(link_module, "_joined", lambda _attached, _bound, registered: tuple(registered))
    monkeypatch.setattr(link_module, "_FIRST_PAUSE", 0.02)
    monkeypatch.setattr(link_module, "_TICK_SECONDS", 0.01)
    client: Any = plane
    found = EngineLink(client, client)
    found.set_pools([], [pool("kv")])
    yield found
    found.close()


@pytest.mark.parametrize("fault", ["away", "broken"])
def test_pools_that_come_late_are_registered_however_often_that_fails_first(link, plane, fault):
    assert link.start(PATIENCE)
    plane.away = fault == "away"
    plane.broken = RuntimeError("nobody foresaw this") if fault == "broken" else None
    link.set_pools([], [pool("kv"), pool("draft")])
    until(lambda: link._pause > 0.1)
    assert plane.registered == [("kv",)]
    plane.away, plane.broken = False, None
    until(lambda: ("kv", "draft") in plane.registered)


def test_a_rank_that_nobody_answers_does_not_register_again_for_that(link, plane):
    assert link.start(PATIENCE)
    for _ in range(3):
        with pytest.raises(ControlPlaneAway):
            link.call(lambda _client: (_ for _ in ()).throw(ControlPlaneAway("away")))
    assert link._circuit.is_open
    until(lambda: not link._circuit.is_open)
    assert plane.registered == [("kv",)]


def test_leases_are_renewed_also_while_the_control_plane_is_away(link, plane):
    done: dict[str, int] = {"leases": 0, "claims": 0}

    def chore(name: str) -> Callable[[Any], None]:
        return lambda _joined: done.update({name: done[name] + 1})

    link.on_tick(chore("leases"), also_away=True)
    link.on_tick(chore("claims"))
    assert link.start(PATIENCE)
    plane.away = True
    for _ in range(3):
        with pytest.raises(ControlPlaneAway):
            link.call(lambda client: client.heartbeat(1))
    until(lambda: link._circuit.is_open)
    before = dict(done)
    until(lambda: done["leases"] > before["leases"] + 3)
    assert done["claims"] <= before["claims"] + 1
