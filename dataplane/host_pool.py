"""From a page slot of a host pool to the addresses and lengths of its bytes.

A host pool holds `slots` pages. Every part of a page (`k`, `v`, ...) is a tuple of *fragments*, and a
fragment is three numbers: where slot 0 starts, how far apart two slots are, how many bytes there are.

    address of slot s = base + s * stride

That is all that differs between the layouts. Take one part, 3 slots, 2 layers:

    page_first          one buffer, a page is one run:            1 fragment
                        |s0 L0 L1|s1 L0 L1|s2 L0 L1|                base = buffer, stride = length = page

    page_first_direct   the same addresses. Within a page, page_first goes token by token (t0L0 t0L1 t1L0
                        t1L1) and page_first_direct layer by layer (t0L0 t1L0 t0L1 t1L1): the *bytes* differ,
                        and so does the pool id, but not the arithmetic.

    layer_first         one run a layer, a page is in pieces:     2 fragments
                        |s0 L0|s1 L0|s2 L0| ... |s0 L1|s1 L1|s2 L1|
                         fragment 0              fragment 1         base = start of the layer's run,
                                                                    stride = length = one layer of one page

The object of a part in the store is its fragments one after the other: a layer-first page 1 is stored as
`s1 L0` then `s1 L1`. Reading it back scatters the object over the same fragments in the same order.

Several parts may lie in one buffer side by side (`|k0 v0|k1 v1|`): then all strides are the whole page's.

Pure: numbers in, numbers out. Nothing here allocates, registers or touches the memory it speaks of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane.host_fragments import (
    ADDRESS_LIMIT,
    Columns,
    Fragment,
    HostPart,
    Region,
    columns_of,
    covered_regions,
    memory_errors,
)
from metadata.errors import FieldError, InvalidInput
from metadata.pools import ObjectLayout, PoolSpec

__all__ = [
    "Buffers",
    "Fragment",
    "HostPart",
    "HostPool",
    "LayerBuffers",
    "PageBuffer",
    "Region",
    "layer_first",
    "page_first",
    "page_first_direct",
    "registration_chunks",
    "slots_of",
]


@dataclass(frozen=True, eq=False, slots=True)
class Buffers:
    """Addresses and lengths of some pages' bytes.

    Flat over fragments, because parts may have different numbers of them and padding would have to be
    skipped again by every reader. Where each part is one fragment (the page-first layouts),
    `addresses.ravel()` is one address an object, page by page, parts in the spec's order: the order of the
    object keys.

    Attributes:
        addresses: uint64, (pages, fragments); rows follow the slots of the call.
        lengths: int64, (pages, fragments), bytes; a read-only view, since all pages are alike.
        part_starts: (parts + 1,); part i owns the columns `part_starts[i]` to `part_starts[i + 1]`.
    """

    addresses: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    part_starts: tuple[int, ...]

    def of_part(self, index: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return addresses and lengths of the part at `index`, each (pages, fragments of the part)."""
        columns = slice(self.part_starts[index], self.part_starts[index + 1])
        return self.addresses[:, columns], self.lengths[:, columns]

    def objects(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return addresses and lengths as one list an object, page by page, parts in order.

        This is what a store takes that gathers an object from several buffers. The lists of lengths are
        shared between pages: read them only.
        """
        cuts = list(pairwise(self.part_starts))
        addresses = [row[a:b] for row in self.addresses.tolist() for a, b in cuts]
        a_page = [row[a:b] for row in self.lengths[:1].tolist() for a, b in cuts]
        return addresses, a_page * len(self.lengths)


@dataclass(frozen=True)
class HostPool:
    """The host memory of one pool of one rank, as numbers.

    Construction refuses fragments that overlap, leave the regions or reach past the address space, so that an
    address made by `buffers` is always one that belongs to its slot alone.

    Attributes:
        name: the pool's name.
        slots: pages it holds; slots are 0 to `slots - 1`.
        parts: in the spec's order; none for a logical pool.
        regions: what to register, disjoint; none for a logical pool (P1).
        object_layout: order of the bytes within an object.

    Raises:
        InvalidInput: naming the part or region at fault.
    """

    name: str
    slots: int
    parts: tuple[HostPart, ...]
    regions: tuple[Region, ...]
    object_layout: str = "page_first"
    _columns: Columns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        errors = memory_errors(self.parts, self.slots, self.regions)
        if errors:
            raise InvalidInput(f"the host memory of pool {self.name!r} cannot be used", errors)
        object.__setattr__(self, "_columns", columns_of(self.parts, self.slots))

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, over all parts."""
        return sum(p.bytes for p in self.parts)

    def buffers(self, slots: NDArray[np.int64]) -> Buffers:
        """Return where the pages in `slots` lie.

        Args:
            slots: integers, (pages,); a slot may be named twice.

        Raises:
            InvalidInput: a slot that is negative, too large or no integer; nothing is computed then.
        """
        rows = _whole_numbers(slots, f"pool {self.name!r}", "slots", self.slots)
        table = self._columns
        addresses = (table.bases + rows[:, None] * table.strides).view(np.uint64)
        return Buffers(addresses, np.broadcast_to(table.lengths, addresses.shape), table.part_starts)

    def registration_chunks(self, max_bytes: int) -> list[Region]:
        """Cut the regions so that a transport with a size limit can register them.

        The chunks tile the regions, and every fragment of every slot lies within one chunk.

        Args:
            max_bytes: most bytes the transport registers at once (a device's `max_mr_size`).

        Raises:
            InvalidInput: one fragment of one page is larger than `max_bytes`.
        """
        return registration_chunks((self,), max_bytes)

    def check_chunk_size(self, max_bytes: int) -> None:
        """Refuse a size that a fragment does not fit in.

        Raises:
            InvalidInput: naming the part at fault.
        """
        if max_bytes < 1:
            detail = f"is {max_bytes}, must be at least 1"
            raise InvalidInput(
                "the registration size is no size", [FieldError("max_bytes", "out_of_range", detail)]
            )
        lengths = self._columns.lengths
        if lengths.size == 0 or lengths.max() <= max_bytes:
            return
        at = int(lengths.argmax())
        detail = (
            f"is {max_bytes}, but part {self._columns.owners[at]!r} has {lengths[at]} bytes a page in one "
            f"piece; set it to at least {lengths[at]} (a device's own limit is max_mr_size in "
            "`ibv_devinfo -v`) or give the engine a smaller page size"
        )
        raise InvalidInput(
            f"pool {self.name!r} cannot be registered in pieces this small",
            [FieldError("max_bytes", "too_small", detail)],
        )

    def fragment_start(self, address: int) -> int:
        """Return `address`, or the start of the fragment that would be cut there."""
        table = self._columns
        into = address - table.bases
        slot, offset = np.divmod(into, table.strides)
        within = (into > 0) & (slot < self.slots) & (offset < table.lengths)
        # Fragments do not overlap: at most one is cut, and its start cuts no other. A start itself adds 0.
        return address - int(offset[within].sum())


@dataclass(frozen=True, slots=True)
class PageBuffer:
    """One part in a page-first layout.

    Attributes:
        part: its name.
        address: of slot 0.
        bytes: of one page; 0 means that the part does not exist.
        stride: from page to page; None where pages follow each other without a gap.
    """

    part: str
    address: int
    bytes: int
    stride: int | None = None


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    """One part in the layer-first layout.

    Attributes:
        part: its name.
        addresses: of slot 0 in each layer's run, in the order of the layers.
        layer_bytes: of one layer of one page; 0 means that the part does not exist.
        stride: from page to page within a layer; None where pages follow each other without a gap.
    """

    part: str
    addresses: tuple[int, ...]
    layer_bytes: int
    stride: int | None = None

    @classmethod
    def packed(cls, part: str, address: int, layers: int, slots: int, layer_bytes: int) -> LayerBuffers:
        """Return the part of one buffer shaped (layers, slots, layer_bytes) that starts at `address`."""
        run = slots * layer_bytes
        return cls(part, tuple(address + layer * run for layer in range(layers)), layer_bytes)


def registration_chunks(pools: Sequence[HostPool], max_bytes: int) -> list[Region]:
    """Cut the regions of several pools as `HostPool.registration_chunks` does; a region they share, once.

    No fragment of any of the pools is cut, also where pools with different pages lie in one region.

    Args:
        pools: host pools; regions of two of them are the same or apart.
        max_bytes: most bytes the transport registers at once.

    Raises:
        InvalidInput: a fragment is larger than `max_bytes`, or those of pools that share a region leave no
            place to cut.
    """
    for pool in pools:
        pool.check_chunk_size(max_bytes)
    owners: dict[Region, list[HostPool]] = {}
    for pool in pools:
        for region in pool.regions:
            owners.setdefault(region, []).append(pool)
    return [chunk for region, inside in owners.items() for chunk in _cut(region, inside, max_bytes)]


def _cut(region: Region, pools: Sequence[HostPool], max_bytes: int) -> Iterator[Region]:
    start = region.address
    while region.end - start > max_bytes:
        cut, before = start + max_bytes, 0
        while cut != before:
            before, cut = cut, min(pool.fragment_start(cut) for pool in pools)
        if cut <= start:
            names = ", ".join(repr(pool.name) for pool in pools)
            detail = f"is {max_bytes}, and pages of {names} overlap all the way: register more at once"
            raise _refused("shared memory cannot be cut", "max_bytes", "too_small", detail)
        yield Region(start, cut - start)
        start = cut
    yield Region(start, region.end - start)


def page_first(
    spec: PoolSpec, slots: int, buffers: Sequence[PageBuffer], regions: Sequence[Region] | None = None
) -> HostPool:
    """Return the pool whose pages are whole, tokens outside and layers inside.

    Args:
        spec: what the rank registers; names, order and bytes of the parts must agree with `buffers`.
        slots: pages in the pool.
        buffers: one a part, in the spec's order; those of zero bytes are dropped as the spec drops them (P2).
            None at all for a logical pool.
        regions: memory to register; None takes exactly what the buffers cover.

    Raises:
        InvalidInput: buffers and spec disagree, or the memory cannot be as described.
    """
    return _pool("page_first", spec, slots, _page_parts(buffers), regions)


def page_first_direct(
    spec: PoolSpec, slots: int, buffers: Sequence[PageBuffer], regions: Sequence[Region] | None = None
) -> HostPool:
    """Return the pool whose pages are whole, layers outside and tokens inside; otherwise as `page_first`."""
    return _pool("page_first_direct", spec, slots, _page_parts(buffers), regions)


def layer_first(
    spec: PoolSpec, slots: int, buffers: Sequence[LayerBuffers], regions: Sequence[Region] | None = None
) -> HostPool:
    """Return the pool that keeps every layer's pages apart; otherwise as `page_first`."""
    parts = [
        HostPart(
            b.part, tuple(Fragment(a, _given(b.stride, b.layer_bytes), b.layer_bytes) for a in b.addresses)
        )
        for b in buffers
        if b.layer_bytes != 0 and b.addresses
    ]
    return _pool("layer_first", spec, slots, parts, regions)


def slots_of(host_indices: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
    """Return the page slots behind the indices of a token-indexed engine.

    Args:
        host_indices: integers, (pages * page_size,): one a token, whole pages, each from its first token on.
        page_size: tokens in a page.

    Returns:
        int64, (pages,).

    Raises:
        InvalidInput: a page that is incomplete, starts off a page boundary, or is not contiguous.
    """
    if page_size < 1:
        raise _refused("the page size is no size", "page_size", "out_of_range", f"is {page_size}, at least 1")
    tokens = _whole_numbers(host_indices, "the engine's host indices", "host_indices", ADDRESS_LIMIT)
    if tokens.size % page_size:
        detail = f"has {tokens.size} tokens, which is no multiple of the page size {page_size}"
        raise _refused("host indices must name whole pages", "host_indices", "incomplete_page", detail)
    pages = tokens.reshape(-1, page_size)
    slots, offsets = np.divmod(pages[:, 0], page_size)
    if offsets.any():
        at = int(np.flatnonzero(offsets)[0])
        detail = f"is {pages[at, 0]}, a page starts at a multiple of {page_size}"
        field_name = f"host_indices[{at * page_size}]"
        raise _refused("host indices must start on a page boundary", field_name, "unaligned", detail)
    broken = pages[:, 1:] != pages[:, :-1] + 1
    if broken.any():
        at = int(np.flatnonzero(broken.any(axis=1))[0])
        step = int(broken[at].argmax()) + 1
        detail = f"is {pages[at, step]} after {pages[at, step - 1]}, tokens of a page follow each other"
        field_name = f"host_indices[{at * page_size + step}]"
        raise _refused("host indices must be contiguous within a page", field_name, "not_contiguous", detail)
    return slots


def _page_parts(buffers: Sequence[PageBuffer]) -> list[HostPart]:
    return [
        HostPart(b.part, (Fragment(b.address, _given(b.stride, b.bytes), b.bytes),))
        for b in buffers
        if b.bytes != 0
    ]


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _pool(
    layout: ObjectLayout,
    spec: PoolSpec,
    slots: int,
    parts: list[HostPart],
    regions: Sequence[Region] | None,
) -> HostPool:
    errors = _spec_errors(spec, layout, parts)
    if errors:
        raise InvalidInput(f"the host memory of pool {spec.name!r} is not what its spec says", errors)
    covered = covered_regions(parts, slots) if regions is None else tuple(regions)
    return HostPool(spec.name, slots, tuple(parts), covered, layout)


def _spec_errors(spec: PoolSpec, layout: str, parts: list[HostPart]) -> list[FieldError]:
    errors: list[FieldError] = []
    # A logical pool has no bytes whose order could differ.
    if spec.object_layout != layout and not spec.logical:
        detail = f"is {spec.object_layout!r}, the memory is {layout!r}"
        errors.append(FieldError("object_layout", "mismatch", detail))
    said, found = [p.part for p in spec.parts], [p.part for p in parts]
    if said != found:
        detail = f"are {said}, the memory has {found}"
        return [*errors, FieldError("parts", "mismatch", detail)]
    for i, (part, host) in enumerate(zip(spec.parts, parts, strict=True)):
        if part.bytes != host.bytes:
            detail = f"is {part.bytes} for {part.part!r}, the memory has {host.bytes} a page"
            errors.append(FieldError(f"parts[{i}].bytes", "mismatch", detail))
    return errors


def _whole_numbers(values: Any, whose: str, field_name: str, bound: int) -> NDArray[np.int64]:
    """Return `values` as int64, (n,), all of them from 0 to `bound - 1`."""
    array = np.asarray(values)
    if array.ndim != 1:
        detail = f"has shape {array.shape}, give one dimension"
        raise _refused(f"{whose}: {field_name} must be a list", field_name, "bad_shape", detail)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        detail = f"has type {array.dtype}, give integers (the first is {array[0]!s})"
        raise _refused(f"{whose}: {field_name} must be integers", field_name, "not_integer", detail)
    if int(array.min()) < 0 or int(array.max()) >= bound:
        at = int(np.flatnonzero((array < 0) | (array >= bound))[0])
        detail = f"is {array[at]}, must be 0 to {bound - 1}"
        raise _refused(f"{whose} has no such place", f"{field_name}[{at}]", "out_of_range", detail)
    return array.astype(np.int64, copy=False)


def _refused(what: str, field_name: str, code: str, detail: str) -> InvalidInput:
    return InvalidInput(what, [FieldError(field_name, code, detail)])
