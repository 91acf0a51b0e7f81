"""One rank with real memory and a real file store: random pool sets, a store that can fail on demand, and a
control plane that remembers what it was told."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from dataplane import transfer
from dataplane.bound_pool import BoundPool
from dataplane.control_plane import ControlPlaneAway
from dataplane.file_store import FileStore
from dataplane.host_memory import HostMemory
from dataplane.messages import control
from dataplane.object_store import ObjectBuffers, StoreCode
from dataplane.page_mover import NO_SLOT, PageMover
from metadata.codec import PageHashes
from metadata.object_keys import object_keys, suffixes
from metadata.page_runs import page_runs, runs_to_mask
from metadata.pools import AllPages, BlockGroups, Part, PoolSpec, RankPool, TrailingPages, write_stages

NS = "0123456789abcdef"
SLOTS = 24
Where = tuple[str, int, int]
"""Pool, page number, shard."""


def page_hash(page: int) -> bytes:
    return hashlib.sha256(b"page %d" % page).digest()


def hashes_of(pages: int) -> PageHashes:
    return PageHashes.of([page_hash(p) for p in range(pages)])


def true_bytes(page: bytes, pool: str, shard: int, part: str, size: int) -> bytes:
    return hashlib.shake_256(page + f"{pool}/{shard}/{part}".encode()).digest(size)


@dataclass(frozen=True)
class PoolShape:
    """A pool of a test: what is registered, and the layers of its memory."""

    pool: RankPool
    layers: int = 1


@st.composite
def shapes(
    draw: st.DrawFn, name: str, policy: object, indices_from: str | None, *, may_own_none: bool = False
) -> PoolShape:
    layout = draw(st.sampled_from(["page_first", "page_first_direct", "layer_first"]))
    layers = draw(st.integers(1, 3)) if layout == "layer_first" else 1
    names = draw(st.sampled_from([("page",), ("k", "v"), ("temporal", "conv_0", "conv_1")]))
    parts = tuple(Part(n, "uint8", layers * draw(st.integers(1, 40))) for n in names)
    count = draw(st.integers(1, 3))
    owned = draw(st.sets(st.integers(0, count - 1), min_size=0 if may_own_none else 1))
    spec = PoolSpec(name, parts, count, policy, indices_from, object_layout=layout)
    return PoolShape(RankPool(spec, tuple(sorted(owned))), layers)


windows = st.integers(1, 4)


@st.composite
def pool_sets(draw: st.DrawFn) -> list[PoolShape]:
    """kv + swa; logical anchor + derived + swa; kv + indexer + mamba; with drafts and block groups."""
    kind = draw(st.sampled_from(["mha-swa", "deepseek", "mamba", "mixed"]))
    found: list[PoolShape] = []
    if kind == "deepseek":
        found.append(PoolShape(RankPool(PoolSpec("kv", (), logical=True), (0,))))
        found += [draw(shapes(n, AllPages(), "kv")) for n in ("c128", "c4")]
    else:
        found.append(draw(shapes("kv", AllPages(), None)))
    if kind in {"mamba", "mixed"}:
        found.append(draw(shapes("indexer", AllPages(), "kv")))
    if kind == "mamba":
        found.append(draw(shapes("mamba", TrailingPages(1), None)))
    if kind != "mamba":
        found.append(draw(shapes("swa", TrailingPages(draw(windows)), None, may_own_none=True)))
    if kind == "mixed":
        found.append(draw(shapes("draft", AllPages(), None)))
        found.append(draw(shapes("draft_swa", TrailingPages(draw(windows)), None)))
        blocks = BlockGroups(draw(st.integers(1, 2)), draw(st.integers(1, 2)))
        found.append(draw(shapes("blocks", blocks, draw(st.sampled_from([None, "kv"])))))
    return found


class FaultyStore:
    """A real file store that notes every call and fails where it is told to.

    `on_put`, `on_get`, `on_confirm`: key -> code that this object gets instead; nothing is moved for it.
    `unwritten`: keys whose put says OK and leaves nothing. `raising`: called with the verb and the number of
    the call, before it is made; may raise.
    """

    def __init__(self, real: FileStore) -> None:
        self.real = real
        self.kind = real.kind
        self.lease_seconds: float | None = None
        self.on_put: dict[str, StoreCode] = {}
        self.on_get: dict[str, StoreCode] = {}
        self.on_confirm: dict[str, StoreCode] = {}
        self.unwritten: set[str] = set()
        self.raising: Callable[[str, int], None] = lambda _verb, _number: None
        self.before_put: Callable[[Sequence[str]], None] = lambda _keys: None
        self.confirmed: set[str] = set()
        self.stored: set[str] = set()
        self.log: list[tuple[str, list[str], np.ndarray | None]] = []
        self._lock = threading.Lock()

    def _note(self, verb: str, keys: Sequence[str]) -> int:
        with self._lock:
            self.raising(verb, sum(1 for v, _, _ in self.log if v == verb))
            self.log.append((verb, list(keys), None))
            return len(self.log) - 1

    def _answered(self, call: int, answer: np.ndarray) -> None:
        verb, keys, _ = self.log[call]
        self.log[call] = (verb, keys, answer.copy())

    def calls(self, *verbs: str) -> list[tuple[str, list[str], np.ndarray | None]]:
        return [entry for entry in self.log if entry[0] in verbs]

    def put(
        self, keys: Sequence[str], buffers: ObjectBuffers, groups: Sequence[str] | None = None
    ) -> np.ndarray:
        call = self._note("put", keys)
        self.before_put(keys)
        codes = np.array([self.on_put.get(k, 0) for k in keys], dtype=np.int8)
        real = np.array([i for i, k in enumerate(keys) if not codes[i] and k not in self.unwritten], np.intp)
        if real.size:
            assert groups is not None
            codes[real] = self.real.put([keys[i] for i in real], buffers[real], [groups[i] for i in real])
        self.stored |= {k for k, c in zip(keys, codes.tolist(), strict=True) if c == StoreCode.OK}
        self._answered(call, codes)
        return codes

    def get(self, keys: Sequence[str], buffers: ObjectBuffers) -> np.ndarray:
        call = self._note("get", keys)
        codes = np.array([self.on_get.get(k, 0) for k in keys], dtype=np.int8)
        real = np.flatnonzero(codes == 0)
        if real.size:
            codes[real] = self.real.get([keys[i] for i in real], buffers[real])
        self._answered(call, codes)
        return codes

    def confirm(self, keys: Sequence[str], sizes: np.ndarray) -> np.ndarray:
        call = self._note("confirm", keys)
        codes = self.real.confirm(keys, sizes)
        for i, key in enumerate(keys):
            codes[i] = self.on_confirm.get(key, codes[i])
        self.confirmed |= {k for k, c in zip(keys, codes.tolist(), strict=True) if c == StoreCode.OK}
        self._answered(call, codes)
        return codes

    def exists(self, keys: Sequence[str], *, renew: bool = True) -> np.ndarray:
        call = self._note("exists" if renew else "peek", keys)
        there = self.real.exists(keys, renew=renew)
        told = [self.on_confirm.get(key, StoreCode.OK) == StoreCode.OK for key in keys]
        there &= np.array(told, dtype=np.bool_)
        # Of what was there before a put its size is not known yet.
        self.confirmed |= {k for k, yes in zip(keys, there.tolist(), strict=True) if yes} & self.stored
        self._answered(call, there)
        return there

    def remove(self, keys: Sequence[str]) -> int:
        self._note("remove", keys)
        self.confirmed -= set(keys)
        return self.real.remove(keys)

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


@dataclass
class Claims:
    """A control plane's memory, with the rules of the real one that matter here: generations fence reports,
    and a report that clears something raises its page's generation."""

    names: dict[str, RankPool]
    claimed: set[tuple[str, bytes, int]] = field(default_factory=set)
    generation: dict[bytes, int] = field(default_factory=dict)
    commits: list[dict[str, control.StoredPool]] = field(default_factory=list)
    reports: list[tuple[PageHashes, bytes | None, dict[str, control.MissingPool]]] = field(
        default_factory=list
    )
    stale: int = 0
    away: Callable[[str, int], bool] = lambda _verb, _number: False
    reject: Callable[[bytes, str], bool] = lambda _page, _pool: False
    check: Callable[[list[tuple[str, bytes, int]]], None] = lambda _claims: None

    def _named(self, hashes: PageHashes, pool: str, pages: control.PageSet, shards: list[int]) -> list:
        assert shards, "a call names no shard"
        assert set(shards) <= set(self.names[pool].owned_shards)
        assert shards == sorted(set(shards))
        mask = runs_to_mask(pages, len(hashes))
        assert mask.any(), "a call names no page"
        return [(pool, hashes[p], s) for p in np.flatnonzero(mask).tolist() for s in shards]

    def commit(
        self, namespace_id: str, page_hashes: PageHashes, stored: Mapping[str, control.StoredPool]
    ) -> control.CommitResult:
        assert namespace_id == NS
        self.commits.append(dict(stored))
        named = [x for n, s in stored.items() for x in self._named(page_hashes, n, s.pages, s.shards)]
        self.check(named)
        if self.away("commit", len(self.commits) - 1):
            raise ControlPlaneAway("the test says so")
        place = {page: i for i, page in enumerate(page_hashes)}
        refused = {(place[page], pool) for pool, page, _ in named if self.reject(page, pool)}
        self.claimed |= {x for x in named if (place[x[1]], x[0]) not in refused}
        rejected = [control.Rejection(page=p, pool=n, code="anchor_missing") for p, n in sorted(refused)]
        return control.CommitResult(committed=0, complete=0, rejected=rejected)

    def missing(
        self,
        namespace_id: str,
        page_hashes: PageHashes,
        generation: bytes | None,
        missing: Mapping[str, control.MissingPool],
    ) -> control.MissingResult:
        assert namespace_id == NS
        self.reports.append((page_hashes, generation, dict(missing)))
        if self.away("missing", len(self.reports) - 1):
            raise ControlPlaneAway("the test says so")
        cleared = 0
        touched: set[bytes] = set()
        for name, said in missing.items():
            for where in self._named(page_hashes, name, said.pages, said.shards):
                now = self.generation.get(where[1], 0)
                if generation is not None and generation[list(page_hashes).index(where[1])] != now:
                    self.stale += 1
                elif where in self.claimed:
                    self.claimed.discard(where)
                    cleared += 1
                    touched.add(where[1])
        for page in touched:
            self.generation[page] = self.generation.get(page, 0) + 1
        return control.MissingResult(cleared=cleared, stale=0)

    def generations(self, hashes: PageHashes) -> bytes:
        return bytes(self.generation.get(h, 0) for h in hashes)


class World:
    """A rank: pools, memory, store, claims, mover."""

    def __init__(self, pool_set: list[PoolShape], folder: Path, slots: int = SLOTS) -> None:
        self.pools = {s.pool.spec.name: s.pool for s in pool_set}
        self.specs = {n: p.spec for n, p in self.pools.items()}
        self.memory = {
            s.pool.spec.name: [HostMemory(s.pool.spec, slots, layers=s.layers) for _ in s.pool.owned_shards]
            for s in pool_set
            if not s.pool.spec.logical
        }
        self.bound = [
            BoundPool(p, tuple(m.pool for m in self.memory.get(n, ()))) for n, p in self.pools.items()
        ]
        self.real = FileStore(folder)
        for memories in self.memory.values():
            for memory in memories:
                self.real.register(memory.address, memory.length)
        self.store = FaultyStore(self.real)
        self.claims = Claims(self.pools)
        self.mover = PageMover(self.store, self.claims, NS, self.bound)
        stages = [[n for n in stage if self.memory.get(n)] for stage in write_stages(self.specs)]
        self.stages = [stage for stage in stages if stage]

    @property
    def names(self) -> list[str]:
        """Pools with bytes on this rank, in the order of the stages."""
        return [n for stage in self.stages for n in stage]

    def close(self) -> None:
        self.real.close()

    def keys(self, name: str, page: int, shard: int | None = None) -> list[str]:
        shards = self.pools[name].owned_shards if shard is None else (shard,)
        return object_keys(NS, [page_hash(page)], suffixes(self.specs[name], shards))[0]

    def shards(self, name: str) -> tuple[int, ...]:
        return self.pools[name].owned_shards

    def fill(self, slots: Mapping[str, np.ndarray]) -> None:
        """Put every page's true bytes into its slot."""
        for name, page, slot in self._placed(slots):
            for shard, memory in zip(self.shards(name), self.memory[name], strict=True):
                for part in self.specs[name].parts:
                    raw = true_bytes(page_hash(page), name, shard, part.part, part.bytes)
                    at = 0
                    for piece in memory.fragments(slot, part.part):
                        piece[:] = np.frombuffer(raw[at : at + piece.size], np.uint8)
                        at += piece.size

    def wipe(self) -> None:
        for memories in self.memory.values():
            for memory in memories:
                for part in memory.pool.parts:
                    for column in memory.columns(part.part):
                        column[:] = 0xEE

    def intact(self, name: str, page: int, slot: int) -> bool:
        """Whether a slot holds a page's true bytes, in all shards and parts."""
        for shard, memory in zip(self.shards(name), self.memory[name], strict=True):
            for part in self.specs[name].parts:
                found = b"".join(piece.tobytes() for piece in memory.fragments(slot, part.part))
                if found != true_bytes(page_hash(page), name, shard, part.part, part.bytes):
                    return False
        return True

    def _placed(self, slots: Mapping[str, np.ndarray]) -> Iterator[tuple[str, int, int]]:
        for name, at in slots.items():
            for page, slot in enumerate(at.tolist()):
                if slot != NO_SLOT:
                    yield name, page, slot

    def put_raw(self, key: str, data: bytes) -> None:
        self.real.put_bytes(key, data)

    def sizes(self, name: str, page: int, shard: int) -> list[int]:
        return self.real.sizes(self.keys(name, page, shard)).tolist()

    def complete(self, name: str, page: int, shard: int) -> bool:
        """Whether the store itself has every part of a shard of a page, of the right size."""
        return self.sizes(name, page, shard) == [p.bytes for p in self.specs[name].parts]

    def store_page(self, name: str, page: int) -> None:
        """Put a page's true bytes into the store, behind the mover's back."""
        for shard in self.shards(name):
            for key, part in zip(self.keys(name, page, shard), self.specs[name].parts, strict=True):
                self.put_raw(key, true_bytes(page_hash(page), name, shard, part.part, part.bytes))
            self.claims.claimed.add((name, page_hash(page), shard))

    def damage(self, name: str, page: int, shard: int) -> str:
        """Flip the last byte of a shard's file; returns the key of the part that it belongs to."""
        key = self.keys(name, page, shard)[-1]
        path = self.real._folder.path(key.rpartition("/")[0])
        assert path is not None
        raw = bytearray(Path(path).read_bytes())
        raw[-1] ^= 1
        Path(path).write_bytes(raw)
        return key


@contextmanager
def world_of(pool_set: list[PoolShape], chunk: int = 256) -> Iterator[World]:
    """A world in a folder of its own; `chunk` pages move at once."""
    before = transfer.CHUNK_PAGES
    with tempfile.TemporaryDirectory() as folder:
        world = World(pool_set, Path(folder) / "store")
        transfer.CHUNK_PAGES = chunk  # type: ignore[misc]
        try:
            yield world
        finally:
            transfer.CHUNK_PAGES = before  # type: ignore[misc]
            world.close()


@st.composite
def slots_for(draw: st.DrawFn, names: Sequence[str], pages: int) -> dict[str, np.ndarray]:
    """Random distinct slots, some pages without one, some pools left out."""
    found = {}
    for name in names:
        if draw(st.integers(0, 9)) == 0:
            continue
        at = np.array(draw(st.permutations(range(SLOTS)))[:pages], dtype=np.int64)
        for page in draw(st.sets(st.integers(0, pages - 1), max_size=2)):
            at[page] = NO_SLOT
        found[name] = at
    return found


def all_slots(names: Sequence[str], pages: int) -> dict[str, np.ndarray]:
    return {name: np.arange(pages, dtype=np.int64)[::-1].copy() for name in names}


def lengths_allowed(world: World, readable: Mapping[str, set[int]], pages: int) -> set[int]:
    """Brute force, from the words of the design: lengths that every gating pool in `readable` allows."""
    found = set()
    for n in range(1, pages + 1):
        good = True
        for name, there in readable.items():
            match world.specs[name].hit_policy:
                case AllPages():
                    good &= set(range(n)) <= there
                case TrailingPages(window):
                    good &= set(range(max(0, n - window), n)) <= there
        if good:
            found.add(n)
    return found


def promise_of(
    world: World, lengths: set[int], pages: int, *, covered: Mapping[str, int] | None = None
) -> control.LookupResult:
    """The lookup's answer that promises exactly these lengths."""
    mask = np.zeros(pages + 1, np.bool_)
    mask[sorted(lengths)] = True
    hit = max(lengths, default=0)
    return control.LookupResult(
        queried_pages=pages,
        hit_pages=hit,
        hit_tokens=hit,
        restorable=page_runs(mask),
        pools=dict.fromkeys(world.names, hit) | dict(covered or {}),
        generation=world.claims.generations(hashes_of(pages)),
        advisory=False,
        degraded=False,
        unchecked_window_pages=0,
        miss=None,
    )
