"""Models by name: of their published `config.json` the fields that say the size of a token.

A new model needs no line here: `--model` takes a `config.json` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final


def _grouped(layers: int, heads: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "head_dim": width,
        "torch_dtype": "bfloat16",
        **more,
    }


def _latent(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
        **more,
    }


def _delta_net(layers: int, heads: int, value_heads: int) -> dict[str, Any]:
    return _grouped(
        layers,
        heads,
        256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_num_value_heads=value_heads,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )


def _deepseek_v4(ratios: list[int]) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "sliding_window": 128,
    }


MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek-v4-flash": _deepseek_v4([0, 0, *[4, 128] * 20, 4]),
    "deepseek-v4-pro": _deepseek_v4([128, 128, *[4, 128] * 29, 4]),
    "deepseek-v3.2": _latent(61, index_head_dim=128),
    "deepseek-v3": _latent(61),
    "deepseek-r1": _latent(61),
    "glm-5": _latent(78, index_head_dim=128),
    "glm-5.2": _latent(78, index_head_dim=128, index_topk_freq=4, index_skip_topk_offset=3),
    "kimi-k2.5": _latent(61),
    "llama-3.1-8b": _grouped(32, 8, 128),
    "llama-3.1-70b": _grouped(80, 8, 128),
    "llama-3.3-70b": _grouped(80, 8, 128),
    "qwen3-8b": _grouped(36, 8, 128),
    "qwen3-14b": _grouped(40, 8, 128),
    "qwen3-32b": _grouped(64, 8, 128),
    "qwen3-30b-a3b": _grouped(48, 4, 128),
    "qwen3-235b-a22b": _grouped(94, 4, 128),
    "qwen3-next-80b-a3b": _delta_net(48, 2, 32),
    "qwen3.5-397b-a17b": _delta_net(60, 2, 64),
    "minimax-m2": _grouped(62, 8, 128),
    "gemma-3-27b": _grouped(62, 16, 128, sliding_window=1024, sliding_window_pattern=6),
    "gpt-oss-20b": _grouped(24, 8, 64, sliding_window=128, sliding_window_pattern=2),
    "gpt-oss-120b": _grouped(36, 8, 64, sliding_window=128, sliding_window_pattern=2),
}
"""By name; each as the file has it, where a default of the model's class is written out."""
