"""What a model's layers store: keys and values of all tokens, of a window, a state, or nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from caketin.model_config import ModelConfig

_KINDS: Final = {
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "linear",
    "short_conv": "linear",
    "moe": "none",
    "mlp": "none",
}
_PATTERN: Final = {"M": "linear", "*": "full", "-": "none", "E": "none"}
_WINDOWS: Final = {0: "full", 1: "window"}
# Fields with an entry a layer, and what the entries mean.
_LISTS: Final[dict[str, dict[Any, str]]] = {
    "layer_types": _KINDS,
    "layers_block_type": _KINDS,
    "hybrid_override_pattern": _PATTERN,
    "hybrid_layer_pattern": _WINDOWS,
}
# Fields that say which layers have a state, or of how many layers one has full attention.
_STATES: Final = (
    "linear_num_value_heads",
    "mamba_num_heads",
    "mamba_n_heads",
    "mamba_d_state",
    "conv_L_cache",
)


def layers_of(config: ModelConfig) -> Counter[str]:
    """Return how many layers have `full` attention, a `window`, and a `linear` attention's state.

    Raises:
        InvalidInput: the configuration does not say it, or in words that are not known here.
    """
    count = config.layers()
    if config.text("model_type") == "falcon_h1":  # both in each
        return Counter({"full": count, "linear": count})
    for name, kinds in _LISTS.items():
        if config.has(name):
            return Counter(_listed(config, name, kinds, count))
    return Counter(_spaced(config, count))


def _listed(config: ModelConfig, name: str, kinds: dict[Any, str], count: int) -> list[str]:
    entries = list(config.text(name)) or config.items(name)
    if len(entries) < count:
        raise config.refused(
            name, "invalid", f"of {config.source} has {len(entries)} entries for {count} layers"
        )
    found = []
    for entry in entries[:count]:  # those after the last layer are the draft's
        kind = kinds.get(entry) if isinstance(entry, str | int) else None
        if kind is None:
            raise config.refused(
                name, "unsupported", f"of {config.source} has {str(entry)[:40]!r}, not known here"
            )
        found.append(kind)
    return found


def _spaced(config: ModelConfig, count: int) -> list[str]:
    if config.has("linear_attn_config"):
        linear = _numbers(config.inner("linear_attn_config"), "kda_layers")  # which counts from 1
        return ["linear" if n + 1 in linear else "full" for n in range(count)]
    if config.has("attn_layer_indices"):
        full = _numbers(config, "attn_layer_indices")
        return ["full" if n in full else "linear" for n in range(count)]
    for name, others in (("full_attention_interval", "linear"), ("sliding_window_pattern", "window")):
        if config.has(name):
            every = config.count(name)
            return [others if (n + 1) % every else "full" for n in range(count)]
    for name in _STATES:
        if config.has(name):
            raise config.refused("layer_types", "missing", f"is missing in {config.source}, which has {name}")
    # A window in all layers or in some: the bytes of a page are the same.
    return ["full"] * count


def _numbers(config: ModelConfig, name: str) -> set[int]:
    found = config.items(name)
    if not all(isinstance(n, int) for n in found):
        raise config.refused(name, "invalid", f"of {config.source} is no list of layers")
    return set(found)
