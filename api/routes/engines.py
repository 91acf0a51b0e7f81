"""Engines and ranks: registration, heartbeat, removal, and what is registered."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from api import bodies
from api.context import ContextDep, TenantDep
from api.paging import DEFAULT_LIMIT, Cursor, Limit, read_cursor, write_cursor
from api.schemas.engines import (
    EngineList,
    EngineSummary,
    EngineView,
    FileAccess,
    HeartbeatRequest,
    HeartbeatResult,
    MooncakeAccess,
    PoolGrant,
    RankPoolView,
    RankView,
    RegisterRequest,
    RegisterResult,
)
from api.schemas.wire import INCARNATION
from api.settings import StoreSettings
from metadata import object_keys
from metadata.codec import ENGINE_ID, RANK
from metadata.registered import RankRecord, Registration

router = APIRouter(prefix="/v1/engines", tags=["engines"])

EngineId = Annotated[str, Path(pattern=f"^{ENGINE_ID}$")]
Rank = Annotated[str, Path(pattern=f"^{RANK}$")]


@router.put("/{engine_id}/ranks/{rank}", response_model=RegisterResult)
async def register(
    request: Request, context: ContextDep, tenant: TenantDep, engine_id: EngineId, rank: Rank
) -> Response:
    """Register one rank with its pools, or renew it; 201 when it is new."""
    body = await bodies.read(request, context, RegisterRequest)
    done = await context.registry.register(
        Registration(
            engine_id=engine_id,
            rank=rank,
            incarnation=body.incarnation,
            namespace=body.namespace.to_namespace(tenant),
            pools=tuple(body.to_rank_pools()),
            min_pages=body.min_pages,
            labels=body.labels,
        )
    )
    logical = {p.name for p in body.pools if p.logical}
    grants = {
        name: PoolGrant(
            pool_id=pool.pool_id,
            bit=None if name in logical else pool.bit,
            suffixes=pool.suffixes,
            engines=pool.engines,
        )
        for name, pool in done.pools.items()
    }
    result = RegisterResult(
        namespace_id=done.namespace_id,
        tenant=tenant,
        epoch=done.epoch,
        lease_seconds=context.registry.lease_seconds,
        pools=grants,
        store=_store(context.settings.store, done.namespace_id),
    )
    context.metrics.registrations.labels("new" if done.new else "renewed").inc()
    return bodies.answer(request, result, 201 if done.new else 200)


@router.post("/{engine_id}/ranks/{rank}/heartbeat", response_model=HeartbeatResult)
async def heartbeat(
    request: Request, context: ContextDep, tenant: TenantDep, engine_id: EngineId, rank: Rank
) -> Response:
    """Renew a rank's lease."""
    body = await bodies.read(request, context, HeartbeatRequest)
    lease = await context.registry.heartbeat(tenant, engine_id, rank, body.incarnation, body.epoch)
    return bodies.answer(request, HeartbeatResult(lease_seconds=lease))


@router.delete("/{engine_id}/ranks/{rank}", status_code=204)
async def remove_rank(
    context: ContextDep,
    tenant: TenantDep,
    engine_id: EngineId,
    rank: Rank,
    incarnation: Annotated[str, Query(pattern=INCARNATION)],
) -> Response:
    """Remove a rank; twice is fine. Nothing leaves L3."""
    await context.registry.remove(tenant, engine_id, rank, incarnation)
    return Response(status_code=204)


@router.delete("/{engine_id}", status_code=204)
async def remove_engine(context: ContextDep, tenant: TenantDep, engine_id: EngineId) -> Response:
    """Remove all ranks of an engine; twice is fine. Nothing leaves L3."""
    await context.registry.remove(tenant, engine_id)
    return Response(status_code=204)


@router.get("", response_model=EngineList)
async def list_engines(
    request: Request,
    context: ContextDep,
    tenant: TenantDep,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List the engines, sorted by id."""
    found = []
    piece = await context.registry.engines_piece(tenant, limit=limit, cursor=read_cursor(cursor))
    for engine_id, ranks in piece.items:
        found.append(
            EngineSummary(
                engine_id=engine_id,
                namespaces=sorted({r.namespace_id for r in ranks}),
                ranks=[r.rank for r in ranks],
            )
        )
    return bodies.answer(request, EngineList(engines=found, next_cursor=write_cursor(piece.next_cursor)))


@router.get("/{engine_id}", response_model=EngineView)
async def get_engine(
    request: Request, context: ContextDep, tenant: TenantDep, engine_id: EngineId
) -> Response:
    """Show one engine with its ranks and their pools."""
    ranks = await context.registry.engine(tenant, engine_id)
    return bodies.answer(request, EngineView(engine_id=engine_id, ranks=[_rank_view(r) for r in ranks]))


def _rank_view(record: RankRecord) -> RankView:
    return RankView(
        rank=record.rank,
        namespace_id=record.namespace_id,
        incarnation=record.incarnation,
        epoch=record.epoch,
        lease_seconds_left=max(0, int(record.lease_until - time.time())),
        min_pages=record.min_pages,
        labels=record.labels,
        pools=[
            RankPoolView(
                name=p.spec.name,
                pool_id=p.spec.pool_id,
                shard_count=p.spec.shard_count,
                owned_shards=list(p.owned_shards),
                host_bytes=p.host_bytes,
            )
            for p in record.pools
        ],
    )


def _store(store: StoreSettings, namespace_id: str) -> MooncakeAccess | FileAccess:
    prefix = object_keys.namespace_prefix(namespace_id)
    if store.kind == "file":
        return FileAccess(path=store.path, max_bytes=store.max_bytes or None, key_prefix=prefix)
    return MooncakeAccess(
        master=store.master,
        metadata=store.metadata,
        protocol=store.protocol,
        devices=store.devices,
        key_prefix=prefix,
    )
