"""What SGLang's HiCache needs to run on a machine without a GPU: its copy kernels, in plain torch.

SGLang imports the kernels that copy pages between device and host only where there is a device. Here both
sides are CPU tensors. Call `install` before anything builds a host pool.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from typing import Any

import torch

# The CUDA build of torchvision does not load its operators on a CPU; its import only needs their schemas.
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    _TORCHVISION.define(_schema)


class Kernels:
    """SGLang's copy kernels by their names.

    `lf` is layer first (a tensor a layer), `pf` page first (a tensor whose second axis is the layer). Kernels
    without `direct` count tokens, those with it whole pages. All-layer kernels get the layers as an array of
    addresses.
    """

    @staticmethod
    def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, **_):
        _copy_rows(src_k, src_indices, dst_k, dst_indices)
        _copy_rows(src_v, src_indices, dst_v, dst_indices)

    @staticmethod
    def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, **_):
        _copy_rows(src, src_indices, dst, dst_indices)

    @staticmethod
    def transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, **_):
        _copy_rows(src[:, layer_id], src_indices, dst, dst_indices)

    @staticmethod
    def transfer_kv_per_layer_pf_lf(
        src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, **_
    ):
        _copy_rows(src_k[:, layer_id], src_indices, dst_k, dst_indices)
        _copy_rows(src_v[:, layer_id], src_indices, dst_v, dst_indices)

    @staticmethod
    def transfer_kv_all_layer_mla(
        src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, **_
    ):
        for source, target in zip(src_layers[:num_layers], dst_layers[:num_layers], strict=True):
            _copy_rows(
                _rows_at(source, src_indices, item_size),
                src_indices,
                _rows_at(target, dst_indices, item_size),
                dst_indices,
            )

    @staticmethod
    def transfer_kv_all_layer(
        src_k_layers,
        dst_k_layers,
        src_v_layers,
        dst_v_layers,
        src_indices,
        dst_indices,
        item_size,
        num_layers,
        **_,
    ):
        for layers in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
            Kernels.transfer_kv_all_layer_mla(*layers, src_indices, dst_indices, item_size, num_layers)

    @staticmethod
    def transfer_kv_all_layer_mla_lf_pf(
        src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
    ):
        pages = _bytes_at(dst.data_ptr(), dst.nbytes).view(-1, num_layers, item_size)
        for layer in range(num_layers):
            source = _rows_at(src_layers[layer], src_indices, item_size)
            _copy_rows(source, src_indices, pages[:, layer], dst_indices)

    @staticmethod
    def transfer_kv_all_layer_lf_pf(
        src_k_layers,
        dst_k,
        src_v_layers,
        dst_v,
        src_indices,
        dst_indices,
        item_size,
        dst_layout_dim,
        num_layers,
        **_,
    ):
        for layers, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
            Kernels.transfer_kv_all_layer_mla_lf_pf(
                layers, target, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
            )

    @staticmethod
    def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size, **_):
        for source, target in zip(src_layers, dst_layers, strict=True):
            _copy_rows(source, src_indices, target, dst_indices)

    @staticmethod
    def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size, **_):
        layers = len(src_ptrs) // len(dst_ptrs)
        for i, source in enumerate(src_ptrs):
            target = dst_ptrs[i // layers]
            for start, page in zip(
                _starts(src_indices, page_size), _starts(dst_indices, page_size), strict=True
            ):
                _copy_bytes(source[start : start + page_size], target[page // page_size, i % layers])

    @staticmethod
    def transfer_kv_per_layer_direct_pf_lf(
        src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size, **_
    ):
        for source, target in zip(src_ptrs, dst_ptrs, strict=True):
            for page, start in zip(
                _starts(src_indices, page_size), _starts(dst_indices, page_size), strict=True
            ):
                _copy_bytes(source[page // page_size, layer_id], target[start : start + page_size])


def install() -> None:
    """Make SGLang's host pools and their kernels work on a CPU; twice is fine."""
    if "datasets" not in sys.modules:
        stub: Any = types.ModuleType("datasets")
        stub.load_dataset = None
        sys.modules["datasets"] = stub
    room = "sglang.srt.mem_cache."
    common = importlib.import_module(f"{room}pool_host.common")
    common._cuda_host_register = common._cuda_host_unregister = lambda *_a, **_k: None
    modules = [importlib.import_module(f"{room}pool_host.{n}") for n in ("mha", "mla", "mamba", "dsa")]
    modules.append(importlib.import_module(f"{room}memory_pool_host"))
    for module in modules:
        for name in dir(Kernels):
            if name.startswith("transfer_kv_"):
                setattr(module, name, getattr(Kernels, name))
    mha, mla, mamba, dsa, others = modules
    for pool in (
        mha.MHATokenToKVPoolHost,
        mla.MLATokenToKVPoolHost,
        mamba.MambaPoolHost,
        dsa.DSAIndexerPoolHost,
        others.DeepSeekV4PagedHostPool,
        others.DeepSeekV4StateHostPool,
    ):
        _without_pinning(pool)
    kit = importlib.import_module("sglang.test.kits.unified_radix_cache.fixtures")
    kit.get_device = lambda *_a, **_k: "cpu"


def _without_pinning(pool: type) -> None:
    if getattr(pool.__init__, "unpinned", False):
        return
    make = pool.__init__

    def unpinned(self, *args, **kwargs):
        make(self, *args, **{**kwargs, "pin_memory": False})

    unpinned.unpinned = True
    pool.__init__ = unpinned


def _bytes_at(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(int(address)), dtype=torch.uint8)


def _rows_at(address: int, indices: torch.Tensor, size: int) -> torch.Tensor:
    rows = int(indices.max()) + 1
    return _bytes_at(address, rows * size).view(rows, size)


def _copy_rows(source, source_rows, target, target_rows) -> None:
    taken = source[source_rows.long()]
    target[target_rows.long()] = taken.view(target.dtype).reshape(len(taken), *target.shape[1:])


def _copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    target.view(torch.uint8).reshape(-1).copy_(source.reshape(-1).view(torch.uint8))


def _starts(indices: torch.Tensor, page_size: int) -> list[int]:
    return indices.long()[::page_size].tolist()
