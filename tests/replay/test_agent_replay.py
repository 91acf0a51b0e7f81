"""`caketin replay --agent`: hits of host memory and of L3, against an exact model and the lookups' counts."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from caketin.replay.agent_driver import host_slots, replay_with_agent
from caketin.replay.agent_report import AgentReport
from caketin.replay.trace import Load, generate, read_trace
from tests.agent.conftest import file_stack, start_agent
from tests.agent.world import wait_until
from tests.replay.lru_oracle import TwoTiers
from tests.replay.oracle import prefix_ids
from tests.replay.stacks import SETTINGS, counted

__all__ = ["file_stack", "start_agent"]


def replayed(stack, start_agent, load: Load, slots: int, **settings: object) -> AgentReport:
    agent = start_agent(stack.url, memory="512Mi", call_seconds=20)
    chosen = replace(SETTINGS, url=stack.url, model=secrets.token_hex(4), transfer_seconds=30, **settings)
    report = replay_with_agent(chosen, load, agent.socket, slots, lambda _pages: None)
    assert (report.wrong_pages, report.unstored_pages, dict(report.errors)) == (0, 0, {})
    assert report.verified_pages == report.hit_pages

    def lookup() -> tuple[int, int]:
        sums = counted(stack, chosen.model).get("", {"queried_pages": 0, "hit_pages": 0})
        return sums["queried_pages"], sums["hit_pages"]

    wait_until(lambda: lookup() == (report.asked_pages, report.hit_pages), 10, f"{lookup()} {report}")
    wait_until(lambda: agent.status().sessions == 0, 10)
    assert all(p.locked == p.quarantined == 0 for p in agent.status().pools.values())
    return report


def exact(load: Load, slots: int) -> TwoTiers:
    oracle = TwoTiers(slots)
    for ids in load.requests:
        oracle.request(prefix_ids(ids))
    return oracle


def test_hits_of_both_tiers_are_those_of_an_exact_lru_and_add_up_to_the_lookups(file_stack, start_agent):
    load = generate(60)
    slots = host_slots(load, None)
    oracle = exact(load, slots)
    assert min(oracle.host_hits, oracle.l3_hits) > 50, "the load shows both tiers"
    report = replayed(file_stack, start_agent, load, slots, pools="mha")
    assert (report.asked_pages, report.host_hit_pages, report.l3_hit_pages) == (
        oracle.asked,
        oracle.host_hits,
        oracle.l3_hits,
    )
    assert report.stored_pages == oracle.asked - oracle.host_hits - oracle.l3_hits


@pytest.mark.parametrize("pools", ["deepseek-v4", "mha-swa", "mamba-hybrid"])
def test_hybrid_pools_lose_nothing_to_the_host_tier(file_stack, start_agent, pools):
    """Windows come and go on their own; what both tiers restore together is what an unbounded store has."""
    load = generate(30)
    report = replayed(file_stack, start_agent, load, load.longest + 2, pools=pools)
    assert report.hit_pages == exact(load, 1 << 20).host_hits
    assert report.host_hit_pages > 0
    assert report.l3_hit_pages > 0


@pytest.mark.trace
@pytest.mark.timeout(1800)
def test_the_trace_with_a_host_tier_of_a_quarter_of_its_pages(
    conversation_trace: Path, file_stack, start_agent
):
    limit = int(os.environ.get("CAKETIN_AGENT_TRACE_REQUESTS", "1000"))
    load = read_trace(conversation_trace, limit)
    slots = host_slots(load, None)
    oracle = exact(load, slots)
    report = replayed(file_stack, start_agent, load, slots, pools="mha", page_bytes=64)
    assert (report.asked_pages, report.host_hit_pages, report.l3_hit_pages) == (
        oracle.asked,
        oracle.host_hits,
        oracle.l3_hits,
    )
