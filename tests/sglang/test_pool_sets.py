"""Pool sets beside the common ones: what was written comes back, through SGLang's own tree and controller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metadata.errors import InvalidInput
from metadata.page_hash import page_hashes
from tests.sglang.engines import Engine, EngineSettings, same
from tests.sglang.other_engines import (
    DraftEngine,
    DsaEngine,
    MambaMlaEngine,
    MhaDraftOnMlaEngine,
)
from tests.sglang.stored import Stored

pytestmark = pytest.mark.sglang

PAGES = 6


def there_and_back(kind, settings, pages=PAGES):
    """Return the pools of a first engine, and whether a second had its bytes before and after restoring."""
    with kind(settings) as first:
        tokens = first.tokens(pages)
        made = first.produce(tokens)
        first.assert_at_rest(holds=True)
        owned = dict(first.backend._link.joined.owned)
    with kind(replace(settings, extra={**settings.extra, "engine_id": "second"})) as second:
        second.fill(99)
        before = same(made, second.device_bytes(tokens))
        restored = second.restored(tokens)
        second.assert_at_rest(holds=True)
    return owned, before, same(made, restored)


def test_the_indexer_of_dsa_comes_back_with_its_kv(plane):
    owned, before, after = there_and_back(DsaEngine, EngineSettings(model="dsa", extra=plane.extra()))
    assert set(owned) == {"kv", "indexer"}
    assert (before, after) == (False, True)


def test_without_its_indexer_no_page_of_dsa_is_restored(file_plane):
    """Field report 1: stale indexer data under good KV is garbled text."""
    extra = file_plane.extra()
    with DsaEngine(EngineSettings(model="dsa", extra=extra)) as first:
        tokens = first.tokens(PAGES)
        first.produce(tokens)
        Stored(first, tokens).remove("indexer", [3])
    with DsaEngine(EngineSettings(model="dsa", extra={**extra, "engine_id": "second"})) as second:
        assert second.prefetch(tokens) == 3 * 64
        second.assert_at_rest(holds=True)


def test_mamba_without_temporal_state_has_no_part_for_it(plane):
    settings = EngineSettings(model="mamba", extra=plane.extra(), config={"mamba_state_size": 0})
    with Engine(settings) as one:
        parts = [p.part for p in one.backend._link.joined.pools.bound["mamba"].pool.spec.parts]
        assert parts == ["conv_0"]
    owned, before, after = there_and_back(Engine, settings)
    assert set(owned) == {"kv", "mamba"}
    assert (before, after) == (False, True)


def test_mamba_states_beside_mla_come_back(plane):
    owned, before, after = there_and_back(
        MambaMlaEngine, EngineSettings(model="mamba-mla", extra=plane.extra())
    )
    assert set(owned) == {"kv", "mamba"}
    assert (before, after) == (False, True)


def test_a_rank_that_does_not_write_mla_writes_its_own_mamba_state(file_plane):
    """On two ranks KV is one shard, which rank 0 writes; Mamba's state has one a rank."""
    two = {"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2}
    extra = file_plane.extra()
    ranks = [
        EngineSettings(model="mamba-mla", extra=extra, place={**two, "tp_rank": r, "attn_tp_rank": r})
        for r in (0, 1)
    ]
    made = []
    for settings, (kv, mamba) in zip(ranks, (((0,), (0,)), ((), (1,))), strict=True):
        with MambaMlaEngine(settings) as rank:
            tokens = rank.tokens(PAGES)
            assert rank.backend._link.joined.owned == {"kv": kv, "mamba": mamba}
            made.append(rank.produce(tokens, seed=7 + rank.backend._place.tp_rank))
            hit = Stored(rank, tokens).lookup(["mamba"]).hit_pages
            assert hit == (0 if rank.backend._place.leads else PAGES)
    assert not same(*made)
    for settings, bytes_of_rank in zip(ranks, made, strict=True):
        with MambaMlaEngine(replace(settings, extra={**extra, "engine_id": "second"})) as rank:
            rank.fill(99)
            assert same(rank.restored(tokens), bytes_of_rank)
            rank.assert_at_rest(holds=True)


@pytest.mark.parametrize(
    ("model", "pools"),
    [
        ("full", {"kv", "draft"}),
        ("mla", {"kv", "draft"}),
        ("swa", {"kv", "swa", "draft_swa"}),
    ],
)
def test_a_draft_travels_with_its_target(plane, model, pools):
    owned, before, after = there_and_back(DraftEngine, EngineSettings(model=model, extra=plane.extra()))
    assert set(owned) == pools
    assert (before, after) == (False, True)


def test_an_engine_with_a_draft_restores_nothing_that_was_written_without_one(file_plane):
    extra = file_plane.extra()
    with Engine(EngineSettings(extra=extra)) as plain:
        tokens = plain.tokens(PAGES)
        made = plain.produce(tokens)
    with DraftEngine(EngineSettings(extra={**extra, "engine_id": "drafting"})) as drafting:
        assert drafting.prefetch(tokens) == 0
        drafting.produce(tokens)
    # The other way round the target's pages are all that is asked for.
    with Engine(EngineSettings(extra={**extra, "engine_id": "plain-again"})) as again:
        assert same(again.restored(tokens), made)


def test_an_mha_draft_on_mla_at_two_ranks_is_refused_when_sglang_registers_it(file_plane):
    two = {"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2}
    settings = EngineSettings(model="mla", extra=file_plane.extra(), place=two)
    with pytest.raises(InvalidInput, match=r"should_backup.*TP 1"), MhaDraftOnMlaEngine(settings):
        pass
    alone = EngineSettings(model="mla", extra=file_plane.extra())
    owned, before, after = there_and_back(MhaDraftOnMlaEngine, alone)
    assert (set(owned), before, after) == ({"kv", "draft"}, False, True)


def test_stages_of_a_pipeline_are_shards_and_a_page_needs_them_all(file_plane):
    """Each stage is driven by itself: SGLang's collectives over stages need processes of their own."""
    extra = file_plane.extra()
    stages = [EngineSettings(extra=extra, place={"pp_rank": r, "pp_size": 2}) for r in (0, 1)]
    made = []
    for number, settings in enumerate(stages):
        with Engine(settings) as stage:
            tokens = stage.tokens(PAGES)
            assert stage.backend._place.name == f"dp0-pp{number}-cp0-tp0"
            assert stage.backend._link.joined.owned == {"kv": (number,)}
            made.append(stage.produce(tokens, seed=number))
            assert Stored(stage, tokens).lookup().hit_pages == (0, PAGES)[number]
    for settings, bytes_of_stage in zip(stages, made, strict=True):
        with Engine(replace(settings, extra={**extra, "engine_id": "second"})) as stage:
            assert stage.backend._place.leads == (settings.place["pp_rank"] == 0)
            stage.fill(99)
            assert same(stage.restored(tokens), bytes_of_stage)
            stage.assert_at_rest(holds=True)


@pytest.mark.parametrize("model", ["full", "swa"])
def test_an_engine_that_caches_pairs_of_tokens_has_a_namespace_and_hashes_of_its_own(file_plane, model):
    extra = file_plane.extra()
    eagle = EngineSettings(
        model=model, extra=extra, config={"is_eagle": True}, server={"speculative_algorithm": "EAGLE"}
    )
    with Engine(eagle) as first:
        tokens = first.tokens(PAGES)
        assert len(tokens) == PAGES * first.config.page_size + 1
        made = first.produce(tokens)
        stored = Stored(first, tokens, hash_kind="bigram")
        assert stored.hashes[0] == page_hashes(tokens, first.config.page_size, hash_kind="bigram")[0]
        assert stored.lookup().hit_pages == PAGES
        pairs = first.backend._link.joined.namespace_id
    with Engine(replace(eagle, extra={**extra, "engine_id": "second"})) as second:
        second.fill(99)
        assert same(second.restored(tokens), made)
        second.assert_at_rest(holds=True)
    plain = EngineSettings(model=model, extra={**extra, "engine_id": "plain"})
    with Engine(plain) as third:
        assert third.backend._link.joined.namespace_id != pairs
        assert third.prefetch(tokens[:-1]) == 0
