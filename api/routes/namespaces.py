"""Namespaces with their pool variants, and their purge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api import bodies
from api.context import ContextDep, TenantDep
from api.paging import DEFAULT_LIMIT, Cursor, Limit, read_cursor, write_cursor
from api.routes.pages import NamespaceId
from api.schemas.namespaces import (
    NamespaceList,
    NamespaceSummary,
    NamespaceView,
    PoolVariantView,
    PurgeResult,
)
from api.schemas.pools import PartBody, policy_body
from metadata.registered import NamespaceView as Registered
from metadata.registered import Variant

router = APIRouter(prefix="/v1/namespaces", tags=["namespaces"])


@router.get("", response_model=NamespaceList)
async def list_namespaces(
    request: Request,
    context: ContextDep,
    tenant: TenantDep,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List the namespaces, sorted by id."""
    piece = await context.registry.namespaces_piece(tenant, limit=limit, cursor=read_cursor(cursor))
    found = [NamespaceSummary(**_summary(v, await context.registry.members(v))) for v in piece.items]
    return bodies.answer(
        request, NamespaceList(namespaces=found, next_cursor=write_cursor(piece.next_cursor))
    )


@router.get("/{ns}", response_model=NamespaceView)
async def get_namespace(
    request: Request, context: ContextDep, tenant: TenantDep, namespace_id: NamespaceId
) -> Response:
    """Show one namespace with its pool variants."""
    view = await context.registry.namespace(tenant, namespace_id, fresh=True)
    claimed = await context.index.claimed_pages(namespace_id)
    members = await context.registry.members(view)
    pools = [
        _variant(v, claimed.get(v.bit, 0), members[pool_id]) for pool_id, v in sorted(view.variants.items())
    ]
    return bodies.answer(
        request,
        NamespaceView(
            **_summary(view, members),
            pools=pools,
            pages=max((p.pages for p in pools), default=0),
            bytes=sum(p.bytes for p in pools),
        ),
    )


@router.delete("/{ns}", response_model=PurgeResult, status_code=202)
async def purge_namespace(
    request: Request, context: ContextDep, tenant: TenantDep, namespace_id: NamespaceId
) -> Response:
    """Purge a namespace: its claims, then its objects; where a purge is under way, tell that job."""
    job = await context.purges.start(tenant, namespace_id)
    context.purge_runner.ask(job)
    return bodies.answer(request, PurgeResult(job_id=job.job_id), 202)


def _summary(view: Registered, members: Mapping[str, set[str]]) -> dict[str, Any]:
    engines = set().union(*members.values())
    return {"namespace_id": view.namespace_id, **view.identity.to_json(), "engines": len(engines)}


def _variant(variant: Variant, pages: int, engines: set[str]) -> PoolVariantView:
    spec = variant.spec
    return PoolVariantView(
        name=spec.name,
        pool_id=spec.pool_id,
        bit=None if spec.logical else variant.bit,
        logical=spec.logical,
        parts=[PartBody(part=p.part, dtype=p.dtype, bytes=p.bytes) for p in spec.parts],
        object_layout=spec.object_layout,
        hit_policy=policy_body(spec.hit_policy),
        indices_from=spec.indices_from,
        shards_registered=spec.shard_count - len(variant.missing_shards),
        shards_expected=spec.shard_count,
        engines=len(engines),
        pages=pages,
        bytes=pages * spec.bytes_per_page * spec.shard_count,
    )
