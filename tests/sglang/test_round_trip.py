"""What one engine wrote back, another restores byte for byte, through SGLang's own tree and controller."""

from __future__ import annotations

import pytest

from tests.sglang.engines import CONFIGS, Engine, EngineSettings, same

pytestmark = pytest.mark.sglang

PAGES = 6
PAGE_FIRST = ("direct/page_first_direct", "kernel/page_first")


def round_trip(plane, **settings) -> tuple[bool, bool]:
    """Return whether a second engine had the bytes before and after it restored them."""
    extra = plane.extra()
    with Engine(EngineSettings(extra=extra, **settings)) as first:
        tokens = first.tokens(PAGES)
        made = first.produce(tokens)
        first.assert_at_rest(holds=True)
    with Engine(EngineSettings(extra={**extra, "engine_id": "second"}, **settings)) as second:
        second.fill(8)
        before = same(made, second.device_bytes(tokens))
        restored = second.restored(tokens)
        second.assert_at_rest(holds=True)
    return before, same(made, restored)


@pytest.mark.parametrize("model", CONFIGS)
def test_bytes_come_back_on_both_stores_smoke(plane, model):
    assert round_trip(plane, model=model) == (False, True)


# SGLang's copy kernel for Mamba states runs on a GPU only; its other layout is above.
@pytest.mark.parametrize("model", sorted(name for name in CONFIGS if "mamba" not in name))
def test_bytes_come_back_in_page_first_layout(file_plane, model):
    assert round_trip(file_plane, model=model, io="kernel/page_first") == (False, True)


@pytest.mark.parametrize("model", ["full", "mla", "swa"])
@pytest.mark.parametrize("io", ["kernel/layer_first", "direct/layer_first"])
def test_bytes_come_back_layer_by_layer(plane, model, io):
    assert round_trip(plane, model=model, io=io) == (False, True)


@pytest.mark.parametrize("model", ["full", "mla", "swa", "deepseek-v4"])
@pytest.mark.parametrize("io", PAGE_FIRST)
def test_bytes_come_back_where_the_host_is_only_a_buffer_smoke(plane, model, io):
    assert round_trip(plane, model=model, io=io, mode="buffer_only") == (False, True)


@pytest.mark.parametrize("model", ["full", "swa", "mamba"])
def test_bytes_come_back_with_the_tree_core_in_rust_smoke(file_plane, model):
    assert round_trip(file_plane, model=model, core="rust") == (False, True)
