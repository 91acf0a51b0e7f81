import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.host_pool import (
    Buffers,
    Fragment,
    HostPart,
    HostPool,
    LayerBuffers,
    PageBuffer,
    Region,
    layer_first,
    page_first,
    page_first_direct,
    registration_chunks,
    slots_of,
)
from metadata.errors import InvalidInput
from metadata.pools import Part, PoolSpec

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "data" / "sglang_page_buffers.json").read_text())
BASE = 0x7F00_0000_0000


def spec_of(*sizes, layout="page_first", logical=False):
    parts = tuple(Part(f"p{i}", "uint8", size) for i, size in enumerate(sizes))
    return PoolSpec("pool", parts, object_layout=layout, logical=logical)


def field_of(caught):
    return [(e.field, e.code) for e in caught.value.errors]


# --- against SGLang's own numbers -------------------------------------------------------------------------


def token_rows(case):
    """Bytes of one layer of one page, for each part, from the geometry of an MHA or MLA pool."""
    if case["kind"] == "mla":
        return {"kv": case["token_bytes"] * case["tokens_held"]}
    return {part: size * case["page_size"] for part, size in case["token_bytes"].items()}


def layer_rows(case):
    match case["kind"]:
        case "logical":
            return {}
        case "paged":
            return {"page": case["layer_bytes"]}
        case "mamba":
            return case["state_bytes"]
        case _:
            return token_rows(case)


def rebuild(case, bases):
    """Our pool for the geometry of a case whose tensors lie at `bases`."""
    rows, layers, slots = layer_rows(case), case.get("layers", 0), case["slots"]
    spec = PoolSpec(
        case["name"],
        tuple(Part(part, "uint8", row * layers) for part, row in rows.items()),
        logical=case["kind"] == "logical",
        object_layout=case["layout"],
    )
    regions = [Region(base, size) for base, size in zip(bases, case["tensor_bytes"], strict=True) if size]
    if case["layout"] == "layer_first" and case["kind"] == "paged":
        return layer_first(spec, slots, [LayerBuffers("page", tuple(bases), rows["page"])], regions)
    starts, at = {}, 0
    for i, (part, row) in enumerate(rows.items()):
        own_tensor = len(bases) == len(rows)
        starts[part] = bases[i] if own_tensor else bases[0] + at
        at += row * layers * slots
    if case["layout"] == "layer_first":
        buffers = [LayerBuffers.packed(part, starts[part], layers, slots, row) for part, row in rows.items()]
        return layer_first(spec, slots, buffers, regions)
    make = {"page_first": page_first, "page_first_direct": page_first_direct}[case["layout"]]
    return make(
        spec, slots, [PageBuffer(part, starts[part], row * layers) for part, row in rows.items()], regions
    )


def in_sglang_order(found: Buffers, layout):
    """Flat addresses and lengths. SGLang lists a layer-first page layer by layer, parts inside; we keep a
    part's layers together, as they are one object."""
    columns = range(found.part_starts[-1])
    if layout == "layer_first":
        by_part = [range(a, b) for a, b in itertools.pairwise(found.part_starts)]
        columns = list(itertools.chain.from_iterable(zip(*by_part, strict=True)))
    return found.addresses[:, columns].ravel().tolist(), found.lengths[:, columns].ravel().tolist()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{c['name']}-{c['layout']}")
def test_addresses_and_lengths_are_those_that_sglang_gives(case):
    bases = [BASE + (i << 36) if size else 0 for i, size in enumerate(case["tensor_bytes"])]
    pool = rebuild(case, bases)
    size = case["page_size"]
    indices = (np.array(case["pages"])[:, None] * size + np.arange(size)).ravel()
    addresses, lengths = in_sglang_order(pool.buffers(slots_of(indices, size)), case["layout"])
    assert addresses == [bases[tensor] + offset for tensor, offset, _ in case["buffers"]]
    assert lengths == [length for _, _, length in case["buffers"]]


def test_golden_data_covers_every_pool_in_every_layout_it_supports():
    seen = {(c["kind"], c["layout"]) for c in GOLDEN["cases"]}
    page_first_ones = {"mha", "mla", "paged", "logical", "mamba"}
    assert {k for k, layout in seen if layout == "page_first"} == page_first_ones
    assert {k for k, layout in seen if layout == "page_first_direct"} == page_first_ones
    assert {k for k, layout in seen if layout == "layer_first"} == page_first_ones - {"mamba"}


@pytest.mark.sglang
def test_golden_data_is_what_the_installed_sglang_answers():
    pytest.importorskip("torch")
    pytest.importorskip("sglang")
    script = HERE / "make_sglang_page_buffers.py"
    done = subprocess.run([sys.executable, script, "--check"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- slots ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "field", "code", "says"),
    [
        ([0, -1], "slots[1]", "out_of_range", "is -1, must be 0 to 7"),
        ([0, 1, 8], "slots[2]", "out_of_range", "is 8, must be 0 to 7"),
        (np.array([2**64 - 1], dtype=np.uint64), "slots[0]", "out_of_range", f"is {2**64 - 1}"),
        ([1.0], "slots", "not_integer", "float64"),
        ([True], "slots", "not_integer", "bool"),
        (["1"], "slots", "not_integer", "give integers"),
        ([2**70], "slots", "not_integer", str(2**70)),
        ([[0]], "slots", "bad_shape", "(1, 1)"),
        (3, "slots", "bad_shape", "()"),
    ],
)
def test_slots_outside_the_pool_are_refused_before_any_address_is_made(slots, field, code, says):
    pool = page_first(spec_of(4), 8, [PageBuffer("p0", BASE, 4)])
    with pytest.raises(InvalidInput) as caught:
        pool.buffers(slots)
    assert field_of(caught) == [(field, code)]
    assert says in caught.value.errors[0].detail


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_type_gives_the_same_addresses(dtype):
    pool = page_first(spec_of(1 << 33), 100, [PageBuffer("p0", BASE, 1 << 33)])
    found = pool.buffers(np.array([99, 0], dtype=dtype))
    assert found.addresses.dtype == np.uint64
    assert found.lengths.dtype == np.int64
    assert found.addresses.tolist() == [[BASE + (99 << 33)], [BASE]]
    assert found.lengths.tolist() == [[1 << 33], [1 << 33]]


def test_no_pages_give_no_addresses():
    pool = page_first(spec_of(4, 6), 8, [PageBuffer("p0", BASE, 4), PageBuffer("p1", BASE + 4096, 6)])
    found = pool.buffers([])
    assert found.addresses.shape == found.lengths.shape == (0, 2)
    assert found.objects() == ([], [])


def test_objects_come_page_by_page_and_parts_with_different_fragments_stay_apart():
    parts = (
        HostPart("k", (Fragment(1000, 10, 10), Fragment(2000, 10, 10))),
        HostPart("scale", (Fragment(3000, 4, 3),)),
    )
    pool = HostPool("kv", 5, parts, (Region(1000, 3000),), "layer_first")
    assert pool.bytes_per_page == 23
    found = pool.buffers(np.array([4, 1]))
    assert found.objects() == (
        [[1040, 2040], [3016], [1010, 2010], [3004]],
        [[10, 10], [3], [10, 10], [3]],
    )
    addresses, lengths = found.of_part(1)
    assert addresses.tolist() == [[3016], [3004]]
    assert lengths.tolist() == [[3], [3]]


def test_lengths_cannot_be_changed_behind_the_pool():
    found = page_first(spec_of(4), 8, [PageBuffer("p0", BASE, 4)]).buffers([0, 1])
    with pytest.raises(ValueError, match="read-only"):
        found.lengths[0, 0] = 5


# --- token indices ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1 << 40), max_size=20), st.integers(1, 300))
def test_slots_come_back_from_the_indices_of_their_tokens(pages, page_size):
    slots = np.array(pages, dtype=np.int64)
    indices = (slots[:, None] * page_size + np.arange(page_size)).ravel()
    assert slots_of(indices, page_size).tolist() == pages


@pytest.mark.parametrize(
    ("indices", "page_size", "field", "code"),
    [
        ([0, 1, 2], 2, "host_indices", "incomplete_page"),
        ([0, 1, 3, 4], 2, "host_indices[2]", "unaligned"),
        ([0, 1, 2, 4], 2, "host_indices[3]", "not_contiguous"),
        ([0, 1, 3, 2], 2, "host_indices[2]", "unaligned"),
        ([0, 1, 2, 3, 4, 5, 7, 6], 4, "host_indices[6]", "not_contiguous"),
        ([-2, -1], 2, "host_indices[0]", "out_of_range"),
        ([0.0, 1.0], 2, "host_indices", "not_integer"),
        ([[0, 1]], 2, "host_indices", "bad_shape"),
        ([0], 0, "page_size", "out_of_range"),
    ],
)
def test_indices_that_are_not_whole_pages_are_refused(indices, page_size, field, code):
    with pytest.raises(InvalidInput) as caught:
        slots_of(indices, page_size)
    assert field_of(caught) == [(field, code)]


@given(st.integers(2, 8), st.integers(1, 5), st.data())
def test_one_wrong_token_index_is_always_noticed(page_size, pages, data):
    indices = np.arange(pages * page_size)
    at = data.draw(st.integers(0, indices.size - 1))
    indices[at] += data.draw(st.integers(1, 100))
    with pytest.raises(InvalidInput):
        slots_of(indices, page_size)


# --- building from a spec ---------------------------------------------------------------------------------


def test_parts_of_no_bytes_are_dropped_as_the_spec_drops_them():
    spec = spec_of(0, 8)
    pool = page_first(spec, 4, [PageBuffer("p0", 0, 0), PageBuffer("p1", BASE, 8)])
    assert [p.part for p in pool.parts] == [p.part for p in spec.parts] == ["p1"]
    layered = layer_first(
        spec_of(0, 0, 8, layout="layer_first"),
        4,
        [LayerBuffers("p0", (0, 0), 0), LayerBuffers("p1", (), 4), LayerBuffers.packed("p2", BASE, 2, 4, 4)],
    )
    assert [p.part for p in layered.parts] == ["p2"]


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_a_logical_pool_has_slots_but_nothing_to_register(layout):
    pool = page_first(spec_of(layout=layout, logical=True), 8, [])
    assert pool.regions == ()
    assert pool.registration_chunks(1) == []
    assert pool.buffers([7]).addresses.shape == (1, 0)
    with pytest.raises(InvalidInput, match="must be 0 to 7"):
        pool.buffers([8])
    with pytest.raises(InvalidInput) as caught:
        page_first(spec_of(logical=True), 8, [], [Region(BASE, 10)])
    assert field_of(caught) == [("regions", "logical")]


@pytest.mark.parametrize(
    ("buffers", "field"),
    [
        ([PageBuffer("p0", BASE, 8)], "parts"),
        ([PageBuffer("p1", BASE, 9), PageBuffer("p0", BASE + 4096, 8)], "parts"),
        ([PageBuffer("p0", BASE, 8), PageBuffer("p1", BASE + 4096, 10)], "parts[1].bytes"),
        ([], "parts"),
    ],
)
def test_memory_that_is_not_what_the_spec_says_is_refused(buffers, field):
    with pytest.raises(InvalidInput) as caught:
        page_first(spec_of(8, 9), 4, buffers)
    assert field_of(caught) == [(field, "mismatch")]


def test_a_layout_that_is_not_the_specs_is_refused():
    with pytest.raises(InvalidInput) as caught:
        page_first_direct(spec_of(8), 4, [PageBuffer("p0", BASE, 8)])
    assert field_of(caught) == [("object_layout", "mismatch")]


def test_layers_count_towards_the_bytes_of_a_part():
    spec = spec_of(12, layout="layer_first")
    assert layer_first(spec, 4, [LayerBuffers.packed("p0", BASE, 3, 4, 4)]).parts[0].bytes == 12
    with pytest.raises(InvalidInput, match="the memory has 8 a page"):
        layer_first(spec, 4, [LayerBuffers.packed("p0", BASE, 2, 4, 4)])


def test_regions_are_what_the_buffers_cover_and_separate_buffers_stay_separate():
    side_by_side = page_first(
        spec_of(4, 6), 3, [PageBuffer("p0", BASE, 4, stride=16), PageBuffer("p1", BASE + 4, 6, stride=16)]
    )
    assert side_by_side.regions == (Region(BASE, 42),)
    touching = page_first(spec_of(4, 4), 3, [PageBuffer("p0", BASE, 4), PageBuffer("p1", BASE + 12, 4)])
    assert touching.regions == (Region(BASE, 12), Region(BASE + 12, 12))


def test_a_fragment_inside_another_ones_gap_is_covered_once():
    spec = spec_of(4, 4)
    inner = [PageBuffer("p0", BASE, 4, stride=100), PageBuffer("p1", BASE + 50, 4, stride=100)]
    assert page_first(spec, 2, inner).regions == (Region(BASE, 154),)
    # One slot: the second fragment lies behind the first, not in a gap of it.
    assert len(page_first(spec, 1, inner).regions) == 2


def test_a_buffer_inside_another_one_is_refused_as_overlap_and_nothing_else():
    with pytest.raises(InvalidInput) as caught:
        page_first(spec_of(10, 2), 2, [PageBuffer("p0", BASE, 10), PageBuffer("p1", BASE + 2, 2, stride=10)])
    assert field_of(caught) == [("parts[1].fragments[0]", "overlap")]


# --- memory that cannot be as described -------------------------------------------------------------------


EVERYTHING = (Region(1, 1 << 40),)


def refused(parts, slots=4, regions=EVERYTHING):
    with pytest.raises(InvalidInput) as caught:
        HostPool("kv", slots, parts, regions)
    return field_of(caught)


def one(*fragments):
    return (HostPart("k", tuple(Fragment(*f) for f in fragments)),)


def test_numbers_that_describe_no_memory_are_refused():
    assert refused(one((100, 8, 8)), slots=0) == [("slots", "out_of_range")]
    assert refused(one((100, 8, 0))) == [("parts[0].fragments[0]", "overlap")]
    assert refused(one((100, 7, 8))) == [("parts[0].fragments[0]", "overlap")]
    assert refused(one((0, 8, 8))) == [("parts[0].fragments[0]", "out_of_range")]
    assert refused(one((-8, 8, 8))) == [("parts[0].fragments[0]", "out_of_range")]
    assert refused(one((100, 1 << 62, 8))) == [("parts[0].fragments[0]", "out_of_range")]
    assert refused(one((100, 1 << 63, 8)), slots=1) == [("parts[0].fragments[0]", "out_of_range")]
    assert refused((HostPart("k", ()),)) == [("parts[0]", "empty")]
    assert refused(one((100, 8, 8)) + one((200, 8, 8))) == [("parts", "duplicate")]


@pytest.mark.parametrize("region", [Region(0, 4096), Region(4096, 0), Region(100, (1 << 63) - 100)])
def test_a_region_that_is_no_memory_is_refused(region):
    assert refused(one((200, 8, 8)), regions=(region,)) == [("regions[0]", "out_of_range")]


def test_regions_that_share_bytes_are_refused():
    regions = (Region(1000, 100), Region(100, 901))
    assert refused(one((100, 8, 8)), regions=regions) == [("regions[0]", "overlap")]
    HostPool("kv", 4, one((100, 8, 8)), (Region(1000, 100), Region(100, 900)))


@pytest.mark.parametrize(
    "regions",
    [
        (),
        (Region(101, 100),),
        (Region(100, 31),),
        (Region(1, 99),),
        (Region(100, 16), Region(116, 16)),
    ],
)
def test_a_fragment_outside_one_region_is_refused(regions):
    assert refused(one((100, 8, 8)), regions=regions) == [("parts[0].fragments[0]", "outside")]


def test_the_smallest_region_that_holds_the_fragment_is_enough():
    assert HostPool("kv", 4, one((100, 8, 8)), (Region(100, 32),)).slots == 4


def test_overlap_names_both_fragments():
    parts = (HostPart("k", (Fragment(100, 8, 8),)), HostPart("v", (Fragment(300, 8, 8), Fragment(124, 8, 8))))
    with pytest.raises(
        InvalidInput, match=r"parts\[1\].fragments\[1\]: of 'v' .* parts\[0\].fragments\[0\] of 'k'"
    ):
        HostPool("kv", 4, parts, (Region(1, 1000),))


def test_ranges_that_meet_with_different_strides_are_refused():
    assert refused(one((100, 20, 2), (110, 30, 2))) == [("parts[0].fragments[1]", "overlap")]


def places(fragments, slots):
    """Every (start, end) of every fragment and slot."""
    return sorted(
        (f.base + s * f.stride, f.base + s * f.stride + f.length) for f in fragments for s in range(slots)
    )


@given(
    st.integers(1, 6),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(1, 120), st.integers(1, 8)), min_size=1, max_size=5),
)
def test_fragments_of_one_stride_are_refused_exactly_when_two_slots_share_a_byte(slots, stride, drawn):
    fragments = [Fragment(base, stride, min(length, stride)) for base, length in drawn]
    bytes_used = [b for start, end in places(fragments, slots) for b in range(start, end)]
    parts = (HostPart("k", tuple(fragments)),)
    if len(set(bytes_used)) == len(bytes_used):
        HostPool("kv", slots, parts, (Region(1, 1000),))
    else:
        with pytest.raises(InvalidInput):
            HostPool("kv", slots, parts, (Region(1, 1000),))


# --- properties of every pool that can be built -----------------------------------------------------------


@st.composite
def pools(draw):
    """Pools of all layouts: packed or with gaps, parts apart or side by side, spare bytes in the regions."""
    slots, pad = draw(st.integers(1, 6)), st.integers(0, 5)
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    layout = draw(st.sampled_from(["page_first", "page_first_direct", "layer_first", "side_by_side"]))
    at, regions = BASE, []
    if layout == "side_by_side":
        gaps = [draw(pad) for _ in sizes]
        stride = sum(sizes) + sum(gaps)
        starts = [BASE + sum(sizes[:i]) + sum(gaps[:i]) for i in range(len(sizes))]
        buffers = [
            PageBuffer(f"p{i}", s, n, stride) for i, (s, n) in enumerate(zip(starts, sizes, strict=True))
        ]
        return page_first(spec_of(*sizes), slots, buffers, [Region(BASE - draw(pad), stride * slots + 10)])
    buffers, parts = [], []
    for i, size in enumerate(sizes):
        layers = draw(st.integers(1, 3)) if layout == "layer_first" else 1
        stride, first = size + draw(pad), at + draw(pad)
        run = stride * slots
        addresses = tuple(first + layer * (run + 3) for layer in range(layers))
        end = addresses[-1] + run + draw(pad)
        regions.append(Region(at, end - at))
        at = end + draw(pad)
        parts.append(size * layers)
        if layout == "layer_first":
            buffers.append(LayerBuffers(f"p{i}", addresses, size, stride))
        else:
            buffers.append(PageBuffer(f"p{i}", first, size, stride))
    make = {"page_first": page_first, "page_first_direct": page_first_direct, "layer_first": layer_first}[
        layout
    ]
    return make(spec_of(*parts, layout=layout), slots, buffers, regions)


def all_places(pool):
    found = pool.buffers(np.arange(pool.slots))
    starts, lengths = found.addresses.ravel().tolist(), found.lengths.ravel().tolist()
    return sorted((a, a + n) for a, n in zip(starts, lengths, strict=True))


@given(pools())
def test_addresses_of_distinct_slots_parts_and_fragments_never_share_a_byte(pool):
    for (_, end), (start, _) in itertools.pairwise(all_places(pool)):
        assert end <= start


@given(pools())
def test_addresses_are_always_inside_a_region(pool):
    for start, end in all_places(pool):
        assert any(r.address <= start and end <= r.end for r in pool.regions)


@given(pools())
def test_a_page_has_the_bytes_of_its_spec(pool):
    assert pool.buffers([0]).lengths.sum() == pool.bytes_per_page
    addresses, lengths = pool.buffers(np.arange(pool.slots)).objects()
    assert len(addresses) == pool.slots * len(pool.parts)
    assert [sum(n) for n in lengths] == [p.bytes for p in pool.parts] * pool.slots


@given(pools(), st.integers(1, 80))
def test_chunks_tile_the_regions_and_never_split_a_fragment(pool, max_bytes):
    longest = max(f.length for p in pool.parts for f in p.fragments)
    if longest > max_bytes:
        with pytest.raises(InvalidInput, match=f"set it to at least {longest} "):
            pool.registration_chunks(max_bytes)
        return
    chunks = pool.registration_chunks(max_bytes)
    assert all(0 < c.length <= max_bytes for c in chunks)
    covered = [b for c in chunks for b in range(c.address, c.end)]
    assert covered == [b for r in pool.regions for b in range(r.address, r.end)]
    for start, end in all_places(pool):
        assert any(c.address <= start and end <= c.end for c in chunks)


def test_regions_that_fit_are_registered_whole():
    pool = page_first(spec_of(8, 8), 4, [PageBuffer("p0", BASE, 8), PageBuffer("p1", BASE + 32, 8)])
    assert pool.registration_chunks(32) == list(pool.regions)


def test_a_registration_size_below_one_is_refused():
    pool = page_first(spec_of(8), 4, [PageBuffer("p0", BASE, 8)])
    with pytest.raises(InvalidInput, match="at least 1"):
        pool.registration_chunks(0)


def test_chunks_of_a_terabyte_do_not_overflow():
    page = 6_439_680
    pool = page_first(spec_of(page), 170_000, [PageBuffer("p0", BASE, page)])
    chunks = pool.registration_chunks(1 << 31)
    assert sum(c.length for c in chunks) == page * 170_000
    assert all(c.length % page == 0 for c in chunks)


def of_pages(page, slots, base=BASE, length=0):
    """A pool of pages in a row, in a region that may be larger than they are."""
    region = Region(BASE, length or page * slots)
    return page_first(spec_of(page), slots, [PageBuffer("p0", base, page)], [region])


def test_pools_that_share_a_region_are_cut_where_no_page_of_either_is():
    chunks = registration_chunks([of_pages(6, 10), of_pages(10, 6)], 32)
    assert [(c.address - BASE, c.length) for c in chunks] == [(0, 30), (30, 30)]


def test_a_region_of_two_pools_is_registered_once_and_others_in_the_order_of_the_pools():
    one, two = of_pages(6, 10), of_pages(10, 6)
    other = page_first(spec_of(8), 4, [PageBuffer("p0", BASE + 4096, 8)])
    assert registration_chunks([one, other, two], 1 << 20) == [*one.regions, *other.regions]


def test_shared_memory_whose_pages_leave_no_place_to_cut_is_refused():
    with pytest.raises(InvalidInput, match="overlap all the way"):
        registration_chunks([of_pages(10, 4, length=45), of_pages(10, 4, base=BASE + 5, length=45)], 12)
