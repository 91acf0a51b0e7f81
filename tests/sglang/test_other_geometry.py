"""Engines of another shape under one model's name: never each other's bytes; the same shape: shared.

The control shows that the test can tell: SGLang's own Mooncake backend does serve the other engine's bytes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.sglang.engines import Engine, EngineSettings, same

pytestmark = pytest.mark.sglang

PAGES = 6
MODEL = "one-name-for-both"

OTHERS = {
    "half the heads, twice the width": {"head_num": 1, "head_dim": 128},
    "half the heads": {"head_num": 1},
    "twice the layers, half the heads": {"num_layers": 6, "head_num": 1},
    "another type of the same size": {"dtype": torch.float16},
}


def mooncake_extra(plane) -> dict:
    return {
        "master_server_address": plane.master,
        "protocol": "tcp",
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 0,
        "device_name": "",
    }


def served(writer: EngineSettings, reader: EngineSettings) -> tuple[int, bool]:
    """Return how many of the writer's tokens the reader got, and whether its bytes are the writer's."""
    with Engine(writer) as one:
        tokens = one.tokens(PAGES)
        made = one.produce(tokens)
        own = torch.cat([b.reshape(-1) for b in made])
    with Engine(reader) as two:
        got = two.prefetch(tokens)
        two.load_back(tokens)
        back = two.device_bytes(tokens) if got else []
        two.assert_at_rest(holds=bool(got))
    theirs = torch.cat([b.reshape(-1) for b in back]) if back else own[:0]
    return got, bool(len(theirs)) and same([theirs.sort()[0]], [own.sort()[0]])


@pytest.mark.parametrize("other", OTHERS)
def test_an_engine_of_another_shape_never_serves_this_one_smoke(plane, other):
    extra = plane.extra(model=f"{MODEL}-{plane.kind}-{other}".replace(" ", "-"))
    first = EngineSettings(extra=extra)
    second = EngineSettings(extra={**extra, "engine_id": "other"}, config=OTHERS[other])
    assert served(first, second) == (0, False)
    assert served(second, replace(first, extra={**extra, "engine_id": "third"}))[0] in {0, PAGES * 64}


def test_other_layouts_of_one_shape_do_not_meet(plane):
    extra = plane.extra(model=f"layouts-{plane.kind}")
    first = EngineSettings(extra=extra, io="direct/page_first_direct")
    second = EngineSettings(extra={**extra, "engine_id": "other"}, io="kernel/page_first")
    assert served(first, second) == (0, False)


def test_sglang_s_own_mooncake_backend_serves_the_wrong_bytes_smoke(mooncake_plane):
    """The control: with it, an engine of another shape is given as many tokens as were written."""
    extra = mooncake_extra(mooncake_plane)
    first = EngineSettings(backend="mooncake", extra={**extra, "extra_backend_tag": "control"})
    second = replace(first, config=OTHERS["half the heads, twice the width"])
    got, theirs = served(first, second)
    assert got == PAGES * 64
    assert theirs


def test_two_engines_of_one_shape_share(plane):
    extra = plane.extra(model=f"same-{plane.kind}")
    first = EngineSettings(extra=extra)
    assert served(first, replace(first, extra={**extra, "engine_id": "other"})) == (PAGES * 64, True)


@pytest.mark.parametrize(("written_by", "read_by"), [(1, 2), (2, 1)])
def test_mla_engines_of_two_widths_share(file_plane, written_by, read_by):
    """Every rank of an MLA engine holds all of KV, so that TP 1 and TP 2 mean the same objects."""
    extra = file_plane.extra(model=f"mla-{written_by}-{read_by}")
    first = EngineSettings(model="mla", extra=extra, place=_width(written_by))
    second = EngineSettings(model="mla", extra={**extra, "engine_id": "other"}, place=_width(read_by))
    assert served(first, second) == (PAGES * 64, True)


def test_mha_engines_of_two_widths_do_not_share(file_plane):
    extra = file_plane.extra(model="mha-widths")
    first = EngineSettings(extra=extra)
    second = EngineSettings(extra={**extra, "engine_id": "other"}, place=_width(2))
    assert served(first, second) == (0, False)


def _width(size: int) -> dict[str, int]:
    """Rank 0 of an engine of this width; what it reads and writes does not depend on the others."""
    if size == 1:
        return {}
    return {"tp_size": size, "attn_tp_size": size, "moe_tp_size": size}
