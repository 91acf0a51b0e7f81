"""Suffix resolution: which objects hold a page, in the scheme of caketin or of a stock engine."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api import bodies
from api.context import ContextDep, TenantDep
from api.routes.pages import NamespaceId
from api.schemas.keys import KeysRequest, KeysResult, PoolKeys
from metadata.key_resolver import resolve, resolve_sglang

router = APIRouter(prefix="/v1/namespaces/{ns}", tags=["pages"])


@router.post("/keys", response_model=KeysResult)
async def keys(
    request: Request, context: ContextDep, tenant: TenantDep, namespace_id: NamespaceId
) -> Response:
    """Give the object keys of pages: one list a page, shards ascending, parts in order."""
    body = await bodies.read(request, context, KeysRequest)
    view = await context.registry.namespace(tenant, namespace_id)
    if body.layout is not None:
        found = resolve_sglang(body.layout.to_layout(), body.page_hashes)
    else:
        asked = body.pools
        found = resolve(
            view,
            body.page_hashes,
            None if asked is None else {n: (p.pool_id, p.shards) for n, p in asked.items()},
        )
    pools = {name: PoolKeys(pool_id=pool_id, keys=listed) for name, (pool_id, listed) in found.items()}
    return bodies.answer(request, KeysResult(pools=pools))
