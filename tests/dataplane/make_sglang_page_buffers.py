"""Write `data/sglang_page_buffers.json`: where the real SGLang says that its host pools' pages lie.

    python make_sglang_page_buffers.py           write the file
    python make_sglang_page_buffers.py --check   compare instead, exit 1 where they differ

Needs SGLang 0.5.23 and a CPU build of torch; nothing else of this repository. Builds SGLang's own host pools
for small geometries, asks each for `get_page_buffer_meta(indices)` and writes the answer as numbers: per
buffer which tensor it is in, its offset there, its length. Addresses of a run mean nothing in the next one.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

# The CUDA build of torchvision does not load its operators on a CPU; its import only needs their schemas.
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    _TORCHVISION.define(_schema)

from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.memory_pool_host import (  # noqa: E402
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

VERSION = "0.5.23"
FILE = Path(__file__).parent / "data" / "sglang_page_buffers.json"
PAGE_FIRST = ("page_first", "page_first_direct")
ALL_LAYOUTS = (*PAGE_FIRST, "layer_first")

Case = dict[str, Any]


def main() -> int:
    """Make the cases and write them, or compare them with the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    check = parser.parse_args().check
    if version("sglang") != VERSION:
        print(f"SGLang {version('sglang')} is installed, the file is made from {VERSION}", file=sys.stderr)
        return 2
    text = as_text(make_cases())
    if not check:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(text)
        return 0
    if FILE.read_text() == text:
        return 0
    print(f"{FILE.name} is not what SGLang {VERSION} answers", file=sys.stderr)
    return 1


def as_text(cases: list[Case]) -> str:
    """Return the file's text: one case a line, so that a difference shows its case."""
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    return f'{{"sglang":"{VERSION}","cases":[\n{lines}\n]}}\n'


def make_cases() -> list[Case]:
    """Return the answers of all pools in all layouts that they support."""
    get_context().override_server_args().install()
    get_parallel().override_permanently(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_rank=0)
    cases: list[Case] = []
    for layout in ALL_LAYOUTS:
        cases.append(mha("mha", layout, layers=3, heads=2, k_dim=16, v_dim=16, page_size=8, slots=12))
        cases.append(mha("swa", layout, layers=4, heads=2, k_dim=16, v_dim=16, page_size=8, slots=5))
        cases.append(mla(layout, layers=3, row=576, page_size=4, slots=9, dcp=1))
        cases.append(mla(layout, layers=3, row=576, page_size=8, slots=9, dcp=2))
        cases.append(logical(layout, page_size=256, slots=6))
        # Layers and bytes a layer and page of DeepSeek V4 Flash.
        cases.append(paged("swa", layout, layers=43, layer_bytes=149_760, slots=3))
        cases.append(paged("deepseek_v4_c4", layout, layers=21, layer_bytes=37_440, slots=6))
        cases.append(paged("deepseek_v4_c4_indexer", layout, layers=21, layer_bytes=8_448, slots=6))
        cases.append(paged("deepseek_v4_c128", layout, layers=20, layer_bytes=1_728, slots=6))
        cases += states(layout, slots=4)
    for layout in PAGE_FIRST:
        cases.append(
            mha("mha_asymmetric", layout, layers=3, heads=2, k_dim=24, v_dim=16, page_size=8, slots=7)
        )
        cases.append(mamba("mamba", layout, layers=3, temporal=(2, 8, 16), convs=((24, 3), (8, 3)), slots=7))
        cases.append(mamba("mamba_conv_only", layout, layers=2, temporal=(0,), convs=((24, 3),), slots=7))
    return cases


def mha(
    name: str, layout: str, *, layers: int, heads: int, k_dim: int, v_dim: int, page_size: int, slots: int
) -> Case:
    """Full or windowed attention, bf16: K and V in one tensor, or in two where their widths differ."""
    device = MHATokenToKVPool(
        size=page_size,
        page_size=page_size,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=k_dim,
        v_head_dim=v_dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    host = get_mha_host_pool_cls(info)(
        info,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        host_token_capacity=slots * page_size,
    )
    token_bytes = {"k": heads * k_dim * 2, "v": heads * v_dim * 2}
    buffer = host.kv_buffer
    tensors = list(buffer) if isinstance(buffer, tuple) else [buffer]
    return case("mha", name, host, tensors, page_size, slots, {"layers": layers, "token_bytes": token_bytes})


def mla(layout: str, *, layers: int, row: int, page_size: int, slots: int, dcp: int) -> Case:
    """Latent attention, bf16; under decode context parallelism a rank holds 1/dcp of a page's tokens."""
    device = MLATokenToKVPool(
        size=page_size,
        page_size=page_size,
        dtype=torch.bfloat16,
        kv_lora_rank=row - 64,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    host = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=False,
        dcp_size=dcp,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        target_layer_num=device.layer_num,
        host_token_capacity=slots * page_size // dcp,
    )
    name = "mla" if dcp == 1 else f"mla_dcp{dcp}"
    return case(
        "mla",
        name,
        host,
        [host.kv_buffer],
        page_size,
        slots,
        {"layers": layers, "token_bytes": row * 2, "tokens_held": page_size // dcp},
    )


def logical(layout: str, *, page_size: int, slots: int) -> Case:
    """DeepSeek V4's anchor: page slots without bytes."""
    host = LogicalHostPool(slots * page_size, page_size, layout=layout)
    return case("logical", "kv", host, [], page_size, slots, {})


def paged(name: str, layout: str, *, layers: int, layer_bytes: int, slots: int) -> Case:
    """One of DeepSeek V4's compressed pools: a row of bytes a layer and page."""
    host = DeepSeekV4PagedHostPool(
        pool_name=name,
        device_buffers=[torch.zeros((1, layer_bytes), dtype=torch.uint8) for _ in range(layers)],
        item_bytes=layer_bytes,
        num_host_pages=slots,
        slot_page_size=256,
        layout=layout,
        pin_memory=False,
    )
    return case("paged", name, host, tensors_of(host), 256, slots, geometry(layers, layer_bytes))


def states(layout: str, *, slots: int) -> list[Case]:
    """DeepSeek V4's compressor states, from its real device pool: they share the page slots of `swa`."""
    ratios = [0, 4, 128, 4]
    device = DeepSeekV4TokenToKVPool(
        max_num_reqs=2,
        swa_size=512,
        c4_size=256,
        c128_size=8,
        c4_state_pool_size=16,
        c128_state_pool_size=256,
        page_size=256,
        swa_page_size=256,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(ratios),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=ratios,
        sliding_window=128,
        full_size=1024,
    )
    c4_layers = [i for i, ratio in enumerate(ratios) if ratio == 4]
    pools = {
        "deepseek_v4_c4_state": device.compress_state_pools,
        "deepseek_v4_c4_indexer_state": device.indexer_compress_state_pools,
    }
    found = []
    for name, by_layer in pools.items():
        host = DeepSeekV4StateHostPool(
            pool_name=name,
            state_pools=[by_layer[i] for i in c4_layers],
            num_host_pages=slots,
            swa_page_size=256,
            layout=layout,
            pin_memory=False,
        )
        shape = geometry(len(c4_layers), host.state_page_bytes)
        found.append(case("paged", name, host, tensors_of(host), 256, slots, shape))
    return found


def mamba(
    name: str,
    layout: str,
    *,
    layers: int,
    temporal: tuple[int, ...],
    convs: tuple[tuple[int, ...], ...],
    slots: int,
) -> Case:
    """Recurrent state, a slot a page: fp32 temporal state (may have no elements), bf16 convolution states."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros((layers, 1, *temporal), dtype=torch.float32),
        conv=tuple(torch.zeros((layers, 1, *shape), dtype=torch.bfloat16) for shape in convs),
    )
    # SGLang adds one slot to what it is asked for.
    host = MambaPoolHost(info, float(slots - 1), 0, device_capacity=1, pin_memory=False, layout=layout)
    state_bytes = {"temporal": info.temporal[0, 0].nbytes}
    state_bytes |= {f"conv_{i}": conv[0, 0].nbytes for i, conv in enumerate(info.conv)}
    return case(
        "mamba",
        name,
        host,
        [host.temporal_buffer, *host.conv_buffer],
        1,
        slots,
        {"layers": layers, "state_bytes": state_bytes},
    )


def geometry(layers: int, layer_bytes: int) -> dict[str, int]:
    """Return the shape of a pool with a row of bytes a layer and page."""
    return {"layers": layers, "layer_bytes": layer_bytes}


def tensors_of(host: Any) -> list[torch.Tensor]:
    """Return the tensors of a pool that has one, or one a layer."""
    return list(host.kv_buffer) if isinstance(host.kv_buffer, list) else [host.kv_buffer]


def case(
    kind: str,
    name: str,
    host: Any,
    tensors: list[torch.Tensor],
    page_size: int,
    slots: int,
    shape: dict[str, Any],
) -> Case:
    """Ask `host` for some pages, out of order, the first and the last among them."""
    pages = [slots - 1, 0, slots // 2]
    starts = torch.tensor(pages, dtype=torch.int64) * page_size
    indices = (starts[:, None] + torch.arange(page_size)).reshape(-1)
    answer = host.get_page_buffer_meta(indices)
    pointers, lengths = ([], []) if answer is None else answer
    return {
        "kind": kind,
        "name": name,
        "layout": host.layout,
        "page_size": page_size,
        "slots": slots,
        **shape,
        "tensor_bytes": [tensor.nbytes for tensor in tensors],
        "pages": pages,
        "buffers": [
            [*place(pointer, tensors), length] for pointer, length in zip(pointers, lengths, strict=True)
        ],
    }


def place(pointer: int, tensors: list[torch.Tensor]) -> tuple[int, int]:
    """Return which tensor `pointer` lies in, and its offset there."""
    for i, tensor in enumerate(tensors):
        if 0 <= pointer - tensor.data_ptr() < tensor.nbytes:
            return i, pointer - tensor.data_ptr()
    raise ValueError(f"{pointer:#x} is in none of the pool's tensors")


if __name__ == "__main__":
    sys.exit(main())
