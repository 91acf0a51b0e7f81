"""Somebody dies or hangs: engines, the agent, a storage node, the control plane. A real Mooncake."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import httpx
import pytest

from caketin.stack import Stack, StackSettings
from dataplane.agent_client import AgentAway, AgentRefused
from dataplane.child_process import free_port
from dataplane.messages.control import PoolQuery
from dataplane.mooncake_master import MasterHttp
from dataplane.mooncake_store import MooncakeStore
from dataplane.transfer import CHUNK_PAGES
from metadata import object_keys
from metadata.pools import Part, PoolSpec, TrailingPages
from tests.agent.world import (
    KV_SWA,
    Engine,
    RunningAgent,
    page_bytes,
    prompt,
    session_request,
    wait_until,
)

pytestmark = pytest.mark.chaos


@pytest.fixture
def agent(mooncake_stack, start_agent):
    return start_agent(mooncake_stack.url)


def engine_process(agent: RunningAgent, **spec: object) -> subprocess.Popen[str]:
    told = {"socket": str(agent.socket), "slots": 16, "prompt": "p", "pages": 6, "reserved": 4, **spec}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.agent.engine_process", json.dumps(told)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@contextmanager
def frozen(stack: Stack, index: int = 0):
    """Stop a storage node: it holds its connections and answers nothing."""
    assert stack.mooncake is not None
    node = stack.mooncake.children[1:][index]
    node.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.process.send_signal(signal.SIGCONT)


def test_an_engine_killed_leaves_its_pages_to_others_and_nothing_else_smoke(
    agent, mooncake_stack, start_agent
):
    model = secrets.token_hex(4)
    pages = prompt("p", 6)
    a = engine_process(agent, engine="engine-a", model=model)
    before = agent.status().pools
    assert (before["kv"].locked, before["kv"].free, before["swa"].locked) == (6, 6, 2)
    a.kill()
    a.wait()
    wait_until(lambda: agent.status().sessions == 0, 5)
    after = agent.status().pools
    assert (after["kv"].locked, after["kv"].free, after["swa"].locked) == (0, 10, 0)
    assert (after["kv"].resident, after["kv"].quarantined) == (6, 0)
    elsewhere = start_agent(mooncake_stack.url)
    for place in (agent, elsewhere):  # from host memory, and from the store
        b = place.client()
        session = b.open(session_request(KV_SWA, 16, engine="engine-b", model=model))
        done = session.wait(session.prefetch(pages))
        assert (done.state, done.transfers_done) == ("done", True), done
        Engine(session, KV_SWA).check(pages, done.slots, 6)
        session.close()
        b.close()


def test_a_frozen_node_makes_a_miss_in_time_and_its_late_answer_harms_nobody_smoke(
    agent, mooncake_stack, start_agent
):
    model = secrets.token_hex(4)
    pages = prompt("p", 8)
    with agent.client() as client, client.open(session_request(KV_SWA, 16, model=model)) as session:
        Engine(session, KV_SWA).publish(pages)
    cold = start_agent(mooncake_stack.url)
    with cold.client() as client, client.open(session_request(KV_SWA, 12, model=model)) as session:
        engine = Engine(session, KV_SWA)
        with frozen(mooncake_stack):
            start = time.monotonic()
            done = session.wait(session.prefetch(pages, policy="timeout", deadline_ms=700))
            took = time.monotonic() - start
            assert (done.state, done.transfers_done, done.restorable, done.token) == (
                "failed",
                False,
                [],
                None,
            )
            assert "did not answer" in done.error
            assert took < 5, took  # the store call itself is blocked much longer
            pools = cold.status().pools
            assert (pools["kv"].quarantined, pools["kv"].free, pools["kv"].resident) == (8, 4, 0)
            with pytest.raises(AgentRefused) as refused:
                session.slots(prompt("too much", 5), pools=["kv"])
            assert refused.value.pools["kv"].free == 4
            time.sleep(0.7)  # longer than the period of grace: the call is still out
            assert cold.status().pools["kv"].quarantined == 8
        wait_until(lambda: cold.status().pools["kv"].quarantined == 0, 90, "the call came back")
        assert cold.status().pools["kv"].free == 12
        # Every slot gets other bytes: none of them may change any more.
        mine = prompt("mine", 12)
        engine.publish(mine, backup=False)
        time.sleep(0.5)
        found = session.match(mine)
        engine.check(mine, found.slots, 12)
        session.release(found.token)
        again = session.wait(session.prefetch(pages))
        assert (again.state, again.restorable[-1][1]) == ("done", 8), again
        engine.check(pages, again.slots, 8)


KV = [PoolSpec("kv", (Part("page", "uint8", 1000),))]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    loads, why = MooncakeStore.available()
    if not loads:
        pytest.skip(f"Mooncake does not load here: {why}")
    control = {"CAKETIN_NEGATIVE_SECONDS": "0"}
    settings = StackSettings(tmp_path_factory.mktemp("two"), None, "mooncake", 64 << 20, control=control)
    with Stack(settings) as stack:
        yield stack


def hanging(agent: RunningAgent) -> int:
    """Transfers whose call of the store is out though they have ended."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(agent.socket)), base_url="http://agent") as plain:
        (line,) = (n for n in plain.get("/metrics").text.splitlines() if 'state="hanging"' in n)
    return int(float(line.split()[1]))


def move_pages(stack: Stack, namespace_id: str, specs: list[PoolSpec], moved: dict[str, list[bytes]]) -> None:
    """Put the objects of some pages of each pool on another storage node, which is started for it."""
    assert stack.mooncake is not None
    http = MasterHttp(stack.mooncake.master_http)
    before = {s["segment_name"] for s in http.segments()}
    stack.mooncake.start_node()
    (segment,) = (s for s in http.segments() if s["segment_name"] not in before)
    http.close()
    from mooncake.store import ReplicateConfig

    there = ReplicateConfig()
    there.preferred_segment = segment["segment_name"]
    with closing(MooncakeStore(stack.mooncake.settings)) as store:
        for spec in specs:
            (suffix,) = object_keys.suffixes(spec, (0,))
            for page in moved[spec.name]:
                key = object_keys.namespace_prefix(namespace_id) + page.hex() + suffix
                data = page_bytes(page, spec.name, spec.parts[0].part, spec.parts[0].bytes).tobytes()
                assert store.get_bytes(key) == data
                assert store.remove([key]) == 1
                assert store._client.put(key, data, there) == 0
                found = json.loads(http._read(f"/query_key?key={key}"))["data"]
                assert [r["transport_endpoint_"] for r in found] == [segment["te_endpoint"]]


def test_what_was_read_by_the_deadline_is_restored_while_the_rest_is_blocked_smoke(two_nodes, start_agent):
    """The first call of the store comes back, the second is blocked: it keeps the slots of its pages only."""
    model = secrets.token_hex(4)
    pages = prompt("p", CHUNK_PAGES + 44)
    with (
        start_agent(two_nodes.url).client() as client,
        client.open(session_request(KV, CHUNK_PAGES + 256, model=model)) as session,
    ):
        Engine(session, KV).publish(pages)
        move_pages(two_nodes, session.opened.namespace_id, KV, {"kv": pages[CHUNK_PAGES:]})
    cold = start_agent(two_nodes.url)
    with (
        cold.client() as client,
        client.open(session_request(KV, CHUNK_PAGES + 144, model=model)) as session,
    ):
        engine = Engine(session, KV)
        with frozen(two_nodes, -1):
            done = session.wait(session.prefetch(pages, policy="timeout", deadline_ms=1500))
            assert (done.state, done.transfers_done) == ("done", False), done
            assert (done.restorable, len(done.slots["kv"])) == ([(1, CHUNK_PAGES)], CHUNK_PAGES)
            assert "did not answer" in done.error
            engine.check(pages, done.slots, CHUNK_PAGES)
            kv = cold.status().pools["kv"]
            assert (kv.resident, kv.locked, kv.quarantined, kv.free) == (CHUNK_PAGES, CHUNK_PAGES, 44, 100)
            # A cancel of one that keeps its part: the same.
            started = session.prefetch(pages, policy="best_effort")
            wait_until(lambda: cold.status().pools["kv"].free == 56, 5)
            time.sleep(0.2)
            session.cancel(started)
            cancelled = session.wait(started)
            assert (cancelled.state, cancelled.restorable) == ("done", [(1, CHUNK_PAGES)]), cancelled
        wait_until(lambda: cold.status().pools["kv"].quarantined == 0, 90, "the call came back")
        engine.check(pages, done.slots, CHUNK_PAGES)
        again = session.wait(session.prefetch(pages))
        assert (again.state, again.transfers_done, again.restorable[-1][1]) == ("done", True, len(pages))
        engine.check(pages, again.slots, len(pages))


def test_windows_that_are_blocked_make_a_miss_and_the_pages_below_them_stay(two_nodes, start_agent):
    """KV is never restored without its window; but what was read of it is not read again."""
    model = secrets.token_hex(4)
    pages = prompt("p", 40)
    specs = [*KV, PoolSpec("swa", (Part("page", "uint8", 1000),), hit_policy=TrailingPages(2))]
    with (
        start_agent(two_nodes.url).client() as client,
        client.open(session_request(specs, 64, model=model)) as session,
    ):
        Engine(session, specs).publish(pages)
        move_pages(two_nodes, session.opened.namespace_id, specs, {"kv": [], "swa": pages[-2:]})
    cold = start_agent(two_nodes.url)
    with cold.client() as client, client.open(session_request(specs, 64, model=model)) as session:
        with frozen(two_nodes, -1):
            missed = session.wait(session.prefetch(pages, policy="timeout", deadline_ms=1000))
            assert (missed.state, missed.restorable, missed.token) == ("failed", [], None), missed
            pools = cold.status().pools
            assert (pools["kv"].resident, pools["kv"].locked, pools["kv"].quarantined) == (40, 0, 0)
            assert (pools["swa"].resident, pools["swa"].quarantined) == (0, 2)
        wait_until(lambda: cold.status().pools["swa"].quarantined == 0, 90, "the call came back")
        done = session.wait(session.prefetch(pages))
        assert (done.state, done.transfers_done, done.restorable[-1][1]) == ("done", True, 40), done
        Engine(session, specs).check(pages, done.slots, 40)


@pytest.mark.timeout(300)
def test_a_killed_node_makes_a_miss_in_time_and_its_slots_come_back_when_the_read_does(tmp_path, start_agent):
    """The node hangs during the read and is killed; then, or after a minute, the read comes back."""
    model = secrets.token_hex(4)
    pages = prompt("p", 8)
    with Stack(StackSettings(tmp_path, None, "mooncake", 64 << 20)) as stack:
        warm, cold = start_agent(stack.url), start_agent(stack.url, grace_seconds=2)
        with warm.client() as client, client.open(session_request(KV_SWA, 16, model=model)) as session:
            Engine(session, KV_SWA).publish(pages)
        with cold.client() as client, client.open(session_request(KV_SWA, 12, model=model)) as session:
            engine = Engine(session, KV_SWA)
            with frozen(stack):
                start = time.monotonic()
                done = session.wait(session.prefetch(pages, policy="timeout", deadline_ms=1000))
                assert 0.9 < time.monotonic() - start < 6
                assert (done.state, done.token, done.restorable) == ("failed", None, []), done
                assert hanging(cold) == 1, "the call of the store is still blocked"
                mine = prompt("mine", 4)
                engine.publish(mine, backup=False)
                stack.mooncake.kill_node()
                assert cold.status().pools["kv"].quarantined == 8
                with pytest.raises(AgentRefused) as refused:
                    session.slots(prompt("more", 9), pools=["kv"])
                assert refused.value.pools["kv"].asked == 9
            wait_until(lambda: cold.status().pools["kv"].quarantined == 0, 120, "the read came back")
            assert hanging(cold) == 0
            rest = prompt("rest", 8)
            engine.publish(rest, backup=False)
            for kept in (mine, rest):
                found = session.match(kept)
                assert found.pages == len(kept)
                engine.check(kept, found.slots, found.pages)


@pytest.mark.timeout(300)
def test_a_read_that_a_killed_node_cuts_off_is_a_miss_and_its_slots_rest(tmp_path, start_agent):
    """The kernel closes the connections of a process that dies, so the read comes back at once, in doubt."""
    model = secrets.token_hex(4)
    pages = prompt("p", 8)
    with Stack(StackSettings(tmp_path, None, "mooncake", 64 << 20)) as stack:
        warm, cold = start_agent(stack.url), start_agent(stack.url, grace_seconds=3)
        with warm.client() as client, client.open(session_request(KV_SWA, 16, model=model)) as session:
            Engine(session, KV_SWA).publish(pages)
        with cold.client() as client, client.open(session_request(KV_SWA, 12, model=model)) as session:
            with frozen(stack):  # so that the read is under way when the node dies
                started = session.prefetch(pages, policy="timeout", deadline_ms=5000)
                wait_until(lambda: cold.status().pools["kv"].free == 4, 4)
                time.sleep(0.3)
                stack.mooncake.kill_node()
            done = session.wait(started)
            assert (done.state, done.token, done.restorable) == ("failed", None, []), done
            assert cold.status().pools["kv"].quarantined == 8
            wait_until(lambda: cold.status().pools["kv"].free == 12, 120, "the period of grace is over")


def test_a_backup_to_a_frozen_node_keeps_its_pages_pinned_until_it_is_back(agent, mooncake_stack):
    with agent.client() as client:
        session = client.open(session_request(KV_SWA, 8, model=secrets.token_hex(4)))
        engine = Engine(session, KV_SWA)
        pages = prompt("p", 8)
        with frozen(mooncake_stack):
            token = engine.fill(pages)
            session.publish(token, backup=False)
            failed = session.wait(session.back_up(pages, deadline_ms=500))
            assert (failed.state, failed.transfers_done) == ("failed", False)
            session.close()  # the engine dies meanwhile
            assert agent.status().pools["kv"].locked == 8
        wait_until(lambda: agent.status().pools["kv"].locked == 0, 90)


def test_memory_is_not_taken_from_pages_that_wait_to_be_stored(mooncake_stack, start_agent):
    """Their engine is gone and their back-up has not begun: what was acknowledged is stored all the same."""
    agent = start_agent(mooncake_stack.url, transfers=1, memory="1Mi")
    models = {name: secrets.token_hex(4) for name in ("first", "dead", "next")}
    pages = prompt("p", 8)
    with agent.client() as client:
        first = client.open(session_request(KV_SWA, 8, model=models["first"], engine="first"))
        tokens = [Engine(first, KV_SWA).fill(pages)]
        dead = client.open(session_request(KV_SWA, 40, model=models["dead"], engine="dead"))
        tokens.append(Engine(dead, KV_SWA).fill(pages))
        larger = session_request(KV_SWA, 44, model=models["next"], engine="next")
        with frozen(mooncake_stack):
            first.publish(tokens[0])
            wait_until(lambda: agent.status().transfers.running == 1, 5)
            waits = dead.publish(tokens[1]).transfer_id
            dead.close()
            assert agent.status().transfers.queued == 1
            with pytest.raises(AgentRefused) as refused:
                client.open(larger)
            assert [e.code for e in refused.value.errors] == ["out_of_memory"]
        done = first.wait(waits)
        assert (done.state, done.transfers_done) == ("done", True), done
        with client.open(larger) as session:
            Engine(session, KV_SWA).publish(prompt("others", 44), backup=False)
        first.close()
    with (
        start_agent(mooncake_stack.url).client() as client,
        client.open(session_request(KV_SWA, 8, model=models["dead"])) as session,
    ):
        done = session.wait(session.prefetch(pages))
        assert done.transfers_done, done
        Engine(session, KV_SWA).check(pages, done.slots, 8)


def test_a_cancelled_prefetch_frees_its_slots_only_when_the_store_is_back(agent, mooncake_stack, start_agent):
    model = secrets.token_hex(4)
    pages = prompt("p", 4)
    with agent.client() as client, client.open(session_request(KV_SWA, 8, model=model)) as session:
        Engine(session, KV_SWA).publish(pages)
    cold = start_agent(mooncake_stack.url)
    with cold.client() as client, client.open(session_request(KV_SWA, 8, model=model)) as session:
        with frozen(mooncake_stack):
            started = session.prefetch(pages)
            wait_until(lambda: cold.status().pools["kv"].free == 4, 5)
            time.sleep(0.2)
            session.cancel(started)
            done = session.wait(started)
            assert done.state == "cancelled"
            assert cold.status().pools["kv"].quarantined == 4
            session.cancel(started)  # again: it stays what it became
            assert session.wait(started).state == "cancelled"
        wait_until(lambda: cold.status().pools["kv"].free == 8, 90)
        done = session.wait(session.prefetch(pages, policy="best_effort"))
        assert done.state == "done"


def test_an_agent_killed_in_mid_transfer_shows_no_half_page_smoke(mooncake_stack, start_agent):
    model = secrets.token_hex(4)
    agent = start_agent(mooncake_stack.url, memory="64Mi")
    pages = prompt("p", 400)
    client = agent.client()
    session = client.open(session_request(KV_SWA, 400, model=model))
    engine = Engine(session, KV_SWA)
    tokens = [engine.fill(pages[i : i + 50], parent=pages[i - 1] if i else None) for i in range(0, 400, 50)]
    for token in tokens:
        session.publish(token)
    agent.child.kill()
    with pytest.raises(AgentAway):
        session.match(pages)
    client.close()
    left = list(agent.shared.iterdir())
    assert left, "the killed agent left its files"
    agent.start()
    assert {p.name for p in agent.shared.iterdir()} == {"lock", "tiers"}
    assert not list((agent.shared / "tiers").iterdir())
    with agent.client() as client, client.open(session_request(KV_SWA, 400, model=model)) as session:
        assert session.match(pages).pages == 0
        done = session.wait(session.prefetch(pages))
        assert done.state == "done", done
        length = done.restorable[-1][1] if done.restorable else 0
        if length:
            Engine(session, KV_SWA).check(pages, done.slots, length)
        # What it was writing when it died the store may not take again for half a minute; never half of it.
        again = Engine(session, KV_SWA)
        parent = pages[length - 1] if length else None
        if length < 400:
            started = session.publish(again.fill(pages[length:], parent=parent)).transfer_id
            assert session.wait(started).state == "done"
        found = session.match(pages)
        assert found.pages == 400
        again.check(pages, found.slots, 400)


def test_a_session_without_a_word_ends_and_its_slots_are_back(mooncake_stack, start_agent):
    agent = start_agent(mooncake_stack.url, idle_seconds=1)
    with agent.client() as client:
        request = session_request(KV_SWA, 8, model=secrets.token_hex(4))
        session = client.open(request)
        session._every = 1e9
        session._closed.set()  # its thread says nothing any more, its connection stays open
        session.slots(prompt("p", 5))
        assert agent.status().pools["kv"].free == 3
        wait_until(lambda: agent.status().pools["kv"].free == 8, 5)
        with pytest.raises(AgentRefused) as refused:
            session.match([])
        assert refused.value.refusal == "unknown_session"
        quiet = client.open(request)
        quiet._every = 0.2
        time.sleep(2)
        assert quiet.match([]).pages == 0, "its thread kept it"
        quiet.close()


def test_the_agent_works_without_a_control_plane_and_catches_up_once_it_is_there(tmp_path, start_agent):
    port = free_port()
    agent = start_agent(f"http://127.0.0.1:{port}", transfer_seconds=5)
    pages = prompt("p", 4)
    with agent.client() as client:
        session = client.open(session_request(KV_SWA, 8))
        engine = Engine(session, KV_SWA)
        assert session.opened.namespace_id == ""
        missed = session.wait(session.prefetch(pages))
        assert (missed.state, missed.restorable) == ("done", [])
        done = session.publish(engine.fill(pages))
        assert session.wait(done.transfer_id).state == "failed"
        assert session.match(pages).pages == 4
        assert agent.status().store.healthy is False
        with Stack(StackSettings(tmp_path, port, "file", control={"CAKETIN_LEASE_SECONDS": "3"})):
            wait_until(lambda: agent.status().store.healthy, 30)
            assert agent.ready() == ""
            # What was published meanwhile is stored without anybody asking again.
            wait_until(lambda: agent.status().transfers.done >= 2, 10)
            request = session_request(KV_SWA, 8, engine="engine-b")
            with start_agent(agent.url).client() as other, other.open(request) as cold:
                done = cold.wait(cold.prefetch(pages))
                assert done.restorable[-1][1] == 4
        wait_until(lambda: "control plane" in agent.ready(), 30, "it notices that it is gone")
        found = session.match(pages)
        engine.check(pages, found.slots, 4)
        session.close()


def test_a_page_that_lost_its_window_is_stored_with_what_it_still_has(tmp_path, start_agent):
    """Windows leave host memory before KV does: what is left of a page is to be stored all the same."""
    port = free_port()
    agent = start_agent(f"http://127.0.0.1:{port}", transfer_seconds=5)
    request = session_request(KV_SWA, {"kv": 8, "swa": 4}, model=secrets.token_hex(4))
    first, second = prompt("p", 4), prompt("q", 4)
    with agent.client() as client, client.open(request) as session:
        for pages in (first, second):
            started = session.publish(Engine(session, KV_SWA).fill(pages)).transfer_id
            assert session.wait(started).state == "failed"
        assert (session.match(first).pages, session.match(second).pages) == (0, 4)
        with Stack(StackSettings(tmp_path, port, "file")):
            wait_until(lambda: agent.status().transfers.done >= 1, 30, "it is stored once it can be")
            with start_agent(agent.url).client() as other, other.open(request) as cold:
                for pages, pools in ((first, {"kv": PoolQuery()}), (second, None)):
                    done = cold.wait(cold.prefetch(pages, pools=pools))
                    assert done.transfers_done, done


def test_sigterm_lets_a_backup_end_tells_sessions_and_removes_the_rank(mooncake_stack, start_agent):
    agent = start_agent(mooncake_stack.url, drain_seconds=20)
    model = secrets.token_hex(4)
    pages = prompt("p", 8)
    client = agent.client()
    session = client.open(session_request(KV_SWA, 8, model=model, engine="drained"))
    engine = Engine(session, KV_SWA)
    token = engine.fill(pages)
    with frozen(mooncake_stack):
        started = session.publish(token).transfer_id
        agent.child.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            try:
                session.slots(prompt("q", 1))
            except AgentRefused as error:
                return error.refusal in {"draining", "no_slots"} and error.status in {503, 507}
            return False

        wait_until(refused, 5)
        assert agent.child.process.poll() is None
    assert session.wait(started).state == "done"
    agent.child.process.wait(30)
    assert agent.child.process.returncode == 0
    assert not agent.socket.exists()
    assert not agent.shared.exists()
    found = httpx.get(f"{mooncake_stack.url}/v1/engines/drained", trust_env=False)
    assert found.status_code == 404
    client.close()


def test_more_than_may_wait_is_refused_with_429(mooncake_stack, start_agent):
    agent = start_agent(mooncake_stack.url, transfers=1, queued_transfers=2, transfer_seconds=3)
    with agent.client() as client, client.open(session_request(KV_SWA, 8, model=secrets.token_hex(4))) as s:
        Engine(s, KV_SWA).publish(prompt("p", 8), backup=False)
        with frozen(mooncake_stack):
            started = [s.back_up(prompt("p", 8))]
            wait_until(lambda: agent.status().transfers.running == 1, 5)
            started += [s.back_up(prompt("p", 8)) for _ in range(2)]
            with pytest.raises(AgentRefused) as refused:
                s.back_up(prompt("p", 8))
            assert (refused.value.refusal, refused.value.status) == ("rate_limited", 429)
        ended = [s.wait(t).state for t in started]
        assert set(ended) <= {"done", "failed"}, ended
