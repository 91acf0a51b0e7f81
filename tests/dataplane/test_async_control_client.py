"""The asyncio client makes the same calls under the same deadlines, and many at once."""

import asyncio
import inspect
import time

import pytest

from dataplane import async_control_client
from dataplane.async_control_client import AsyncControlClient
from dataplane.control_client import ControlClient, ControlPlaneAway, ControlSettings, ModelIdentity
from dataplane.control_plane import ControlRefused
from metadata.errors import InvalidInput
from tests.dataplane.mover_world import hashes_of
from tests.dataplane.rude_server import rude_server
from tests.dataplane.test_control_client import CALL_SECONDS, GOOD, ME, NS, POOLS, SILENCE, SLACK
from tests.servers import Stack


def client_of(url: str, seconds: float = CALL_SECONDS) -> AsyncControlClient:
    return AsyncControlClient(ControlSettings(url, call_seconds=seconds), ME)


def test_every_call_of_the_sync_client_is_there():
    calls = {n for n, _ in inspect.getmembers(ControlClient, inspect.isfunction) if n[0] != "_"}
    assert calls == {n for n, _ in inspect.getmembers(AsyncControlClient, inspect.isfunction) if n[0] != "_"}


async def test_a_real_control_plane_answers_as_it_answers_the_sync_client(stack: Stack):
    client = client_of(stack.url, 10)
    joined = await client.register(ModelIdentity("async", "r", 4), POOLS)
    found = await asyncio.gather(*(client.lookup(joined.namespace_id, hashes_of(n)) for n in range(1, 40)))
    assert [f.queried_pages for f in found] == list(range(1, 40))
    with pytest.raises(ControlRefused) as refused:
        await client.lookup(NS, hashes_of(1))
    assert refused.value.refusal == "unknown_namespace"
    await client.leave()
    await client.close()
    await client.close()
    with pytest.raises(ControlPlaneAway, match="closed"):
        await client.lookup(NS, hashes_of(1))


async def test_a_silent_server_costs_the_deadline_also_those_who_wait_for_a_thread(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(async_control_client, "_THREADS", 2)
    with rude_server(SILENCE["accepts and says nothing"]) as server:
        client = client_of(server.url)
        start = time.monotonic()
        calls = (client.lookup(NS, hashes_of(1)) for _ in range(12))
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(f, ControlPlaneAway) for f in failed)
        assert time.monotonic() - start < CALL_SECONDS + SLACK
        await client.close()


async def test_a_cancelled_call_ends_at_once_and_the_loop_runs_on_meanwhile():
    with rude_server(SILENCE["accepts and says nothing"]) as server:
        client = client_of(server.url, 20)
        call = asyncio.create_task(client.lookup(NS, hashes_of(1)))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.close()


async def test_a_good_answer_is_decoded():
    with rude_server(lambda sock, server: (server.read_request(sock), sock.sendall(GOOD))) as server:
        client = client_of(server.url)
        assert (await client.lookup(NS, hashes_of(1))).hit_pages == 0
        await client.close()


async def test_bad_input_is_raised_as_it_is():
    with pytest.raises(InvalidInput):
        client_of("no url")
