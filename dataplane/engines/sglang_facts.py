"""What SGLang's own configuration tells of an engine."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dataplane.engines.sglang_settings import EngineFacts, local_model

log = logging.getLogger(__name__)


def engine_facts() -> EngineFacts:
    """Read what SGLang's configuration tells of the engine; what it does not tell is None."""
    try:
        args = get_server_args()
    except ValueError:
        return EngineFacts()
    algorithm = SpeculativeAlgorithm.from_string(getattr(args, "speculative_algorithm", None))
    dtype = getattr(args, "kv_cache_dtype", None)
    path = local_model(getattr(args, "model_path", None))
    return EngineFacts(
        model=getattr(args, "served_model_name", None) or getattr(args, "model_path", None),
        model_path=path,
        revision=getattr(args, "revision", None),
        hash_kind="bigram" if algorithm.is_eagle() else "plain",
        logical_dtype=None if dtype in {None, "auto"} else dtype,
        sliding_window_tokens=_sliding_window(args) if path is not None else None,
    )


def replica_rank() -> int:
    """Return which replica of `--dp-size` this process serves.

    SGLang's storage configuration tells the groups of DP attention apart, and says 0 for every replica
    without it. They have one configuration, so one engine id: each would take the other's place.
    """
    parallel = get_parallel()
    try:
        return 0 if parallel.attn_dp_size > 1 else parallel.dp_rank or 0
    except (RuntimeError, ValueError):  # nobody has said it in this process: there is one
        return 0


def _sliding_window(args: Any) -> int | None:
    """Return the model's sliding window, for the registration; each lookup of the engine says its own."""
    try:
        found = args.get_model_config().sliding_window_size
    except Exception as error:
        # The model's own configuration code: anything may come.
        log.info("the sliding window of the model is not known: %s", error)
        return None
    return found if isinstance(found, int) and found > 0 else None
