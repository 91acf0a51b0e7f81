"""What a tier remembers beside what is resident: pages that are to be stored, and those on their way."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataplane.agent_files import SharedFolder
from dataplane.agent_pools import PoolMemory
from dataplane.agent_tiers import PoolPlan, Tier
from metadata.pools import Part, PoolSpec, RankPool
from tests.dataplane.mover_world import page_hash


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    plan = PoolPlan([RankPool(PoolSpec("kv", (Part("page", "uint8", 64),)), (0,))], {"kv": 4})
    return Tier(1, plan, PoolMemory(SharedFolder(tmp_path / "agent"), 1, plan.shapes))


def test_pages_wait_for_their_turn_beside_those_that_are_being_stored(tier):
    """Under a steady load some back-up is always under way; what failed once is stored all the same."""
    failed, moving, unasked = (page_hash(p) for p in range(3))
    tier.unsaved.update({failed: True, moving: True, unasked: False})
    tier.backing_up.update([moving])
    assert tier.waiting(10) == [failed]
    tier.backed_up([moving])
    assert tier.waiting(10) == [failed, moving]
    assert tier.waiting(1) == [failed]


def test_a_tier_is_in_use_until_the_last_of_two_back_ups_of_a_page_is_over(tier):
    page = page_hash(0)
    assert not tier.in_use
    for _ in range(2):
        tier.backing_up.update([page])
    tier.backed_up([page])
    assert tier.in_use
    tier.backed_up([page])
    assert not tier.in_use
