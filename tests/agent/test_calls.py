"""What the calls take, give and refuse: one agent, a real control plane, a file store."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from dataplane.agent_client import AgentClient, AgentRefused
from dataplane.child_process import free_port
from dataplane.messages.control import PoolQuery
from metadata.pools import Part, PoolSpec
from tests.agent.world import (
    DEEPSEEK_V4,
    KV_SWA,
    Engine,
    RunningAgent,
    prompt,
    session_request,
    wait_until,
)

KV = [PoolSpec("kv", (Part("page", "uint8", 1000),))]


@pytest.fixture(scope="module")
def agent(file_stack, start_module_agent):
    return start_module_agent(file_stack.url, port=free_port())


@pytest.fixture(scope="module")
def cold_agent(file_stack, start_module_agent):
    """Another agent: what it has of the first one's pages comes from the store."""
    return start_module_agent(file_stack.url)


@pytest.fixture
def client(agent):
    with agent.client() as client:
        yield client


@pytest.fixture
def cold(cold_agent):
    with cold_agent.client() as client:
        yield client


def opened(client: AgentClient, specs, slots, **more):
    return client.open(session_request(specs, slots, model=secrets.token_hex(4), **more))


def raw(agent: RunningAgent, method: str, path: str, body: object = None) -> httpx.Response:
    transport = httpx.HTTPTransport(uds=str(agent.socket))
    with httpx.Client(transport=transport, base_url="http://agent", timeout=10) as plain:
        content = body if isinstance(body, bytes | None) else json.dumps(body)
        return plain.request(method, path, content=content)


def plain_request() -> dict:
    import msgspec

    return json.loads(msgspec.json.encode(session_request(KV_SWA, 8)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.pop("engine_id"), ""),
        (lambda r: r.update(engine_id="a b"), "engine_id"),
        (lambda r: r.update(rank="tp3"), "rank"),
        (lambda r: r.update(incarnation="../x"), "incarnation"),
        (lambda r: r.update(more=1), ""),
        (lambda r: r["namespace"].update(page_size=0), "namespace.page_size"),
        (lambda r: r["namespace"].update(hash_kind="md5"), "namespace.hash_kind"),
        (lambda r: r["pools"][1].update(capacity_pages=0), "pools[1].capacity_pages"),
        (lambda r: r["pools"][1].update(capacity_pages=-1), "pools[1].capacity_pages"),
        (lambda r: r["pools"][1].update(capacity_pages=1 << 40), "pools"),
        (lambda r: r["pools"][0].update(name="../../etc"), "pools[0].name"),
        (lambda r: r["pools"][1].update(name="kv"), "pools[1].name"),
        (lambda r: r["pools"][1].update(indices_from="kv", capacity_pages=9), "pools[1].capacity_pages"),
        (lambda r: r["pools"][1]["parts"][0].update(bytes=1 << 60), "pools[1].parts[0].bytes"),
        (lambda r: r["pools"][0].update(owned_shards=[3]), "pools[0].owned_shards"),
        (lambda r: r.update(pools=[]), "pools"),
    ],
)
def test_a_session_that_cannot_be_is_refused_naming_the_field(agent, change, field):
    body = plain_request()
    change(body)
    answer = raw(agent, "POST", "/v1/sessions", body)
    assert answer.status_code == 422, answer.text
    problem = answer.json()
    assert (problem["code"], problem["type"]) == ("invalid", "/problems/invalid")
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["errors"][0]["field"] == field, problem
    assert agent.status().sessions == 0


@pytest.mark.parametrize(
    ("call", "body", "field"),
    [
        ("match", {"page_hashes": "all"}, "page_hashes"),
        ("match", {"page_hashes": ["xy"]}, "page_hashes[0]"),
        ("match", {"page_hashes": [], "parent_hash": "12"}, "parent_hash"),
        ("slots", {"page_hashes": []}, "page_hashes"),
        ("slots", {"page_hashes": ["0" * 64, "0" * 64]}, "page_hashes[1]"),
        ("slots", {"page_hashes": ["0" * 64], "pools": []}, "pools"),
        ("publish", {"token": 7}, "token"),
        ("transfers", {"kind": "move", "page_hashes": []}, "kind"),
        ("transfers", {"kind": "prefetch", "page_hashes": [], "deadline_ms": 0}, "deadline_ms"),
        ("transfers", {"kind": "prefetch", "page_hashes": [], "policy": "timeout"}, "deadline_ms"),
        ("transfers", {"kind": "prefetch", "page_hashes": ["1" * 64], "first_page": 2}, "parent_hash"),
        (
            "transfers",
            {"kind": "prefetch", "page_hashes": ["1" * 64], "pools": {"swa": {"window_pages": 9}}},
            "pools.swa.window_pages",
        ),
    ],
)
def test_bad_input_to_a_session_is_refused_naming_the_field(agent, client, call, body, field):
    with opened(client, KV_SWA, 8) as session:
        answer = raw(agent, "POST", f"/v1/sessions/{session.session_id}/{call}", body)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field), answer.text
        assert agent.status().pools["kv"].free >= 8


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("POST", "/v1/sessions/s-0000/match", {"page_hashes": []}, "unknown_session"),
        ("DELETE", "/v1/sessions/s-0000", None, "unknown_session"),
        ("GET", "/v1/transfers/t-0", None, "unknown_transfer"),
        ("DELETE", "/v1/transfers/t-0", None, "unknown_transfer"),
        ("DELETE", "/v1/locks/l-1-abcdef", None, "unknown_token"),
        ("DELETE", "/v1/locks/nonsense", None, "unknown_token"),
        ("GET", "/v2/sessions", None, "not_found"),
        ("PUT", "/v1/sessions", None, "method_not_allowed"),
        ("POST", "/v1/sessions", b"{" + b" " * (9 << 20) + b"}", "body_too_large"),
        ("POST", "/v1/sessions", b"\xff\xfe", "invalid"),
        ("POST", "/v1/sessions", b"[" * 100_000, "invalid"),
        ("GET", "/v1/transfers/t-0?wait_ms=soon", None, "invalid"),
    ],
)
def test_what_is_not_there_is_a_problem_with_its_code(agent, method, path, body, code):
    answer = raw(agent, method, path, body)
    assert (answer.json()["code"], answer.status_code) == (code, answer.json()["status"]), answer.text
    assert answer.headers["x-request-id"]


def test_unknown_pools_are_named(client):
    with opened(client, KV_SWA, 8) as session:
        for call in (
            lambda: session.slots(prompt("p", 1), pools=["c256"]),
            lambda: session.prefetch(prompt("p", 1), pools={"c256": PoolQuery()}),
        ):
            with pytest.raises(AgentRefused) as refused:
                call()
            assert (refused.value.refusal, refused.value.status) == ("unknown_pool", 404)


def test_when_all_is_locked_507_says_how_much_is_missing(client):
    with opened(client, KV_SWA, {"kv": 8, "swa": 3}) as session:
        engine = Engine(session, KV_SWA)
        first = prompt("first", 3)
        engine.publish(first)
        held = session.match(first)
        assert held.pages == 3
        with pytest.raises(AgentRefused) as refused:
            session.slots(prompt("second", 6))
        found = refused.value
        assert (found.status, found.refusal) == (507, "no_slots")
        numbers = {name: (c.asked, c.free, c.locked) for name, c in found.pools.items()}
        assert numbers == {"kv": (6, 5, 3), "swa": (6, 1, 2)}
        # Nothing was done: what fits still fits, and after the release all of it.
        session.release(held.token)
        session.release(session.slots(prompt("second", 3)).token)
        with pytest.raises(AgentRefused, match="no token"):
            session.release(held.token)


def test_what_is_resident_in_one_pool_only_is_said_by_pool(client):
    with opened(client, KV_SWA, {"kv": 8, "swa": 2}) as session:
        engine = Engine(session, KV_SWA)
        pages = prompt("p", 2)
        engine.publish(pages)
        engine.publish(prompt("other", 2))  # takes both slots of the window pool
        got = session.slots(pages)
        assert got.resident == []
        assert got.resident_by_pool == {"kv": [(0, 1)], "swa": []}
        session.release(got.token)


def test_a_token_is_good_once_and_only_for_its_session(client):
    model = secrets.token_hex(4)
    requests = [session_request(KV, 8, engine=e, model=model) for e in ("engine-a", "engine-b")]
    with client.open(requests[0]) as one, client.open(requests[1]) as two:
        token = Engine(one, KV).fill(prompt("p", 2))
        for session, given in ((two, token), (one, "a-1"), (one, token + "0")):
            with pytest.raises(AgentRefused) as refused:
                session.publish(given)
            assert refused.value.refusal == "unknown_token"
        assert one.publish(token, backup=False).published == 2
        with pytest.raises(AgentRefused):
            one.publish(token)


def test_two_diverging_prompts_lose_no_page(client, cold):
    """Both engines hold slots for the common pages before either publishes: all of it ends up in L3."""
    model = secrets.token_hex(4)
    trunk = prompt("trunk", 3)
    left, right = (trunk + prompt(name, 2, after=trunk) for name in ("left", "right"))
    requests = [session_request(KV_SWA, 32, engine=e, model=model) for e in ("engine-a", "engine-b")]
    with client.open(requests[0]) as one, client.open(requests[1]) as two:
        a, b = Engine(one, KV_SWA), Engine(two, KV_SWA)
        tokens = (a.fill(left), b.fill(right))
        started = [one.publish(tokens[0]), two.publish(tokens[1])]
        assert [s.published for s in started] == [5, 2]
        ended = [one.wait(started[0].transfer_id), two.wait(started[1].transfer_id)]
        assert [e.transfers_done for e in ended] == [True, True], ended
        for pages in (left, right):
            found = two.match(pages)
            assert found.pages == 5
            b.check(pages, found.slots, 5)
    with cold.open(requests[0]) as session:
        for pages in (left, right):
            done = session.wait(session.prefetch(pages))
            assert done.restorable[-1] == (done.restorable[-1][0], 5)
            Engine(session, KV_SWA).check(pages, done.slots, 5)


def test_pages_published_without_backup_are_stored_with_what_follows_them(client, cold):
    request = session_request(KV_SWA, 16, model=secrets.token_hex(4))
    pages = prompt("p", 4)
    with client.open(request) as session:
        engine = Engine(session, KV_SWA)
        engine.publish(pages[:2], backup=False)
        engine.publish(pages)
    with cold.open(request) as session:
        done = session.wait(session.prefetch(pages))
        assert done.restorable[-1][1] == 4, done


def test_a_page_stored_in_one_pool_is_still_to_be_stored_in_the_others(client, cold):
    model = secrets.token_hex(4)
    elsewhere = session_request(KV_SWA, 32, model=model, engine="engine-b")
    pages = prompt("p", 4)
    with client.open(session_request(KV_SWA, 32, model=model)) as session:
        engine = Engine(session, KV_SWA)
        engine.publish(pages, backup=False)
        done = session.wait(session.back_up(pages, pools={"kv": PoolQuery()}))
        assert done.transfers_done, done
        engine.publish(pages)
        with cold.open(elsewhere) as other:
            done = other.wait(other.prefetch(pages))
            assert done.transfers_done, done
        # The same where it is the publishing call that names one pool.
        longer = prompt("q", 4)
        engine.publish(longer, backup=False)
        done = session.wait(session.publish(engine.fill(longer, pools=["kv"])).transfer_id)
        assert done.transfers_done, done
        with cold.open(elsewhere) as other:
            done = other.wait(other.prefetch(longer))
            assert done.transfers_done, done


def test_deepseek_v4_with_its_logical_anchor(client, cold):
    request = session_request(DEEPSEEK_V4, {"kv": 16, "swa": 4}, model=secrets.token_hex(4))
    pages = prompt("p", 8)
    with client.open(request) as session:
        assert session.opened.pools["kv"].path is None
        assert session.opened.pools["kv"].slots == 16
        engine = Engine(session, DEEPSEEK_V4)
        for start in (0, 4):
            chunk = pages[start : start + 4]
            engine.publish(chunk, parent=pages[start - 1] if start else None)
        found = session.match(pages)
        assert {n: len(at) for n, at in found.slots.items()} == {"kv": 8, "c4": 8, "c128": 8, "swa": 1}
        assert found.slots["kv"] == found.slots["c4"]
    with cold.open(request) as session:
        done = session.wait(session.prefetch(pages))
        assert (done.pages_done["c4"], done.pages_done["swa"], done.transfers_done) == (8, 1, True), done
        Engine(session, DEEPSEEK_V4).check(pages, done.slots, 8)
        again = session.wait(session.prefetch(pages))
        assert again.slots == done.slots  # resident by now: nothing was read twice


def test_a_prefetch_reads_only_what_host_memory_lacks(client, cold, cold_agent):
    request = session_request(KV_SWA, {"kv": 16, "swa": 16}, model=secrets.token_hex(4))
    pages = prompt("p", 10)
    with client.open(request) as session:
        Engine(session, KV_SWA).publish(pages)
    with cold.open(request) as session:
        session.wait(session.prefetch(pages[:6], lock=False))
        before = metric(cold_agent, "caketin_agent_bytes_total", 'direction="read"')
        done = session.wait(session.prefetch(pages))
        read = metric(cold_agent, "caketin_agent_bytes_total", 'direction="read"') - before
        assert done.restorable[-1][1] == 10
        assert 4 * 8000 <= read <= 4 * 8000 + 4 * 7000, read
        Engine(session, KV_SWA).check(pages, done.slots, 10)


def test_a_prefetch_never_writes_a_page_that_is_resident(client):
    """Its window has gone, so the last pages are read again, into slots of their own."""
    with opened(client, KV_SWA, {"kv": 12, "swa": 2}) as session:
        engine = Engine(session, KV_SWA)
        pages = prompt("p", 4)
        engine.publish(pages[:2])
        engine.publish(pages[2:], parent=pages[1])
        other = prompt("other", 2)
        engine.publish(other)  # takes the slots of the window
        found = session.slots(pages, pools=["kv"])
        assert found.resident == [(0, 3)]
        k = session.pools["kv"].part("k")
        for slot in found.slots["kv"]:
            k[slot, :4] = 0xEE
        done = session.wait(session.prefetch(pages))
        assert (done.restorable[-1][1], len(done.slots["swa"])) == (4, 2), done
        assert done.slots["kv"] == found.slots["kv"]
        assert all((k[slot, :4] == 0xEE).all() for slot in found.slots["kv"])
        session.release(found.token)
        session.release(done.token)


def test_pages_in_mid_sequence_hang_below_their_parent(client, cold):
    request = session_request(KV_SWA, 32, model=secrets.token_hex(4))
    pages = prompt("p", 9)
    with client.open(request) as session:
        Engine(session, KV_SWA).publish(pages)
        found = session.match(pages[4:], parent=pages[3])
        assert found.pages == 5
    with cold.open(request) as session:
        done = session.wait(session.prefetch(pages[4:], first_page=4, parent=pages[3]))
        assert (done.state, done.restorable[-1][1], done.transfers_done) == ("done", 5, True), done
        Engine(session, KV_SWA).check(pages[4:], done.slots, 5)


def test_a_prefetch_that_has_too_few_slots_brings_what_fits(client, cold):
    model = secrets.token_hex(4)
    pages = prompt("p", 12)
    with client.open(session_request(KV_SWA, 16, model=model)) as session:
        Engine(session, KV_SWA).publish(pages)
    with cold.open(session_request(KV_SWA, {"kv": 8, "swa": 4}, model=model)) as session:
        kept = session.slots(prompt("kept", 3), pools=["kv"])
        done = session.wait(session.prefetch(pages))
        assert (done.state, done.restorable[-1][1], done.transfers_done) == ("done", 5, False), done
        Engine(session, KV_SWA).check(pages, done.slots, 5)
        session.release(done.token)
        session.release(kept.token)


def test_a_miss_is_done_and_restores_nothing(client):
    with opened(client, KV_SWA, 8) as session:
        done = session.wait(session.prefetch(prompt("never stored", 4)))
        assert (done.state, done.transfers_done, done.restorable, done.token) == ("done", False, [], None)
        assert done.slots == {}


def test_a_session_ends_with_its_connection_and_gives_back_what_it_held(agent):
    model = secrets.token_hex(4)
    with agent.client() as watcher, watcher.open(session_request(KV, 8, model=model)) as other:
        client = agent.client()
        session = client.open(session_request(KV, 8, engine="engine-b", model=model))
        path = session.opened.pools["kv"].path
        Engine(session, KV).publish(prompt("p", 3), backup=False)
        session.match(prompt("p", 3))
        session.slots(prompt("q", 5))
        with pytest.raises(AgentRefused):
            other.slots(prompt("r", 1))
        session._closed.set()  # as a process that dies: no word of farewell
        client.close()
        wait_until(lambda: agent.status().sessions == 1, 5)
        assert not Path(path).exists()
        other.release(other.slots(prompt("r", 8)).token)


def test_a_session_goes_on_over_a_new_connection(agent):
    with agent.client() as client:
        session = opened(client, KV, 8)
        for _ in range(5):
            answer = raw(agent, "POST", f"/v1/sessions/{session.session_id}/match", {"page_hashes": []})
            assert answer.status_code == 200
            time.sleep(0.3)
        session.close()


def test_the_same_rank_again_takes_the_place_of_itself(agent, client):
    first, second = secrets.token_hex(16), secrets.token_hex(16)
    model = secrets.token_hex(4)
    old = client.open(session_request(KV, 8, incarnation=first, model=model))
    new = client.open(session_request(KV, 8, incarnation=second, model=model))
    with pytest.raises(AgentRefused) as refused:
        old.match([])
    assert refused.value.refusal == "unknown_session"
    with pytest.raises(AgentRefused) as refused:
        client.open(session_request(KV, 8, incarnation=first, model=model))
    assert (refused.value.refusal, refused.value.status) == ("stale_incarnation", 409)
    again = client.open(session_request(KV, 8, incarnation=second, model=model))
    assert again.opened.namespace_id
    for session in (old, new, again):
        session.close()


def test_a_pool_that_changed_within_one_life_is_refused(client):
    life, model = secrets.token_hex(16), secrets.token_hex(4)
    client.open(session_request(KV, 8, incarnation=life, model=model)).close()
    other = [PoolSpec("kv", (Part("page", "uint8", 2000),))]
    with pytest.raises(AgentRefused) as refused:
        client.open(session_request(other, 8, incarnation=life, model=model))
    assert (refused.value.refusal, refused.value.status) == ("pool_changed", 409)
    assert refused.value.errors[0].field == "pools[0].parts"
    client.open(session_request(other, 8, model=model)).close()


def test_ranks_are_registered_while_their_session_lasts(file_stack, client):
    with opened(client, KV, 8, engine="seen-engine"):
        found = httpx.get(f"{file_stack.url}/v1/engines/seen-engine", trust_env=False)
        assert found.status_code == 200
    wait_until(
        lambda: httpx.get(f"{file_stack.url}/v1/engines/seen-engine", trust_env=False).status_code == 404, 5
    )


def test_memory_in_use_is_not_taken_and_memory_of_nobody_is(cold, cold_agent):
    """Three quarters of the agent's 64 MiB: two such tiers do not fit, one after the other does."""
    large = [PoolSpec("kv", (Part("page", "uint8", 1 << 20),))]
    first = opened(cold, large, 48)
    with pytest.raises(AgentRefused) as refused:
        opened(cold, large, 48, engine="engine-b")
    assert (refused.value.status, refused.value.errors[0].code) == (422, "out_of_memory")
    Engine(first, large).publish(prompt("p", 3), backup=False)
    first.close()
    assert cold_agent.status().pools["kv"].resident >= 3, "an idle tier keeps its pages"
    second = opened(cold, large, 48)
    assert cold_agent.status().pools["kv"].resident == 0
    second.close()


def test_files_and_folders_are_this_users_alone(agent, client):
    with opened(client, KV_SWA, 8) as session:
        path = session.opened.pools["kv"].path
        assert path.startswith(str(agent.shared))
        assert Path(path).stat().st_mode & 0o777 == 0o600
        for folder in (agent.shared, Path(path).parent):
            assert folder.stat().st_mode & 0o777 == 0o700
        assert agent.socket.stat().st_mode & 0o777 == 0o600
    assert not Path(path).exists()


def test_over_tcp_it_tells_its_state_and_nothing_else(agent):
    base = f"http://127.0.0.1:{agent.flags['port']}"
    for path in ("/healthz", "/metrics", "/v1/status"):
        assert httpx.get(base + path, trust_env=False).status_code == 200
    assert httpx.get(base + "/readyz", trust_env=False).json()["status"] == "ready"
    refused = httpx.post(base + "/v1/sessions", json=plain_request(), trust_env=False)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


def test_metrics_say_what_the_status_says(agent, client):
    with opened(client, KV, 8) as session:
        Engine(session, KV).publish(prompt("p", 3), backup=False)
        status = agent.status()
        assert metric(agent, "caketin_agent_sessions") == status.sessions == 1
        resident = metric(agent, "caketin_agent_slots", 'pool="kv",state="resident"')
        assert resident == status.pools["kv"].resident >= 3


def agent_command(*flags: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "caketin", "agent", *map(str, flags)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_second_agent_on_the_same_socket_or_folder_says_so(agent):
    for flags in (
        ["--socket", agent.socket, "--shared-dir", f"{agent.shared}-2"],
        ["--socket", f"{agent.socket}2", "--shared-dir", agent.shared],
    ):
        done = agent_command(*flags)
        assert (done.returncode, "another agent" in done.stderr) == (2, True), done.stderr
    assert agent.status().sessions == 0


def test_what_is_no_socket_is_not_removed_and_variables_count_as_flags(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    done = agent_command(CAKETIN_AGENT_SOCKET=str(path))
    assert (done.returncode, path.read_text()) == (2, "data")
    assert "something else than a socket" in done.stderr


def test_a_folder_that_is_not_in_memory_is_told(file_stack, start_agent, tmp_path):
    """Pools on a disk work, as slowly as the disk."""
    disk = next(p for p in (tmp_path, Path.home(), Path("/var/tmp")) if file_system(p) not in {"tmpfs", ""})
    agent = start_agent(file_stack.url, shared_dir=disk / f"caketin-{secrets.token_hex(4)}")
    assert f"at {disk}" in agent.log()
    assert "mount a tmpfs there" in agent.log()
    assert "mount a tmpfs" not in start_agent(file_stack.url).log()


def file_system(folder: Path) -> str:
    return subprocess.run(
        ["stat", "--file-system", "--format=%T", folder], capture_output=True, text=True, check=True
    ).stdout.strip()


def metric(agent: RunningAgent, name: str, labels: str = "") -> float:
    text = raw(agent, "GET", "/metrics").text
    pattern = rf"^{name}(?:\{{{re.escape(labels)}\}})? (\S+)$" if labels else rf"^{name} (\S+)$"
    found = re.search(pattern, text, re.MULTILINE)
    return float(found[1]) if found else 0.0


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@needs_root
def test_another_user_is_turned_away_and_one_that_is_allowed_is_not(file_stack, start_agent):
    agent = start_agent(file_stack.url, allow_uid=12_345)
    agent.folder.chmod(0o755)
    say = (
        "import os, sys, json, socket; os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); body = sys.argv[3]\n"
        "s.sendall(f'POST /v1/sessions HTTP/1.1\\r\\nhost: a\\r\\nconnection: close\\r\\n"
        "content-length: {len(body)}\\r\\n\\r\\n{body}'.encode())\n"
        "answer = b''\n"
        "while not answer.endswith(b'}'): answer += s.recv(65536)\n"
        "found = json.loads(answer.split(b'\\r\\n\\r\\n', 1)[1])\n"
        "print(answer.split()[1].decode(), found.get('detail'))\n"
        "if 'pools' in found: print(len(open(found['pools']['kv']['path'], 'r+b').read()))\n"
    )

    def asked_by(uid: int) -> str:
        command = [sys.executable, "-S", "-c", say, str(agent.socket), str(uid), json.dumps(plain_request())]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=True).stdout

    assert asked_by(65_534) == "403 the socket belongs to another user\n"
    assert asked_by(12_345).startswith("201 None\n")
    assert agent.status().sessions <= 1


def test_a_slow_client_does_not_stop_the_others(agent, client):
    stuck = socket.socket(socket.AF_UNIX)
    stuck.connect(str(agent.socket))
    stuck.sendall(b"POST /v1/sessions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
    try:
        with opened(client, KV, 8) as session:
            assert session.match([]).pages == 0
    finally:
        stuck.close()
