"""An engine with torch maps the agent's pools as tensors, without a copy."""

from __future__ import annotations

import secrets

import pytest

from metadata.pools import Part, PoolSpec
from tests.agent.world import session_request

pytestmark = pytest.mark.sglang  # with the python that has torch

KV = [PoolSpec("kv", (Part("page", "uint8", 1000),))]


def test_parts_are_torch_tensors_without_a_copy_smoke(file_stack, start_module_agent):
    torch = pytest.importorskip("torch")
    agent = start_module_agent(file_stack.url)
    with (
        agent.client() as client,
        client.open(session_request(KV, 8, model=secrets.token_hex(4))) as session,
    ):
        tensor = session.pools["kv"].tensor("page", torch.bfloat16)
        assert tensor.shape == (8, 500)
        tensor[3] = 1.5
        again = session.pools["kv"].part("page")
        assert again[3].tobytes() == tensor[3].view(torch.uint8).numpy().tobytes()
