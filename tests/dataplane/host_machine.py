"""A state machine that drives the host tier and the model side by side."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dataplane.host_answers import NoSlots, UnknownSession, UnknownToken
from dataplane.host_tier import NO_SLOT, HostTier
from metadata.errors import InvalidInput
from metadata.pools import BlockGroups, Part, PoolSpec, TrailingPages
from tests.dataplane.host_model import HostModel

BYTES = (Part("page", "uint8", 64),)
DEPTH = 8
SESSIONS = ("engine-0", "engine-1", "engine-2")


def pool(name, policy=None, source=None):
    return PoolSpec(name, BYTES, indices_from=source, **({"hit_policy": policy} if policy else {}))


SETS = {
    "kv": [pool("kv")],
    "kv+swa": [pool("kv"), pool("swa", TrailingPages(3))],
    "kv+mamba": [pool("mamba", TrailingPages(1)), pool("kv")],
    "deepseek_v4": [
        PoolSpec("kv", (), logical=True),
        pool("c4", source="kv"),
        pool("c4_indexer", source="kv"),
        pool("c128", BlockGroups(1, 2), source="kv"),
        pool("swa", TrailingPages(2)),
        pool("c4_state", TrailingPages(1), source="swa"),
        pool("c128_state", TrailingPages(1)),
    ],
}


def page_hash(path) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


# Prompts share a trunk of 0s and leave it now and then.
turns = st.sampled_from([0, 0, 0, 0, 0, 1])
prompts = st.one_of(st.lists(turns, min_size=4, max_size=DEPTH), st.lists(turns, min_size=1, max_size=DEPTH))
starts = st.sampled_from([0, 0, 0, *range(DEPTH)])
sessions = st.sampled_from(SESSIONS)
index = st.integers(0, 1 << 16)


class HostStates(RuleBasedStateMachine):
    """Subclassed with a pool set."""

    pool_set = "kv"
    steps = 0

    @initialize(data=st.data())
    def begin(self, data):
        specs = SETS[self.pool_set]
        owners = [s.name for s in specs if s.indices_from is None]
        slots = {n: data.draw(st.integers(4, 20), label=f"slots of {n}") for n in owners}
        self.tier = HostTier(specs, slots)
        self.model = HostModel(specs, slots)
        self.ended: list[str] = []
        for session in SESSIONS[:2]:
            self.open(session)

    # Drawing

    def call(self, prompt, start):
        pages = [page_hash(tuple(prompt[: i + 1])) for i in range(len(prompt))]
        start %= len(pages)
        return pages[start:], pages[start - 1] if start else None

    def some_pools(self, data):
        names = list(self.model.specs)
        some = st.lists(st.sampled_from(names), min_size=1, unique=True)
        return data.draw(st.one_of(st.none(), st.none(), some))

    def masks(self, data, names, pages):
        """For each of the pools some pages: most often a leading run or a trailing one, as transfers have."""
        found = {}
        for name in names:
            cut = data.draw(st.integers(0, pages))
            kind = data.draw(st.sampled_from(["first", "last", "all", "any"]))
            mask = np.zeros(pages, np.bool_)
            if kind == "first":
                mask[:cut] = True
            elif kind == "last":
                mask[cut:] = True
            elif kind == "all":
                mask[:] = True
            else:
                mask[:] = data.draw(st.lists(st.booleans(), min_size=pages, max_size=pages))
            found[name] = mask
        return found

    def chosen(self, names):
        return [n for n in self.model.specs if names is None or n in names or n == "kv"]

    def pick(self, tokens, which):
        tokens = sorted(tokens)
        return tokens[which % len(tokens)]

    # Sessions

    def open(self, session):
        self.tier.open_session(session)
        self.model.sessions[session] = []
        with pytest.raises(InvalidInput, match="is open already"):
            self.tier.open_session(session)

    @rule(session=sessions, now=st.sampled_from([False, False, False, True]))
    def end(self, session, now):
        if now and session in self.model.sessions:
            self.end_session(session)

    def end_session(self, session):
        tokens = list(self.model.sessions[session])
        got = self.tier.end_session(session)
        holds = [t for t in tokens if t in self.model.holds]
        quarantined, freed = [], dict.fromkeys(self.model.slots, 0)
        for token in tokens:
            if token in holds:
                self.model.release(token)
                continue
            filling = self.model.fillings[token]
            if not self.model.cancel(token):
                quarantined.append(token)
                continue
            for space, _ in filling.own:
                freed[space] += 1
        del self.model.sessions[session]
        self.ended += [t for t in tokens if t not in quarantined]
        assert (got.locks, got.freed, got.quarantined) == (tuple(holds), freed, tuple(quarantined))

    def must_be_open(self, session):
        """Open the session if it is not, after seeing that it is refused."""
        if session in self.model.sessions:
            return
        with pytest.raises(UnknownSession):
            self.tier.lock(session, [])
        with pytest.raises(UnknownSession):
            self.tier.end_session(session)
        with pytest.raises(UnknownSession):
            self.tier.reserve(session, [page_hash((0,))])
        with pytest.raises(UnknownSession):
            self.tier.pin([], session=session)
        self.open(session)

    # Looking

    @rule(prompt=prompts, start=starts, data=st.data())
    def match(self, prompt, start, data):
        pages, parent = self.call(prompt, start)
        names = self.some_pools(data)
        found = self.tier.match(pages, parent=parent, pools=names)
        self.same_match(found.restorable, pages, parent, names)
        for name in self.chosen(names):
            cells = self.model.cells[self.model.space(name)]
            slots = [cells[p].slot if self.model.has(name, p) else NO_SLOT for p in pages]
            assert found.slots[name].tolist() == slots

    def same_match(self, found, pages, parent, names):
        lengths = self.model.lengths(pages, parent, self.chosen(names))
        assert [n for a, b in found.runs for n in range(a, b + 1)] == lengths
        assert found.unchecked_window_pages == 0

    # Locks and pins

    @rule(prompt=prompts, start=starts, session=sessions, data=st.data())
    def lock(self, prompt, start, session, data):
        pages, parent = self.call(prompt, start)
        names = self.some_pools(data)
        self.must_be_open(session)
        length = data.draw(st.one_of(st.none(), st.just(len(pages)), st.integers(0, len(pages))))
        got = self.tier.lock(session, pages, parent=parent, pools=names, length=length)
        self.same_match(got.restorable, pages, parent, names)
        if length is None:
            length = max(self.model.lengths(pages, parent, self.chosen(names)), default=0)
        assert got.pages == length
        spaces = {self.model.space(n) for n in self.chosen(names)}
        taken = [(s, c) for s in spaces for c in self.model.to_lock(pages, parent, length, s)]
        assert (got.token is None) == (not taken)
        for name in self.chosen(names):
            held = {c.page for s, c in taken if s == self.model.space(name)}
            cells = self.model.cells[self.model.space(name)]
            inside = [p in held and self.model.has(name, p) for p in pages]
            slots = [cells[p].slot if i else NO_SLOT for p, i in zip(pages, inside, strict=True)]
            assert got.slots[name].tolist() == slots
        if taken:
            self.model.hold(got.token, "lock", session, taken)

    @rule(prompt=prompts, start=starts, session=st.one_of(st.none(), sessions), data=st.data())
    def pin(self, prompt, start, session, data):
        pages, _ = self.call(prompt, start)
        if session is not None:
            self.must_be_open(session)
        names = self.some_pools(data)
        masks = None
        if names is not None and data.draw(st.booleans()):
            masks = self.masks(data, names, len(pages))
        got = self.tier.pin(pages, pools=masks or names, session=session)
        taken = {}
        for name in names or self.model.specs:
            space = self.model.space(name)
            for i, page in enumerate(pages):
                there = self.model.has(name, page) and (masks is None or masks[name][i])
                cell = self.model.cells[space].get(page)
                assert got.slots[name][i] == (cell.slot if there else NO_SLOT)
                if there:
                    taken[space, i] = cell
        assert (got.token is None) == (not taken)
        if taken:
            ordered = [(space, taken[space, i]) for space, i in sorted(taken, key=lambda k: k[1])]
            self.model.hold(got.token, "pin", session, ordered)

    @precondition(lambda self: self.model.holds)
    @rule(which=index)
    def release(self, which):
        token = self.pick(self.model.holds, which)
        self.tier.release(token)
        self.model.release(token)
        self.ended.append(token)

    # Slots

    @rule(prompt=prompts, start=starts, session=st.one_of(st.none(), sessions), data=st.data())
    def reserve(self, prompt, start, session, data):
        pages, parent = self.call(prompt, start)
        if session is not None:
            self.must_be_open(session)
        names = self.some_pools(data)
        pools = names
        if names is not None and data.draw(st.booleans()):
            pools = self.masks(data, names, len(pages))
        self.reserve_pages(session, pages, parent, names, pools, data.draw(st.booleans()))

    @rule(prompt=prompts, start=starts, session=sessions, fresh=st.booleans())
    def insert(self, prompt, start, session, fresh):
        """Reserve, fill and publish in one go."""
        pages, parent = self.call(prompt, start)
        self.must_be_open(session)
        token = self.reserve_pages(session, pages, parent, None, None, fresh)
        if token is not None:
            self.publish_pages(token, None)

    def reserve_pages(self, session, pages, parent, names, pools, fresh):
        every = set(range(len(pages)))
        asked = dict.fromkeys(names or self.model.specs, every)
        if isinstance(pools, dict):
            asked = {n: set(np.flatnonzero(m).tolist()) for n, m in pools.items()}
        plan = self.model.plan(session, pages, parent, asked, fresh)
        short = self.model.shortages(plan)
        if short:
            with pytest.raises(NoSlots) as refused:
                self.tier.reserve(session, pages, parent=parent, pools=pools, fresh=fresh)
            told = {n: (s.asked, s.free, s.locked) for n, s in refused.value.pools.items()}
            assert told == short
            return None
        got = self.tier.reserve(session, pages, parent=parent, pools=pools, fresh=fresh)
        self.begin_filling(got, plan, asked)
        return got.token

    def begin_filling(self, got, plan, asked):
        self.model.begin(got.token, plan)
        evicted = {}
        for space in self.model.slots:
            lacking = len(self.model.missing(plan, space)) - self.model.free(space)
            if lacking > 0:
                evicted[space] = self.model.evict(space, lacking)
        assert {e.pool: list(e.page_hashes) for e in got.evicted} == evicted
        used = {space: self.model.used_slots(space) for space in self.model.slots}
        for name in asked:
            space = self.model.space(name)
            for i in range(len(plan.pages)):
                slot, key = int(got.slots[name][i]), (space, i)
                # The logical anchor asks for what it is made of.
                wanted = self.model.needs(name) <= plan.asked.get(key, frozenset())
                assert got.resident[name][i] == (wanted and key in plan.shared)
                if not wanted:
                    assert slot == NO_SLOT
                elif key in plan.shared:
                    assert slot == plan.shared[key].slot
                else:
                    assert 0 <= slot < self.model.slots[space]
                    assert plan.own.setdefault(key, slot) == slot, "pools that share slots differ"
        for space in self.model.slots:
            own = [slot for (s, _), slot in plan.own.items() if s == space]
            assert len(own) == len(self.model.missing(plan, space))
            assert not used[space] & set(own), "a slot that is in use was given out"

    def open_fillings(self):
        return [t for t, f in self.model.fillings.items() if not f.given_up]

    @precondition(lambda self: self.open_fillings())
    @rule(which=index, data=st.data())
    def publish(self, which, data):
        """All that was asked for, or what a prefetch could read of it: nothing where it failed."""
        token = self.pick(self.open_fillings(), which)
        filling = self.model.fillings[token]
        filled = None
        if data.draw(st.booleans()):
            filled = self.masks(data, filling.pools, len(filling.pages))
        if filling.calls:
            with pytest.raises(InvalidInput, match="still written"):
                self.tier.publish(token, filled)
            return
        self.publish_pages(token, filled)

    def publish_pages(self, token, filled):
        filling = self.model.fillings[token]
        got = self.tier.publish(token, filled)
        every = set(range(len(filling.pages)))
        done = dict.fromkeys(filling.pools, every)
        if filled is not None:
            done = {n: set(np.flatnonzero(m).tolist()) for n, m in filled.items()}
        won, lost = self.model.publish(token, done)
        self.ended.append(token)
        resident = set()
        for name in filling.pools:
            space = self.model.space(name)
            for i, page in enumerate(filling.pages):
                asked = self.model.needs(name) <= filling.asked.get((space, i), frozenset())
                complete = asked and all(
                    any(part in self.model.needs(n) and i in at for n, at in done.items())
                    for part in self.model.needs(name)
                )
                assert got.published[name][i] == (complete and (space, i) in won)
                assert got.given_back[name][i] == (complete and (space, i) in lost)
                there = asked and self.model.has(name, page)
                assert got.slots[name][i] == (self.model.cells[space][page].slot if there else NO_SLOT)
                resident |= {i} if there else set()
        assert got.pages == len(resident)

    @precondition(lambda self: self.open_fillings())
    @rule(which=index)
    def hand_to_store(self, which):
        token = self.pick(self.open_fillings(), which)
        self.tier.hand_to_store(token)
        self.model.fillings[token].calls += 1

    @precondition(lambda self: any(f.calls for f in self.model.fillings.values()))
    @rule(which=index)
    def store_returned(self, which):
        token = self.pick([t for t, f in self.model.fillings.items() if f.calls], which)
        over = self.model.returned(token)
        assert self.tier.store_returned(token) == over
        if over:
            self.ended.append(token)

    @precondition(lambda self: self.open_fillings())
    @rule(which=index, data=st.data(), publish=st.booleans(), give_up=st.booleans())
    def split(self, which, data, publish, give_up):
        """A transfer is overdue: what was read counts at once, the rest stays with the store."""
        token = self.pick(self.open_fillings(), which)
        filling = self.model.fillings[token]
        kept = self.masks(data, filling.pools, len(filling.pages))
        other = self.tier.split(token, kept)
        self.model.split(token, other, {n: set(np.flatnonzero(m).tolist()) for n, m in kept.items()})
        if publish:
            self.publish_pages(other, self.masks(data, filling.pools, len(filling.pages)))
        if give_up:
            self.cancel(which=sorted(self.open_fillings()).index(token), by_release=False)

    @precondition(lambda self: self.open_fillings())
    @rule(which=index, by_release=st.booleans())
    def cancel(self, which, by_release):
        token = self.pick(self.open_fillings(), which)
        freed = self.model.cancel(token)
        if by_release:
            self.tier.release(token)
        else:
            assert self.tier.cancel(token) == freed
        if freed:
            self.ended.append(token)

    @rule(data=st.data(), count=st.integers(0, 6))
    def evict(self, data, count):
        name = data.draw(st.sampled_from(sorted(self.model.specs)))
        space = self.model.space(name)
        got = self.tier.evict(name, count)
        assert got.pool == space
        assert set(got.pools) == {n for n in self.model.specs if self.model.space(n) == space}
        assert list(got.page_hashes) == self.model.evict(space, count)

    @precondition(lambda self: self.ended)
    @rule(which=index)
    def a_token_that_ended_is_unknown(self, which):
        token = self.pick(set(self.ended), which)
        for call in (self.tier.release, self.tier.publish, self.tier.cancel, self.tier.hand_to_store):
            with pytest.raises(UnknownToken):
                call(token)
        with pytest.raises(UnknownToken):
            self.tier.store_returned(token)
        with pytest.raises(UnknownToken):
            self.tier.split(token, {})

    # After every step

    @invariant()
    def nothing_is_broken(self):
        if not hasattr(self, "tier"):
            return
        type(self).steps += 1
        assert self.tier.sanity_check() == []
        assert self.tier.pages == len(self.model.parents)
        assert set(self.tier.sessions) == set(self.model.sessions)
        for name, counts in self.tier.status().items():
            cells = self.model.cells[name].values()
            fillings = self.model.fillings.values()
            own = dict.fromkeys((False, True), 0)
            for filling in fillings:
                own[filling.given_up] += sum(space == name for space, _ in filling.own)
            assert counts.free == self.model.free(name)
            assert counts.resident == len(cells)
            assert counts.locked == sum(bool(c.holders) for c in cells)
            assert (counts.reserved, counts.quarantined) == (own[False], own[True])
            assert counts.slots == counts.free + counts.reserved + counts.resident + counts.quarantined
            self.same_holds(name)
            self.same_translation(name)

    def same_holds(self, name):
        space = self.tier._pages.spaces[self.tier._layout.names.index(name)]
        locks, pins = np.zeros(space.capacity, np.int32), np.zeros(space.capacity, np.int32)
        for cell in self.model.cells[name].values():
            locks[cell.slot] = sum(kind == "lock" for kind, _ in cell.holders)
            pins[cell.slot] = sum(kind == "pin" for kind, _ in cell.holders)
        assert space.host_locks.tolist() == locks.tolist()
        assert space.device_pins.tolist() == pins.tolist()

    def same_translation(self, name):
        cells = self.model.cells
        expected = np.full(self.model.slots["kv"], NO_SLOT)
        for page, cell in cells["kv"].items():
            if page in cells[name]:
                expected[cell.slot] = cells[name][page].slot
        assert self.tier.translation(name).tolist() == expected.tolist()

    def teardown(self):
        """When everybody has let go, nothing is held and all can be evicted."""
        if not hasattr(self, "tier"):
            return
        for session in list(self.model.sessions):
            self.end_session(session)
        for token in list(self.model.holds):
            self.tier.release(token)
            self.model.release(token)
        for token, filling in list(self.model.fillings.items()):
            for _ in range(filling.calls):
                self.tier.store_returned(token)
                self.model.returned(token)
            if not filling.given_up:
                self.tier.cancel(token)
                self.model.cancel(token)
        for name, slots in self.model.slots.items():
            assert self.tier.status()[name].locked == 0
            assert list(self.tier.evict(name, slots).page_hashes) == self.model.evict(name, slots)
        assert self.tier.pages == 0
        assert self.tier.sanity_check() == []
        assert all(counts.free == counts.slots for counts in self.tier.status().values())


def drive(pool_set: str, examples: int, steps: int, **more) -> int:
    """Run `examples` histories of up to `steps` steps; return how many steps that was, the first left out."""
    machine = type("Machine", (HostStates,), {"pool_set": pool_set})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )
    return machine.steps - examples
