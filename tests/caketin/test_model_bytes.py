"""`caketin size --model`: bytes of a token against a calculator by other hands, and what is refused.

The real engine's pools are compared in `tests/sglang/test_model_bytes.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from kvcache_sim.calculator import calculate_cache_size, load_models_data

from caketin.known_models import MODELS
from caketin.model_bytes import KvType, ModelBytes, model_bytes
from caketin.model_config import ModelConfig, find_config, parse_config
from metadata.errors import InvalidInput

JUDGE = load_models_data()
JUDGED = {m["id"]: m for m in JUDGE["models"]}
OTHERS = {"gemma-3-27b", "gpt-oss-20b", "gpt-oss-120b", "qwen3-next-80b-a3b"}
"""Listed by us, unknown to the judge."""


def of_formula(*formulas: str) -> list[str]:
    return [name for name, m in JUDGED.items() if m["formula"] in formulas]


def judged(name: str, tokens: int = 1024, precision: str = "bf16_fp16", **more: Any) -> Any:
    return calculate_cache_size(
        JUDGED[name],
        tokens=tokens,
        precision=precision,
        indexer_precision="fp8_int8",
        models_data=JUDGE,
        **more,
    )


def of_fields(name: str, **more: Any) -> ModelConfig:
    """The judge's facts as a config.json."""
    fields = {"torch_dtype": "bfloat16", **JUDGED[name]["fields"], **more}
    return ModelConfig(name, fields, fields)


def of(told: dict[str, Any], **options: Any) -> ModelBytes:
    return model_bytes(parse_config("config.json", json.dumps(told)), **options)


GQA = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 128, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("name", of_formula("standard_gqa", "mla"))
def test_keys_and_values_and_latents_are_as_judged(name: str) -> None:
    config = of_fields(name)
    assert model_bytes(config).per_token == judged(name).bytes_per_token
    halved = judged(name, precision="fp8_int8").bytes_per_token
    assert model_bytes(config, kv_type=KvType.FP8).per_token == halved


def index_layers(name: str) -> int:
    fields = JUDGED[name]["fields"]
    return fields.get("indexer_full_layers", fields["num_hidden_layers"])


@pytest.mark.parametrize("name", of_formula("dsa_mla"))
def test_an_indexer_is_as_judged_but_for_the_scales(name: str) -> None:
    # The judge counts values; SGLang stores a float32 scale with each 128 of them, and in fp8 the rotary part
    # as bf16 and a scale for each 128 values of the latent.
    scales = index_layers(name) * 4
    assert model_bytes(of_fields(name)).per_token == judged(name).bytes_per_token + scales
    more = JUDGED[name]["fields"]["num_hidden_layers"] * (64 + 4 * 4)
    fp8 = judged(name, precision="fp8_int8").bytes_per_token
    assert model_bytes(of_fields(name), kv_type=KvType.FP8).per_token == fp8 + scales + more


@pytest.mark.parametrize("name", of_formula("mixed_full_sliding_gqa"))
def test_a_window_counts_with_every_page_and_not_once_a_prompt(name: str) -> None:
    fields = JUDGED[name]["fields"]
    if "global_head_dim" in fields:
        with pytest.raises(InvalidInput, match="not known here"):
            model_bytes(of_fields(name))
        return
    full, window = fields["full_attention_layers"], fields["sliding_attention_layers"]
    config = of_fields(name, layer_types=["full_attention"] * full + ["sliding_attention"] * window)
    said = model_bytes(config)
    # A prompt that is no longer than the window has it whole: there the two agree.
    width = fields["sliding_window"]
    assert said.per_token == pytest.approx(judged(name, tokens=width).bytes_per_token)
    # Ten windows long, the judge keeps one of them, and pages all ten.
    long = judged(name, tokens=10 * width).bytes_per_token
    assert said.per_token - long == pytest.approx(said.pools["swa"] * 0.9)


@pytest.mark.parametrize("name", of_formula("qwen_linear_full_hybrid"))
def test_a_state_counts_once_a_page_and_not_once_a_prompt(name: str) -> None:
    fields = JUDGED[name]["fields"]
    full, linear = fields["full_attention_layers"], fields["linear_attention_layers"]
    config = of_fields(name, layer_types=["full_attention"] * full + ["linear_attention"] * linear)
    # A prompt of one page has one state: there the two agree, and so for states further apart.
    for tokens in (64, 4096):
        said = model_bytes(config, state_tokens=tokens)
        state = judged(
            name, tokens=tokens, include_linear_attention_state=True, recurrent_state_precision="fp32"
        )
        assert said.per_token == pytest.approx(state.bytes_per_token)
    assert model_bytes(config).pools == model_bytes(config, state_tokens=64).pools
    assert model_bytes(config, page_size=128).pools["mamba"] == model_bytes(config).pools["mamba"] / 2


@pytest.mark.parametrize("name", of_formula("kimi_kda_mla_hybrid"))
def test_the_states_of_kda_are_as_judged(name: str) -> None:
    fields = JUDGED[name]["fields"]
    kda = {
        "kda_layers": list(range(1, fields["kda_layers"] + 1)),
        "num_heads": fields["kda_num_heads"],
        "head_dim": fields["kda_head_dim"],
        "short_conv_kernel_size": fields["kda_conv_kernel_size"],
    }
    said = model_bytes(of_fields(name, linear_attn_config=kda))
    state = judged(name, tokens=64, include_linear_attention_state=True, recurrent_state_precision="fp32")
    assert said.per_token == pytest.approx(state.bytes_per_token)


@pytest.mark.parametrize("name", of_formula("deepseek_v4_hybrid"))
def test_deepseek_v4_is_what_is_judged_with_scales_whole_strides_windows_and_states(name: str) -> None:
    fields = JUDGED[name]["fields"]
    page, row, stride = 256, 448 + 64 * 2 + 8, 576
    pools = {pool: size * page for pool, size in model_bytes(of_fields(name)).pools.items()}
    told = judged(name, tokens=page, precision="fp8_int8")
    windows = fields["num_hidden_layers"] * fields["sliding_window"] * 512
    # The window, of a page and not of 128 tokens, and each row 584 bytes where the judge has 512 values.
    assert pools["swa"] == windows * page / fields["sliding_window"] / 512 * (260 * stride / page)
    compressed = (told.kv_bytes - windows) / 512 * row
    layers = sum(ratio > 0 for ratio in fields["compress_ratios"])
    mine = pools["deepseek_v4_c4"] + pools["deepseek_v4_c128"]
    assert compressed <= mine < compressed + layers * stride
    assert pools["deepseek_v4_c4_indexer"] == told.indexer_bytes / 128 * 132
    # The judge has no states.
    fours = fields["compress_ratios"].count(4)
    assert pools["deepseek_v4_c4_state"] + pools["deepseek_v4_c4_indexer_state"] == fours * 8 * 4 * 640 * 4


def test_deepseek_v4_flash_has_the_pages_that_were_measured() -> None:
    said = model_bytes(find_config("deepseek-v4-flash"))
    pages = {pool: size * 256 for pool, size in said.pools.items()}
    assert pages == {
        "swa": 43 * 149_760,
        "deepseek_v4_c4": 21 * 37_440,
        "deepseek_v4_c4_indexer": 21 * 8_448,
        "deepseek_v4_c128": 20 * 1_728,
        "deepseek_v4_c4_state": 21 * 65_536,
        "deepseek_v4_c4_indexer_state": 21 * 16_384,
    }
    states = (pages["deepseek_v4_c4_state"] + pages["deepseek_v4_c4_indexer_state"]) / 256
    assert (round(said.per_token - states), round(said.per_token)) == (29_054, 35_774)


@pytest.mark.parametrize("name", MODELS)
def test_a_listed_model_has_the_fields_that_the_judge_has(name: str) -> None:
    if name in OTHERS:
        assert name not in JUDGED
        return
    layer_types = {}
    if "full_attention_layers" in JUDGED[name]["fields"]:
        layer_types = {"full_attention_interval": 4}
    assert model_bytes(find_config(name)) == model_bytes(of_fields(name, **layer_types))


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("gemma-3-27b", 62 * 2 * 16 * 128 * 2),
        ("gpt-oss-20b", 24 * 2 * 8 * 64 * 2),
        ("gpt-oss-120b", 36 * 2 * 8 * 64 * 2),
        ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2 + 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4) / 64),
    ],
)
def test_models_that_the_judge_does_not_know(name: str, bytes_per_token: float) -> None:
    assert model_bytes(find_config(name)).per_token == bytes_per_token


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "QWEN3-8B", "qwen3-8b"])
def test_names_are_taken_as_the_hub_writes_them(name: str) -> None:
    assert model_bytes(find_config(name)).per_token == 36 * 2 * 8 * 128 * 2


def test_a_file_a_folder_and_nested_fields_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"dtype": "bfloat16", "thinker_config": {"text_config": GQA}}))
    for given in (file, tmp_path):
        assert model_bytes(find_config(str(given))).per_token == 2 * 2 * 4 * 128 * 2


def test_heads_that_ranks_have_twice_are_stored_twice() -> None:
    once = of(GQA).per_token
    assert [of(GQA, tp=tp).per_token / once for tp in (1, 2, 4, 8)] == [1, 1, 1, 2]
    latent = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "float16"}
    assert of(latent, tp=8) == of(latent)  # which all ranks share


MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4}
STATE = 3 * (32 + 2 * 16) * 2 + 32 * 16 * 4
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 16, "conv_kernel": 4}
KDA = {"kda_layers": [2], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}  # the last of two
ROW = 2 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("more", "pools"),
    [
        ({"model_type": "falcon_h1", **MAMBA2}, {"kv": 2 * ROW, "mamba": 2 * STATE / 64}),
        ({"layer_types": ["mamba", "attention"], **MAMBA2}, {"kv": ROW, "mamba": STATE / 64}),
        ({"attn_layer_indices": [1], **MAMBA2}, {"kv": ROW, "mamba": STATE / 64}),
        (
            {"hybrid_override_pattern": "M-*EM", "num_hidden_layers": 5, **NEMOTRON},
            {"kv": ROW, "mamba": 2 * STATE / 64},
        ),
        (
            {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "hidden_size": 64},
            {"kv": ROW, "mamba": 2 * 64 * 2 / 64},
        ),
        ({"linear_attn_config": KDA}, {"kv": ROW, "mamba": (3 * 3 * 32 * 2 + 32 * 8 * 4) / 64}),
        ({"sliding_window": 128}, {"kv": 2 * ROW}),
        ({"hybrid_layer_pattern": [0, 1], "swa_head_dim": 64}, {"kv": ROW, "swa": ROW / 2}),
        ({"layer_types": ["chunked_attention", "full_attention"]}, {"kv": ROW, "swa": ROW}),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, {"kv": ROW}),
        (
            {"model_type": "llama", "head_dim": None, "hidden_size": 512, "num_attention_heads": 4},
            {"kv": 2 * ROW},
        ),
        ({"model_type": "llama", "num_key_value_heads": None, "num_attention_heads": 4}, {"kv": 2 * ROW}),
        ({"index_kpool": 1, "kv_source_layer_ids": [], "num_kv_shared_layers": 0}, {"kv": 2 * ROW}),
    ],
)
def test_other_families(more: dict[str, Any], pools: dict[str, float]) -> None:
    assert of(GQA | more).pools == pools


V4 = {"num_hidden_layers": 2, "compress_ratios": [4, 128]}


def test_deepseek_v4_is_read_in_both_spellings() -> None:
    spelt = ["compressed_sparse_attention", "heavily_compressed_attention"]
    new = {"num_hidden_layers": 2, "model_type": "deepseek_v4", "layer_types": spelt}
    assert of(new) == of(V4)


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ({}, "num_hidden_layers"),
        (GQA | {"num_hidden_layers": 0}, "num_hidden_layers"),
        (GQA | {"num_hidden_layers": -1}, "num_hidden_layers"),
        (GQA | {"num_hidden_layers": "2"}, "num_hidden_layers"),
        (GQA | {"num_hidden_layers": 2.0}, "num_hidden_layers"),
        (GQA | {"num_hidden_layers": True}, "num_hidden_layers"),
        (GQA | {"num_hidden_layers": 10_001}, "num_hidden_layers"),
        (GQA | {"num_hidden_layers": []}, "num_hidden_layers"),
        (GQA | {"head_dim": 10**400}, "head_dim"),
        (GQA | {"head_dim": None}, "head_dim"),
        (GQA | {"head_dim": None, "model_type": "gemma3_text", "hidden_size": 512}, "head_dim"),
        (
            GQA | {"head_dim": None, "model_type": "llama", "hidden_size": 5, "num_attention_heads": 2},
            "head_dim",
        ),
        (GQA | {"num_key_value_heads": None, "num_attention_heads": 8}, "num_key_value_heads"),
        (GQA | {"torch_dtype": None}, "torch_dtype"),
        (GQA | {"torch_dtype": 16}, "torch_dtype"),
        (GQA | {"torch_dtype": ["bfloat16"]}, "torch_dtype"),
        ({"text_config": GQA | {"head_dim": "x"}}, "text_config.head_dim"),
        (GQA | {"layer_types": ["full_attention"]}, "layer_types"),
        (GQA | {"layer_types": "full_attention"}, "layer_types"),
        (GQA | {"layer_types": ["full_attention", "retention"]}, "layer_types"),
        (GQA | {"layer_types": ["full_attention", {}]}, "layer_types"),
        (GQA | {"layer_types": ["full_attention", "linear_attention"]}, "linear_num_value_heads"),
        (GQA | {"hybrid_override_pattern": "M?"}, "hybrid_override_pattern"),
        (GQA | {"hybrid_layer_pattern": [0, 2]}, "hybrid_layer_pattern"),
        (GQA | {"linear_attn_config": 3}, "linear_attn_config"),
        (GQA | {"linear_attn_config": {"kda_layers": ["1"]}}, "linear_attn_config.kda_layers"),
        (GQA | {"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config.num_heads"),
        (GQA | {"full_attention_interval": 0}, "full_attention_interval"),
        (GQA | {"sliding_window_pattern": "6"}, "sliding_window_pattern"),
        (GQA | {"mamba_d_state": 16}, "layer_types"),
        (
            GQA | {"layer_types": ["mamba", "attention"], **MAMBA2, "mamba_ssm_dtype": "int3"},
            "mamba_ssm_dtype",
        ),
        (GQA | {"index_head_dim": 128}, "index_head_dim"),
        (GQA | {"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        (GQA | {"num_key_value_heads": [4, 2]}, "num_key_value_heads"),
        (GQA | {"block_configs": [{}]}, "block_configs"),
        (GQA | {"is_encoder_decoder": True}, "is_encoder_decoder"),
        (GQA | {"kv_lora_rank": 512}, "qk_rope_head_dim"),
        (GQA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 64}, "index_head_dim"),
        (GQA | {"kv_lora_rank": 512, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        (V4 | {"compress_ratios": [4]}, "compress_ratios"),
        (V4 | {"compress_ratios": [4, 2]}, "compress_ratios"),
        (V4 | {"compress_ratios": [4, "128"]}, "compress_ratios"),
        (V4 | {"compress_ratios": [4, []]}, "compress_ratios"),
        (V4 | {"compress_ratios": {"0": 4}}, "compress_ratios"),
        (V4 | {"head_dim": 256}, "head_dim"),
        (V4 | {"kv_source_layer_ids": [1]}, "kv_source_layer_ids"),
    ],
)
def test_what_the_configuration_does_not_say_is_named_with_the_other_ways(told: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        of(told)
    (error,) = raised.value.errors
    assert error.field == field
    assert "--bytes-per-token or --namespace" in error.detail
    assert len(error.detail) < 250


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"num_hidden_layers": 1' + "0" * 5000 + "}"]
)
def test_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        model_bytes(parse_config("config.json", text))


def test_pages_and_types_that_deepseek_v4_has_not_are_refused() -> None:
    for options in ({"page_size": 64}, {"kv_type": KvType.BF16}):
        with pytest.raises(InvalidInput, match="DeepSeek V4"):
            of(V4, **options)


@pytest.mark.parametrize("what", ["name", "folder", "binary", "fifo", "large", "long", "zero", "device"])
def test_what_cannot_be_read_is_told(tmp_path: Path, what: str) -> None:
    file = tmp_path / what
    given = {"name": "gpt-2", "long": "x" * 5000, "zero": "a\0b", "device": "/dev/zero"}.get(what, str(file))
    if what == "folder":
        file.mkdir()
    elif what == "binary":
        file.write_bytes(b"\xff\xfe")
    elif what == "fifo":
        os.mkfifo(file)
    elif what == "large":
        file.write_bytes(b" " * ((16 << 20) + 1))
    with pytest.raises(InvalidInput) as raised:
        find_config(given)
    (error,) = raised.value.errors
    assert error.field == "--model"
    assert ("deepseek-v4-flash" in error.detail) == (what in {"name", "zero"})
