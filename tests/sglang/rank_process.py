"""One rank of an engine of several, as a process of its own: real collectives over gloo.

    python -m tests.sglang.rank_process '{"rank": 0, "world": 2, ...}'

Writes a prompt back, restores it in a second engine of the same ranks, and prints one line of JSON that says
what came back. All ranks do the same steps: SGLang's collectives are in lockstep.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.sglang.engines import Engine, EngineSettings, same
from tests.sglang.stored import Stored

PAGES = 6


def main(told: dict[str, Any]) -> dict[str, Any]:
    """Do the steps; return what came of them.

    Args:
        told: `rank` and `world` of the process, `port` of the rendezvous, `groups` of attention ranks (one
            under plain TP), the engine's `extra`, `model`, `config`; `remove`: rank -> pool and page whose
            objects that rank removes before the second engine asks.
    """
    rank, world, groups = told["rank"], told["world"], told["groups"]
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{told['port']}", rank=rank, world_size=world)
    handles = [dist.new_group(ranks, backend="gloo") for ranks in groups]
    dp_rank = next(i for i, ranks in enumerate(groups) if rank in ranks)
    tp_rank, tp_size = groups[dp_rank].index(rank), len(groups[dp_rank])
    under_dp = len(groups) > 1
    place = {
        **{"tp_rank": rank, "tp_size": world, "moe_tp_size": world},
        **{"attn_dp_rank": dp_rank, "attn_dp_size": len(groups)},
        **{"attn_tp_rank": tp_rank, "attn_tp_size": tp_size},
    }
    name = "attn_tp_cache_group" if under_dp else "tp_cache_group"
    settings = EngineSettings(
        model=told["model"],
        config=told.get("config", {}),
        extra=told["extra"],
        place=place,
        groups={name: handles[dp_rank]},
    )
    target = "sglang.srt.managers.cache_controller.is_dp_attention_enabled"
    with mock.patch(target, lambda: under_dp):
        return _steps(settings, told, tp_rank if told.get("sharded", True) else 0, dp_rank)


def _steps(settings: EngineSettings, told: dict[str, Any], seed: int, dp_rank: int) -> dict[str, Any]:
    with Engine(settings) as first:
        # Each attention group has its own prompt unless they are to share.
        tokens = first.tokens(PAGES, start=1 + 1000 * (dp_rank if told.get("own_prompts") else 0))
        if told.get("produce", True):
            made = first.produce(tokens, seed=7 + seed)
            dist.barrier()
        else:
            made = []
        removal = told.get("remove", {}).get(str(told["rank"]))
        if removal:
            Stored(first, tokens).remove(removal[0], [removal[1]])
        dist.barrier()
    second = EngineSettings(
        **{**vars(settings), "extra": {**settings.extra, "engine_id": told["extra"]["engine_id"] + "-second"}}
    )
    with Engine(second) as one:
        one.fill(99)
        got = one.prefetch(tokens)
        one.load_back(tokens)
        back = one.device_bytes(tokens) if got else []
        one.assert_at_rest(holds=bool(got))
        dist.barrier()
        said = one.backend._place
    return {
        "rank": told["rank"],
        "place": said.name,
        "leads": said.leads,
        "pages": got // first.config.page_size,
        "same": same(back, made),
        "prefix_same": bool(back)
        and all(torch.equal(b, m[: len(b)]) for b, m in zip(back, made, strict=True)),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    dist.destroy_process_group()
