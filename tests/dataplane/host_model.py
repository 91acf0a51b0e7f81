"""The host tier, told slowly: sets, lists and loops, one page at a time; nothing is counted.

It does not say which free slot is handed out; it takes the tier's choice and objects if the slot is in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from metadata.pools import AllPages, BlockGroups, PoolSpec, TrailingPages

NAMELESS = "nobody has named the parent"


@dataclass(eq=False)
class Cell:
    """One page's data in one space. `holders` are tokens, with their kind: one entry a lock or pin."""

    page: bytes
    slot: int
    pools: frozenset[str]
    holders: list[tuple[str, str]] = field(default_factory=list)


@dataclass(eq=False)
class Filling:
    """A reservation: asked, own and shared are (space, index of the page) -> what."""

    session: str | None
    pages: list[bytes]
    parent: bytes | None
    pools: list[str]
    asked: dict[tuple[str, int], frozenset[str]]
    own: dict[tuple[str, int], int] = field(default_factory=dict)
    shared: dict[tuple[str, int], Cell] = field(default_factory=dict)
    calls: int = 0
    given_up: bool = False


class HostModel:
    def __init__(self, specs: list[PoolSpec], slots: dict[str, int]):
        self.specs = {s.name: s for s in sorted(specs, key=lambda s: s.name != "kv")}
        self.slots = {n: slots[n] for n, s in self.specs.items() if s.indices_from is None}
        self.parents: dict[bytes, object] = {}
        self.cells: dict[str, dict[bytes, Cell]] = {s: {} for s in self.slots}
        self.ages: dict[str, list[Cell]] = {s: [] for s in self.slots}  # oldest first
        self.sessions: dict[str, list[str]] = {}
        self.holds: dict[str, tuple[str, list[tuple[str, Cell]]]] = {}
        self.fillings: dict[str, Filling] = {}

    # What pools are

    def space(self, pool: str) -> str:
        while self.specs[pool].indices_from is not None:
            pool = self.specs[pool].indices_from
        return pool

    def needs(self, pool: str) -> frozenset[str]:
        if not self.specs[pool].logical:
            return frozenset([pool])
        return frozenset(
            n
            for n, s in self.specs.items()
            if n != pool and self.space(n) == pool and isinstance(s.hit_policy, AllPages)
        )

    def has(self, pool: str, page: bytes) -> bool:
        cell = self.cells[self.space(pool)].get(page)
        return cell is not None and self.needs(pool) <= cell.pools

    # What is restorable

    def page_at(self, pages, parent, position):
        """The page at a position, negative before the call; None before the sequence, NAMELESS if unknown."""
        if position >= 0:
            return pages[position]
        at = parent
        for _ in range(-position - 1):
            if at is None or at is NAMELESS:
                return at
            at = self.parents.get(at, NAMELESS)
        return at

    def restores(self, pages, parent, pools, length) -> bool:
        for name in pools:
            policy = self.specs[name].hit_policy
            if isinstance(policy, BlockGroups):
                continue
            first = 0 if isinstance(policy, AllPages) else length - policy.window_pages
            for position in range(first, length):
                page = self.page_at(pages, parent, position)
                if page is None:
                    continue
                if page is NAMELESS or not self.has(name, page):
                    return False
        return True

    def lengths(self, pages, parent, pools) -> list[int]:
        return [n for n in range(1, len(pages) + 1) if self.restores(pages, parent, pools, n)]

    # Holding

    def window(self, space: str) -> int | None:
        policies = [s.hit_policy for n, s in self.specs.items() if self.space(n) == space]
        if all(isinstance(p, TrailingPages) for p in policies):
            return max(p.window_pages for p in policies)
        return None

    def to_lock(self, pages, parent, length, space) -> list[Cell]:
        """Walk up from the locked page; tombstones are passed. The answer has the first page first."""
        found = []
        position = length - 1
        while (page := self.page_at(pages, parent, position)) not in (None, NAMELESS):
            window = self.window(space)
            if window is not None and position < length - window:
                break
            if page in self.cells[space]:
                found.append(self.cells[space][page])
            position -= 1
        return found[::-1]

    def hold(self, token, kind, session, taken) -> None:
        for space, cell in taken:
            if not cell.holders:
                self.ages[space].remove(cell)
            cell.holders.append((kind, token))
        self.holds[token] = (kind, taken)
        if session is not None:
            self.sessions[session].append(token)

    def let_go(self, token, kind, space, cell) -> bool:
        cell.holders.remove((kind, token))
        return not cell.holders and self.cells[space].get(cell.page) is cell

    def release(self, token) -> None:
        kind, taken = self.holds.pop(token)
        idle = [(space, cell) for space, cell in taken if self.let_go(token, kind, space, cell)]
        for space, cell in reversed(idle):
            self.ages[space].append(cell)
        self.forget(token)

    def forget(self, token) -> None:
        for tokens in self.sessions.values():
            if token in tokens:
                tokens.remove(token)

    # Slots

    def used_slots(self, space) -> set[int]:
        used = [c.slot for c in self.cells[space].values()]
        used += [slot for f in self.fillings.values() for (s, _), slot in f.own.items() if s == space]
        assert len(used) == len(set(used)), "one slot for two"
        return set(used)

    def free(self, space) -> int:
        return self.slots[space] - len(self.used_slots(space))

    def evict(self, space, count) -> list[bytes]:
        gone, self.ages[space] = self.ages[space][:count], self.ages[space][count:]
        for cell in gone:
            del self.cells[space][cell.page]
        self.prune()
        return [cell.page for cell in gone]

    def prune(self) -> None:
        while True:
            named = set(self.parents.values())
            bare = [
                p
                for p in self.parents
                if p not in named and not any(p in cells for cells in self.cells.values())
            ]
            if not bare:
                return
            for page in bare:
                del self.parents[page]

    def plan(self, session, pages, parent, asked_pools, fresh) -> Filling:
        """asked_pools: pool -> set of page indices."""
        asked: dict[tuple[str, int], frozenset[str]] = {}
        for name, at in asked_pools.items():
            for i in at:
                key = (self.space(name), i)
                asked[key] = asked.get(key, frozenset()) | self.needs(name)
        filling = Filling(session, pages, parent, list(asked_pools), asked)
        for (space, i), pools in asked.items():
            cell = self.cells[space].get(pages[i])
            if cell is not None and pools <= cell.pools and not fresh:
                filling.shared[space, i] = cell
        return filling

    def missing(self, filling: Filling, space: str) -> list[int]:
        return sorted(i for s, i in filling.asked if s == space and (s, i) not in filling.shared)

    def shortages(self, filling: Filling) -> dict[str, tuple[int, int, int]]:
        short = {}
        for space in self.slots:
            asked = len(self.missing(filling, space))
            shared = [c for (s, _), c in filling.shared.items() if s == space]
            may_go = [c for c in self.ages[space] if c not in shared]
            room = self.free(space) + len(may_go)
            if asked > room:
                short[space] = (asked, room, len(self.cells[space]) - len(may_go))
        return short

    def begin(self, token, filling: Filling) -> None:
        for (space, _), cell in filling.shared.items():
            if not cell.holders:
                self.ages[space].remove(cell)
            cell.holders.append(("lock", token))
        self.fillings[token] = filling
        if filling.session is not None:
            self.sessions[filling.session].append(token)

    def split(self, token, other, kept) -> None:
        """kept: pool -> indices of pages whose slots stay."""
        filling = self.fillings[token]
        bound = {(self.space(n), i) for n, at in kept.items() for i in at if self.needs(n)}
        new = Filling(filling.session, filling.pages, filling.parent, filling.pools, {})
        for key in [k for k in filling.own if k not in bound]:
            new.own[key] = filling.own.pop(key)
            new.asked[key] = filling.asked[key]
        self.fillings[other] = new
        if new.session is not None:
            self.sessions[new.session].append(other)

    def cancel(self, token) -> bool:
        filling = self.fillings[token]
        self.unshare(token, filling)
        self.forget(token)
        if filling.calls:
            filling.given_up, filling.session = True, None
            return False
        del self.fillings[token]
        return True

    def unshare(self, token, filling) -> None:
        for (space, _), cell in sorted(filling.shared.items(), key=lambda kv: -kv[0][1]):
            if self.let_go(token, "lock", space, cell):
                self.ages[space].append(cell)
        filling.shared.clear()

    def publish(self, token, filled) -> tuple[set, set]:
        """filled: pool -> indices of pages. Returns what won and what was given back, as (space, index)."""
        filling = self.fillings.pop(token)
        self.forget(token)
        done: dict[tuple[str, int], frozenset[str]] = {}
        for name, at in filled.items():
            for i in at:
                key = (self.space(name), i)
                if key in filling.own:
                    done[key] = done.get(key, frozenset()) | (self.needs(name) & filling.asked[key])
        done = {key: pools for key, pools in done.items() if pools}
        above = filling.parent
        for i in range(max((i for _, i in done), default=-1) + 1):
            if above is not None:
                self.parents.setdefault(above, NAMELESS)
            if self.parents.get(filling.pages[i], NAMELESS) is NAMELESS:
                self.parents[filling.pages[i]] = above
            above = filling.pages[i]
        won, lost, young = set(), set(), []
        for (space, i), pools in done.items():
            page = filling.pages[i]
            cell = self.cells[space].get(page)
            if cell is not None and not cell.holders:
                self.ages[space].remove(cell)
            if cell is None or (not cell.holders and cell.pools < pools):
                cell = self.cells[space][page] = Cell(page, filling.own[space, i], pools)
                won.add((space, i))
            else:
                lost.add((space, i))
            if not cell.holders:
                young.append((i, space, cell))
        for (space, i), cell in filling.shared.items():
            if self.let_go(token, "lock", space, cell):
                young.append((i, space, cell))
        for _, space, cell in sorted(young, key=lambda entry: -entry[0]):
            self.ages[space].append(cell)
        return won, lost

    def returned(self, token) -> bool:
        filling = self.fillings[token]
        filling.calls -= 1
        if filling.given_up and not filling.calls:
            del self.fillings[token]
            return True
        return False
