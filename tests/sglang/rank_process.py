"""One of several processes that are the ranks of engines: real collectives over gloo.

    python -m tests.sglang.rank_process RANK WORLD PORT

Reads one scenario a line, as JSON, and answers each with a line. In a scenario the processes are split into
groups; each group writes a prompt back and restores it in a second engine of the same ranks. All ranks do the
same steps, for SGLang's collectives are in lockstep.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.sglang.engines import EngineSettings, same
from tests.sglang.other_engines import engine_of
from tests.sglang.stored import Stored

PAGES = 6


def play(told: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Do the steps of a scenario; return what came of them.

    Args:
        told: `groups` of ranks, and for each group its `models` and `extras`; `data_parallel`: the groups are
            the attention groups of one engine, not engines of their own; `remove`: rank -> pool and page
            whose objects that rank removes before the second engine asks.
        rank: of this process.
        world: number of processes.
    """
    groups = told["groups"]
    handles = [dist.new_group(ranks, backend="gloo") for ranks in groups]
    mine = next(i for i, ranks in enumerate(groups) if rank in ranks)
    local, size = groups[mine].index(rank), len(groups[mine])
    attention = {"attn_tp_rank": local, "attn_tp_size": size}
    if told.get("data_parallel"):
        place = {"tp_rank": rank, "tp_size": world, "moe_tp_size": world, **attention}
        place |= {"attn_dp_rank": mine, "attn_dp_size": len(groups)}
        group = {"attn_tp_cache_group": handles[mine]}
    else:
        place = {"tp_rank": local, "tp_size": size, "moe_tp_size": size, **attention}
        group = {"tp_cache_group": handles[mine]}
    model, extra = told["models"][mine], told["extras"][mine]
    settings = EngineSettings(model=model, extra=extra, place=place, groups=group)
    second = EngineSettings(
        **{**vars(settings), "extra": {**extra, "engine_id": extra["engine_id"] + "-second"}}
    )
    removal = told.get("remove", {}).get(str(rank))
    target = "sglang.srt.managers.cache_controller.is_dp_attention_enabled"
    with mock.patch(target, lambda: bool(told.get("data_parallel"))):
        return _steps(settings, second, seed=7 + (0 if model in {"mla", "dsa"} else local), removal=removal)


def _steps(
    settings: EngineSettings, second: EngineSettings, *, seed: int, removal: list[Any] | None
) -> dict[str, Any]:
    with engine_of(settings) as first:
        tokens = first.tokens(PAGES)
        made = first.produce(tokens, seed=seed)
        dist.barrier()
        if removal:
            Stored(first, tokens).remove(removal[0], [removal[1]])
        dist.barrier()
    with engine_of(second) as one:
        one.fill(99)
        got = one.prefetch(tokens)
        one.load_back(tokens)
        back = one.device_bytes(tokens) if got else []
        one.assert_at_rest(holds=bool(got))
        dist.barrier()
        place = one.backend._place
    return {
        "place": place.name,
        "leads": place.leads,
        "pages": got // one.config.page_size,
        "same": same(back, made),
        "prefix_same": bool(back)
        and all(torch.equal(b, m[: len(b)]) for b, m in zip(back, made, strict=True)),
    }


def main() -> None:
    """Play scenarios until the input ends."""
    rank, world, port = (int(a) for a in sys.argv[1:])
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for line in sys.stdin:
        try:
            said = play(json.loads(line), rank, world)
        except BaseException:  # the test wants to see it, whatever it is
            said = {"error": traceback.format_exc()}
        print("RESULT " + json.dumps(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
