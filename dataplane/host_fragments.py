"""The pieces that a host pool's memory is made of, and what must hold between them.

`host_pool` says what a fragment is for; here is what makes a set of them safe: none leaves the registered
memory, no two share a byte.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metadata.errors import FieldError

ADDRESS_LIMIT: Final = 1 << 63
"""Above every user-space address, and low enough that the arithmetic below cannot overflow an int64."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of bytes that every slot has once.

    Attributes:
        base: address of slot 0's bytes.
        stride: bytes from one slot's to the next slot's.
        length: bytes of one slot.
    """

    base: int
    stride: int
    length: int

    def end(self, slots: int) -> int:
        """Return the address behind the last of `slots` slots."""
        return self.base + (slots - 1) * self.stride + self.length


@dataclass(frozen=True, slots=True)
class HostPart:
    """Where one part of every page lies.

    Attributes:
        part: the part's name, as in the pool's spec.
        fragments: in the order in which they make up the object.
    """

    part: str
    fragments: tuple[Fragment, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the part in one page: the size of its object."""
        return sum(f.length for f in self.fragments)


@dataclass(frozen=True, slots=True)
class Region:
    """Memory to register with the transport: `length` bytes from `address`."""

    address: int
    length: int

    @property
    def end(self) -> int:
        """Address behind the last byte."""
        return self.address + self.length


class Columns(NamedTuple):
    """All fragments of a pool side by side; each array is int64, (fragments,)."""

    bases: NDArray[np.int64]
    strides: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ends: NDArray[np.int64]
    part_starts: tuple[int, ...]
    owners: tuple[str, ...]


def covered_regions(parts: Sequence[HostPart], slots: int) -> tuple[Region, ...]:
    """Return one region for each run of interleaved fragments.

    Runs that only touch stay apart: they may be separate allocations.
    """
    regions: list[Region] = []
    for fragment in sorted((f for p in parts for f in p.fragments), key=lambda f: f.base):
        end = fragment.end(slots)
        if regions and fragment.base < regions[-1].end:
            last = regions.pop()
            regions.append(Region(last.address, max(last.end, end) - last.address))
        else:
            regions.append(Region(fragment.base, end - fragment.base))
    return tuple(regions)


def columns_of(parts: Sequence[HostPart], slots: int) -> Columns:
    """Return the fragments of all parts side by side."""
    fragments = [f for p in parts for f in p.fragments]
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part.fragments))
    return Columns(
        np.array([f.base for f in fragments], dtype=np.int64),
        np.array([f.stride for f in fragments], dtype=np.int64),
        np.array([f.length for f in fragments], dtype=np.int64),
        np.array([f.end(slots) for f in fragments], dtype=np.int64),
        tuple(starts),
        tuple(p.part for p in parts for _ in p.fragments),
    )


def memory_errors(parts: Sequence[HostPart], slots: int, regions: Sequence[Region]) -> list[FieldError]:
    """Return what makes these parts of `slots` pages unusable, with the field at fault; empty if nothing."""
    # Numbers first: without errors in them the vectorised checks cannot overflow.
    errors = _number_errors(parts, slots, regions)
    if errors:
        return errors
    table = columns_of(parts, slots)
    return _shared_region_errors(regions) + _outside_errors(table, regions) + _overlap_errors(table)


def _number_errors(parts: Sequence[HostPart], slots: int, regions: Sequence[Region]) -> list[FieldError]:
    errors: list[FieldError] = []
    if slots < 1:
        errors.append(FieldError("slots", "out_of_range", f"is {slots}, must be at least 1"))
    if regions and not parts:
        errors.append(FieldError("regions", "logical", "a pool without parts has no memory to register"))
    names = [p.part for p in parts]
    if len(set(names)) != len(names):
        errors.append(FieldError("parts", "duplicate", f"are {names}, name each once"))
    for i, part in enumerate(parts):
        if not part.fragments:
            errors.append(FieldError(f"parts[{i}]", "empty", f"{part.part!r} has no bytes; leave it out"))
        for j, fragment in enumerate(part.fragments):
            errors += _fragment_errors(f"parts[{i}].fragments[{j}]", fragment, slots)
    for i, region in enumerate(regions):
        if region.address < 1 or region.length < 1 or region.end >= ADDRESS_LIMIT:
            detail = f"{region.length} bytes at {region.address:#x} are no memory"
            errors.append(FieldError(f"regions[{i}]", "out_of_range", detail))
    return errors


def _fragment_errors(field_name: str, fragment: Fragment, slots: int) -> list[FieldError]:
    if fragment.length < 1 or fragment.stride < fragment.length:
        detail = f"has {fragment.length} bytes every {fragment.stride}: slots would overlap"
        return [FieldError(field_name, "overlap", detail)]
    # An empty tensor's data pointer is 0: caught here, not by the transport.
    if fragment.base < 1 or max(fragment.end(slots), fragment.stride) >= ADDRESS_LIMIT:
        detail = f"{slots} slots from {fragment.base:#x} on leave the address space"
        return [FieldError(field_name, "out_of_range", detail)]
    return []


def _shared_region_errors(regions: Sequence[Region]) -> list[FieldError]:
    """Return the regions that share bytes: a transport refuses to register memory twice."""
    errors: list[FieldError] = []
    order = sorted(range(len(regions)), key=lambda i: regions[i].address)
    for before, i in pairwise(order):
        if regions[before].end > regions[i].address:
            errors.append(FieldError(f"regions[{i}]", "overlap", f"shares bytes with regions[{before}]"))
    return errors


def _outside_errors(table: Columns, regions: Sequence[Region]) -> list[FieldError]:
    ordered = sorted(regions, key=lambda r: r.address)
    starts = np.array([r.address for r in ordered], dtype=np.int64)
    ends = np.array([0, *(r.end for r in ordered)], dtype=np.int64)
    # Index 0 of `ends` stands for "in front of every region".
    outside = table.ends > ends[np.searchsorted(starts, table.bases, side="right")]
    return [
        FieldError(_column_name(table, i), "outside", f"of {table.owners[i]!r} does not lie in one region")
        for i in np.flatnonzero(outside)
    ]


def _overlap_errors(table: Columns) -> list[FieldError]:
    """Return the fragments that share bytes with another one, for any two slots.

    Two fragments with the same stride whose extents meet share bytes exactly when their places within a
    stride do. With different strides they drift against each other: no layout does that, so it is refused
    without a closer look.
    """
    errors: list[FieldError] = []
    order = np.argsort(table.bases, kind="stable")
    bases, strides, lengths, ends = (a[order] for a in table[:4])
    for at in range(1, len(order)):
        near = np.flatnonzero(ends[:at] > bases[at])
        if near.size == 0:
            continue
        other_stride = strides[near] != strides[at]
        place = (bases[at] - bases[near]) % strides[at]
        clash = (place < lengths[near]) | (place + lengths[at] > strides[at]) | other_stride
        if clash.any():
            other = order[near[clash][0]]
            detail = f"of {table.owners[order[at]]!r} shares bytes, or a range with another stride, with "
            detail += f"{_column_name(table, other)} of {table.owners[other]!r}"
            errors.append(FieldError(_column_name(table, order[at]), "overlap", detail))
    return errors


def _column_name(table: Columns, column: np.int64) -> str:
    part = int(np.searchsorted(table.part_starts, column, side="right")) - 1
    return f"parts[{part}].fragments[{int(column) - table.part_starts[part]}]"
