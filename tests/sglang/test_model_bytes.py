"""`caketin size --model` says what a real engine of that shape registers, pool by pool."""

from __future__ import annotations

import httpx
import pytest

from caketin.model_bytes import model_bytes
from caketin.model_config import ModelConfig
from tests.sglang.engines import CONFIGS, V4_PAGE, V4_RATIOS, Engine, EngineSettings
from tests.sglang.other_engines import DsaEngine

pytestmark = pytest.mark.sglang

GROUPED = {"num_key_value_heads": 2, "head_dim": 64, "torch_dtype": "bfloat16"}
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "torch_dtype": "bfloat16"}
DELTA_NET = {
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "bfloat16",  # as the kit makes its states
}
SHAPES = {
    "full": GROUPED,
    "swa": GROUPED,
    "mamba": GROUPED | DELTA_NET,
    "mla": LATENT,
    "dsa": LATENT | {"index_head_dim": 128},
    "deepseek-v4": {"compress_ratios": list(V4_RATIOS)},
}


def shape(name: str) -> ModelConfig:
    told = CONFIGS[name]
    fields = {"num_hidden_layers": told.num_layers} | SHAPES[name]
    if name in {"swa", "mamba"}:
        other = "sliding_attention" if name == "swa" else "linear_attention"
        full = set(told.full_attention_layer_ids)
        fields["layer_types"] = ["full_attention" if n in full else other for n in range(told.num_layers)]
    return ModelConfig(name, fields, fields)


@pytest.mark.parametrize("name", [pytest.param(n, id=f"{n}-smoke" if "v4" in n else n) for n in SHAPES])
def test_an_engine_registers_the_bytes_that_its_configuration_says(file_plane, name):
    config = {"mamba_intermediate_size": 32} if name == "mamba" else {}
    kind = DsaEngine if name == "dsa" else Engine
    with kind(EngineSettings(model=name, extra=file_plane.extra(), config=config)) as engine:
        namespace = engine.backend._link.joined.namespace_id
        told = httpx.get(f"{file_plane.url}/v1/namespaces/{namespace}", trust_env=False).json()
    page = {
        p["name"]: sum(part["bytes"] for part in p["parts"]) * p["shards_expected"] for p in told["pools"]
    }
    page = {pool: size for pool, size in page.items() if size}
    said = model_bytes(shape(name), page_size=V4_PAGE if "v4" in name else 64)
    assert {pool: size * said.page_size for pool, size in said.pools.items()} == page
