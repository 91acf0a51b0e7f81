"""Each rule of `sanity_check` is broken once and named."""

import hashlib

import numpy as np
import pytest

from dataplane.host_slots import QUARANTINED
from dataplane.host_tier import HostTier
from metadata.pools import Part, PoolSpec, TrailingPages

PARTS = (Part("page", "uint8", 64),)
H = [hashlib.sha256(b"%d" % i).digest() for i in range(16)]


@pytest.fixture
def tier():
    """Pages 0 to 3 in both pools, 2 and 3 locked, two slots reserved, one session more."""
    pools = [PoolSpec("kv", PARTS), PoolSpec("swa", PARTS, hit_policy=TrailingPages(2))]
    made = HostTier(pools, {"kv": 8, "swa": 8})
    made.open_session("a")
    made.publish(made.reserve("a", H[:4]).token)
    made.lock("a", H[:4])
    made.pin(H[:1], session=None)
    made.reserve("a", H[:6])
    given_up = made.reserve("a", H[8:9], pools=["kv"])
    made.hand_to_store(given_up.token)
    made.cancel(given_up.token)
    assert made.sanity_check() == []
    return made


def tree(tier):
    return tier._pages.tree


def swa(tier):
    return tier._pages.spaces[1]


def rename(tier):
    tree(tier).nodes[H[9]] = tree(tier).nodes.pop(H[0])


def lose_parent(tier):
    tree(tier).parents[2] = 99


def unused_parent(tier):
    tree(tier).hashes.append(None)
    tree(tier).parents[2] = 4


def count_children(tier):
    tree(tier).children[0] += 1


def count_slots(tier):
    tree(tier).spaces[1] -= 1


def bare_leaf(tier):
    tree(tier)._new([H[12]])


def count_in_unused(tier):
    tree(tier).hashes.append(None)
    tree(tier).spaces[4] = 0


def cycle(tier):
    tree(tier).parents[0] = 3
    tree(tier).children[3] += 1


def unknown_state(tier):
    swa(tier).state[7] = QUARANTINED + 1


def free_twice(tier):
    swa(tier)._free[0] = swa(tier)._free[1]


def miscounted_resident(tier):
    swa(tier).resident += 1


def page_in_a_free_slot(tier):
    swa(tier).page[7] = 1


def two_pages_swap(tier):
    swa(tier).page[[0, 1]] = swa(tier).page[[1, 0]]


def lose_age(tier):
    space = tier._pages.spaces[1]
    space.ages.stamps[7] = 5


def miscounted_ages(tier):
    swa(tier).ages.members += 1


def equal_ages(tier):
    other = HostTier([PoolSpec("kv", PARTS)], {"kv": 8})
    other.open_session("a")
    other.publish(other.reserve("a", H[:2]).token)
    other._pages.spaces[0].ages.stamps[:2] = 7
    return other


def lost_lock(tier):
    swa(tier).host_locks[3] -= 1


def negative_pin(tier):
    swa(tier).device_pins[7] = -1


def forgotten_reservation(tier):
    token = next(t for t, r in tier._ledger.reservations.items() if not r.quarantined)
    tier._ledger.end_reservation(token)


def forgotten_quarantine(tier):
    token = next(t for t, r in tier._ledger.reservations.items() if r.quarantined)
    tier._ledger.end_reservation(token)


def wrong_translation(tier):
    tier._pages.translation[1][0] = 6


def lost_token(tier):
    tier._ledger.sessions["a"].popitem()


def no_store_call(tier):
    next(r for r in tier._ledger.reservations.values() if r.quarantined).store_calls = 0


def placed_twice(tier):
    tree(tier)._new([H[12]])
    tree(tier).slots[1][4] = 3


@pytest.mark.parametrize(
    ("breaks", "sentence"),
    [
        (rename, "hashes and nodes do not name each other"),
        (lose_parent, "a page's parent is no page"),
        (unused_parent, "a page's parent is no page"),
        (count_children, "a page's count of children is wrong"),
        (count_slots, "a page's count of slots is wrong"),
        (bare_leaf, "a page without bytes and children is still there"),
        (count_in_unused, "a node that is not in use counts slots"),
        (cycle, "a page is its own ancestor"),
        (unknown_state, "swa: a slot has no known state"),
        (free_twice, "swa: the free slots are not those in the list"),
        (miscounted_resident, "swa: the count of resident slots is wrong"),
        (
            page_in_a_free_slot,
            "swa: a slot has a page or pools without being resident, or is resident without",
        ),
        (two_pages_swap, "swa: a resident slot's page has another slot"),
        (placed_twice, "swa: pages have slots that are not resident"),
        (lose_age, "swa: the order of age has other slots than the resident ones that nothing holds"),
        (miscounted_ages, "swa: the count of slots in the order of age is wrong"),
        (equal_ages, "kv: two slots have one age"),
        (lost_lock, "swa: the host locks are not those of the tokens"),
        (negative_pin, "swa: a count of locks or pins is negative"),
        (negative_pin, "swa: the device pins are not those of the tokens"),
        (forgotten_reservation, "swa: the reserved slots are not those of the reservations"),
        (forgotten_quarantine, "kv: the quarantined slots are not those of the reservations"),
        (wrong_translation, "swa: the translation from the first space is wrong"),
        (lost_token, "sessions and tokens do not name each other"),
        (no_store_call, "a-5 counts 0 calls of the store"),
    ],
)
def test_a_broken_rule_is_named(tier, breaks, sentence):
    broken = breaks(tier) or tier
    assert sentence in broken.sanity_check()


def test_a_long_chain_is_no_cycle():
    chain = [hashlib.sha256(b"long %d" % i).digest() for i in range(3000)]
    tier = HostTier([PoolSpec("kv", PARTS)], {"kv": 3000})
    tier.open_session("a")
    tier.publish(tier.reserve("a", chain).token, {"kv": np.ones(3000, np.bool_)})
    assert tier.sanity_check() == []
