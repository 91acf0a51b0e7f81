"""Bytes of L3 that a token of a model takes, over all pools and shards, as SGLang with caketin stores them.

Engines store whole pages of each pool. So the layers of a sliding window count with every page like all other
layers, and not once a prompt as on the GPU; the states of a linear attention (Mamba, gated delta nets, KDA)
count once a page, which is the most: SGLang stores one at the end of each piece of a prompt that it caches.
A draft's pools (MTP, EAGLE) are not counted.

The shapes are those of SGLang 0.5.23's host pools, and a test holds them against the real ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from caketin.model_config import ModelConfig
from caketin.model_layers import layers_of
from metadata.errors import FieldError, InvalidInput


class KvType(StrEnum):
    """Element type of keys and values; `auto` is what the configuration says."""

    AUTO = "auto"
    BF16 = "bf16"
    FP8 = "fp8"


DEFAULT_PAGE: Final = 64
"""Tokens of a page, unless the model's kernels want others."""

_V4_PAGE: Final = 256
# A row of DeepSeek V4: 448 values in fp8, 64 of the rotary part in bf16, 7 scales and a byte to fill up. A
# page of a layer is a whole number of 576-byte strides (FlashMLA).
_V4_HEAD: Final = 512
_V4_ROW: Final = 448 + 64 * 2 + 8
_V4_STRIDE: Final = 576
_V4_RATIOS: Final = {"sliding_attention": 0, "compressed_sparse_attention": 4,
                     "heavily_compressed_attention": 128}  # fmt: skip
# The compressor of ratio 4 keeps keys and scores of 8 tokens, twice (blocks overlap), in float32.
_V4_STATE_ROWS: Final = 8
_V4_STATE_ROW: Final = 2 * 2 * 4

# The indexer of DeepSeek sparse attention: keys in fp8, a float32 scale for each 128 values.
_INDEX_HEAD: Final = 128
_INDEX_ROW: Final = _INDEX_HEAD + 4

_CONV_BYTES: Final = 2
_STATE_BYTES: Final = {"": 4, "float32": 4, "bfloat16": 2, "float16": 2}

# Where the file may leave the width of a head out, because it is hidden_size / num_attention_heads. Other
# classes have a default of their own that no file shows.
_DERIVED_WIDTH: Final = frozenset({
    "baichuan", "cohere", "cohere2", "granite", "granitemoe", "granitemoehybrid", "internlm2", "internlm3",
    "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen2_moe", "starcoder2",
})  # fmt: skip
_ALL_HEADS: Final = frozenset({"baichuan", "llama", "olmo"})

# What changes the bytes in ways that are not known here; better no number than a wrong one.
_NOT_KNOWN: Final = {
    "kv_source_layer_ids": "layers that share compressed keys",
    "swa_kv_lora_rank": "windows of latent attention",
    "num_kv_shared_layers": "layers that share keys and values",
    "block_configs": "layers of several shapes",
    "per_layer_config": "layers of several shapes",
    "global_head_dim": "layers of several shapes",
    "attention_other_setting": "layers of several shapes",
    "cla_share_factor": "layers that share keys and values",
    "attn_layer_period": "states of Mamba's first version",
    "attn_type_list": "states of lightning attention",
    "sconv_kernel_size": "states of short convolutions beside keys",
    "sparse_attention_config": "index keys beside grouped attention",
    "is_encoder_decoder": "keys and values of an encoder",
    "index_kpool": "index keys of several tokens",
}
_ONE_IS_NONE: Final = frozenset({"cla_share_factor", "index_kpool"})


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """What a token takes.

    Attributes:
        page_size: tokens of a page of the engine.
        pools: bytes of a token by pool, in SGLang's names; windows that some engines keep in `kv` are `swa`.
    """

    page_size: int
    pools: dict[str, float]

    @property
    def per_token(self) -> float:
        """Bytes of a token over all pools and shards."""
        return sum(self.pools.values())


def model_bytes(
    config: ModelConfig,
    *,
    kv_type: KvType = KvType.AUTO,
    page_size: int | None = None,
    tp: int = 1,
    state_tokens: int | None = None,
) -> ModelBytes:
    """Return the bytes of a token.

    Args:
        config: the model's fields.
        kv_type: element type of keys and values.
        page_size: tokens of a page; None: 256 for DeepSeek V4, else 64.
        tp: ranks over which heads are split. With more ranks than KV heads each rank stores a whole head.
        state_tokens: tokens between two stored states of a linear attention; None: a page.

    Raises:
        InvalidInput: the configuration does not say it, with the name of the field.
    """
    for name, what in _NOT_KNOWN.items():
        told = config.fields.get(name)
        if told and not (told == 1 and name in _ONE_IS_NONE):
            raise config.refused(
                name, "unsupported", f"of {config.source} means {what}, which are not known here"
            )
    if config.has("compress_ratios") or config.text("model_type") == "deepseek_v4":
        return _deepseek_v4(config, kv_type, page_size or _V4_PAGE)
    page = page_size or DEFAULT_PAGE
    layers = layers_of(config)
    pools: dict[str, float] = {}
    if layers["full"] or layers["window"]:
        pools |= _attention(config, layers, _element_bytes(config, kv_type), tp)
    if layers["linear"]:
        pools["mamba"] = layers["linear"] * _state_bytes(config, tp) / (state_tokens or page)
    return ModelBytes(page, pools)


def _attention(config: ModelConfig, layers: Counter[str], element: int, tp: int) -> dict[str, float]:
    if config.has("kv_lora_rank"):
        if layers["window"]:
            raise config.refused(
                "layer_types", "unsupported", "has windows of latent attention, not known here"
            )
        return _latent(config, layers["full"], element)
    if config.has("index_head_dim"):
        raise config.refused(
            "index_head_dim", "unsupported", "is an indexer beside grouped attention, not known here"
        )
    pools: dict[str, float] = {}
    if layers["full"]:
        pools["kv"] = layers["full"] * _grouped(config, "", tp) * element
    if layers["window"]:
        pools["swa"] = layers["window"] * _grouped(config, "swa_", tp) * element
    return pools


def _grouped(config: ModelConfig, prefix: str, tp: int) -> int:
    """Return the values of keys and values of a token and layer, over all ranks (MHA, GQA, MQA).

    Window layers have fields of their own where they have another shape (MiMo V2).
    """
    own = {
        name: config.optional(prefix + name, 0) for name in ("num_key_value_heads", "head_dim", "v_head_dim")
    }
    heads = own["num_key_value_heads"] or _heads(config)
    width = own["head_dim"] or _width(config)
    # A head that no rank has for itself is stored by each that has it.
    return max(heads, tp) * (width + (own["v_head_dim"] or width))


def _heads(config: ModelConfig) -> int:
    if not config.has("num_key_value_heads") and config.text("model_type") in _ALL_HEADS:
        return config.count("num_attention_heads")
    return config.count("num_key_value_heads")


def _width(config: ModelConfig) -> int:
    names = ("head_dim", "attention_head_dim")
    if any(map(config.has, names)) or config.text("model_type") not in _DERIVED_WIDTH:
        return config.count(*names)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if hidden % heads:
        raise config.refused(
            "head_dim", "missing", f"is missing in {config.source}, and {hidden} / {heads} is not whole"
        )
    return hidden // heads


def _latent(config: ModelConfig, layers: int, element: int) -> dict[str, float]:
    """Return the pools of MLA: one latent and one rotary key a token and layer, which all ranks share.

    With an indexer (DSA) fp8 has a scale for each 128 values, and its rotary part stays bf16 (FlashMLA).
    """
    rank = config.count("kv_lora_rank")
    # Kimi Linear's and GLM 5.3 Flash's have no rotary part, which a zero says.
    rope = 0 if config.fields.get("qk_rope_head_dim") == 0 else config.count("qk_rope_head_dim")
    if not config.has("index_head_dim"):
        return {"kv": float(layers * (rank + rope) * element)}
    if config.count("index_head_dim") != _INDEX_HEAD:
        raise config.refused(
            "index_head_dim", "unsupported", f"is not {_INDEX_HEAD}, the only indexer known here"
        )
    row = (rank + rope) * element if element > 1 else rank + -(-rank // 128) * 4 + rope * 2
    return {"kv": float(layers * row), "indexer": float(_index_layers(config, layers) * _INDEX_ROW)}


def _index_layers(config: ModelConfig, layers: int) -> int:
    """Return how many layers have index keys; the others use those of a layer before them."""
    if config.has("indexer_types"):
        return sum(told != "shared" for told in config.items("indexer_types")[:layers])
    for name in ("index_topk_pattern", "cli_factor"):
        if config.has(name):
            raise config.refused(
                name, "unsupported", f"of {config.source}: its layers with an indexer are not known"
            )
    every = config.optional("index_topk_freq", 1)
    first = config.optional("index_skip_topk_offset", 2) - 1
    return sum(max(layer - first, 0) % every == 0 for layer in range(layers))


def _state_bytes(config: ModelConfig, tp: int) -> int:
    """Return the bytes of one layer's state after a token: the convolution's last inputs and the matrix.

    The convolution sees the heads' values and the groups' two projections; groups are repeated where there
    are fewer than ranks (SGLang's `Mamba2StateShape`, `KimiLinearStateShape`).
    """
    if config.has("conv_L_cache"):  # LFM2: a short convolution and no matrix
        return (config.count("conv_L_cache") - 1) * config.count("hidden_size") * _CONV_BYTES
    if config.has("linear_attn_config"):
        kda = config.inner("linear_attn_config")
        heads, width = kda.count("num_heads"), kda.count("head_dim")
        taps = kda.count("short_conv_kernel_size") - 1
        return taps * 3 * heads * width * _CONV_BYTES + heads * width * width * _STATE_BYTES["float32"]
    if config.has("mamba_num_heads"):  # Nemotron-H
        names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    elif config.has("mamba_n_heads"):  # Falcon-H1, Granite 4, Bamba
        names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    else:  # Qwen3-Next, Qwen3.5
        names = ("linear_num_value_heads", "linear_value_head_dim", "linear_num_key_heads",
                 "linear_key_head_dim", "linear_conv_kernel_dim")  # fmt: skip
    heads, width, groups, depth, kernel = map(config.count, names)
    groups = groups if groups % tp == 0 else max(groups, tp)
    element = _STATE_BYTES.get(config.text("mamba_ssm_dtype"))
    if element is None:
        raise config.refused("mamba_ssm_dtype", "unsupported", f"of {config.source} is no type known here")
    conv = (kernel - 1) * (heads * width + 2 * groups * depth) * _CONV_BYTES
    return conv + heads * width * depth * element


def _element_bytes(config: ModelConfig, kv_type: KvType) -> int:
    """Return the bytes of a value; `auto` as SGLang: 16 bits (float32 is cut to it), unless quantized."""
    if kv_type is not KvType.AUTO:
        return 2 if kv_type is KvType.BF16 else 1
    quantized = config.whole.get("quantization_config")
    if isinstance(quantized, dict) and str(quantized.get("kv_cache_quant_algo")).upper() == "FP8":
        return 1
    for fields in (config.fields, config.whole):
        for name in ("torch_dtype", "dtype"):
            if fields.get(name) in ("bfloat16", "float16", "float32"):
                return 2
    detail = f"of {config.source} is not bfloat16, float16 or float32: give --kv-dtype, or"
    raise config.refused("torch_dtype", "missing", detail)


def _deepseek_v4(config: ModelConfig, kv_type: KvType, page: int) -> ModelBytes:
    """Return the pools of DeepSeek V4 (SGLang's `DeepSeekV4PagedHostPool`, `DeepSeekV4StateHostPool`).

    All layers have a window, which SGLang keeps in pages like everything else. Those of ratio 4 have
    a compressed row and an index key for 4 tokens and a compressor's state for each page of the window; those
    of ratio 128 a compressed row for 128 tokens, and no state, because a page is a whole number of them.
    """
    if kv_type is KvType.BF16:
        raise _wrong("--kv-dtype", "DeepSeek V4's rows are fp8")
    if page % 128:
        raise _wrong("--page-size", f"{page} is no multiple of 128, DeepSeek V4's larger ratio")
    for name, value in (("head_dim", _V4_HEAD), ("qk_rope_head_dim", 64), ("index_head_dim", _INDEX_HEAD)):
        if config.optional(name, value) != value:
            raise config.refused(
                name, "unsupported", f"of {config.source} is not {value}, the only one known here"
            )
    count = config.layers()
    ratios = _ratios(config, count)
    fours, many = ratios.count(4), ratios.count(128)
    pages = {
        "swa": count * _v4_rows(page),
        "deepseek_v4_c4": fours * _v4_rows(page // 4),
        "deepseek_v4_c4_indexer": fours * (page // 4) * _INDEX_ROW,
        "deepseek_v4_c128": many * _v4_rows(page // 128),
        "deepseek_v4_c4_state": fours * _V4_STATE_ROWS * _V4_STATE_ROW * _V4_HEAD,
        "deepseek_v4_c4_indexer_state": fours * _V4_STATE_ROWS * _V4_STATE_ROW * _INDEX_HEAD,
    }
    return ModelBytes(page, {name: size / page for name, size in pages.items() if size})


def _v4_rows(rows: int) -> int:
    return -(-rows * _V4_ROW // _V4_STRIDE) * _V4_STRIDE


def _ratios(config: ModelConfig, count: int) -> list[int]:
    if config.has("compress_ratios"):
        name, ratios = "compress_ratios", config.items("compress_ratios")[:count]
    else:
        name = "layer_types"
        ratios = [
            _V4_RATIOS.get(told) if isinstance(told, str) else None for told in config.items(name)[:count]
        ]
    # Those after the last layer are the draft's.
    if len(ratios) < count or any(isinstance(r, bool) or r not in (0, 4, 128) for r in ratios):
        raise config.refused(
            name, "unsupported", f"of {config.source} is no ratio of 0, 4 or 128 for each of {count} layers"
        )
    return ratios


def _wrong(option: str, detail: str) -> InvalidInput:
    return InvalidInput("no size of a token", [FieldError(option, "out_of_range", detail)])
