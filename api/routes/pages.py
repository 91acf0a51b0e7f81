"""Pages of a namespace: lookup, commit, missing, and the keys of their objects."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from api import bodies
from api.context import caller_of, context_of
from api.direct_route import NAMESPACE_ID, DirectRoute
from api.schemas.commit import CommitRequest, CommitResult, MissingRequest, MissingResult, Rejection
from api.schemas.lookup import (
    ExplainedPage,
    LookupRequest,
    LookupResult,
    Miss,
    MissNote,
    PoolState,
)
from metadata.page_explanation import ExplainedPage as Explained
from metadata.prefix_lookup import LookupAnswer, LookupQuery, PoolQuery
from metadata.stored_pages import PoolPages

router = APIRouter(prefix="/v1/namespaces/{ns}", tags=["pages"], route_class=DirectRoute)

NamespaceId = Annotated[str, Path(alias="ns", pattern=NAMESPACE_ID)]


@router.post("/lookup", response_model=LookupResult)
async def lookup(request: Request, namespace_id: NamespaceId) -> Response:
    """Say how much of a prompt is restorable, and why not more."""
    context, caller = context_of(request), caller_of(request)
    body = await bodies.read(request, context, LookupRequest)
    if body.purpose == "prefetch":
        caller.require("engine")
    pools = body.pools
    query = LookupQuery(
        page_hashes=body.page_hashes,
        token_ids=None if body.token_ids is None else body.token_ids.values,
        cache_salt=body.cache_salt.get_secret_value() if body.cache_salt else None,
        extra_key=None if body.extra_key is None else body.extra_key.get_secret_value(),
        first_page=body.first_page,
        prefix_hashes=body.prefix_hashes,
        engine_id=body.engine_id,
        rank=body.rank,
        pools=None if pools is None else {n: PoolQuery(p.window_pages, p.pool_id) for n, p in pools.items()},
        min_pages=body.min_pages,
        counted=body.purpose == "prefetch",
        request_id=body.request_id,
        explain=body.explain,
    )
    found = await context.lookups.lookup(caller.tenant, namespace_id, query)
    context.metrics.lookup(body.purpose, caller.tenant, found)
    return bodies.answer(request, _lookup_result(found, advisory=body.purpose != "prefetch"))


@router.post("/commit", response_model=CommitResult)
async def commit(request: Request, namespace_id: NamespaceId) -> Response:
    """Claim pages that are stored and confirmed."""
    context, tenant = context_of(request), caller_of(request).tenant
    body = await bodies.read(request, context, CommitRequest)
    stored = {name: PoolPages(p.pages, tuple(p.shards), pool_id=p.pool_id) for name, p in body.stored.items()}
    who = (body.engine_id, body.rank)
    done = await context.pages.commit(tenant, namespace_id, who, body.page_hashes, stored)
    context.metrics.commit(done)
    rejected = [Rejection(page=r.page, pool=r.pool, code=r.code) for r in done.rejected]
    return bodies.answer(
        request, CommitResult(committed=done.committed, complete=done.complete, rejected=rejected)
    )


@router.post("/missing", response_model=MissingResult)
async def missing(request: Request, namespace_id: NamespaceId) -> Response:
    """Report pages that could not be read; their claims are cleared at once."""
    context, tenant = context_of(request), caller_of(request).tenant
    body = await bodies.read(request, context, MissingRequest)
    gone = {
        name: PoolPages(p.pages, tuple(p.shards), p.reason, p.pool_id) for name, p in body.missing.items()
    }
    cleared, stale = await context.pages.missing(
        tenant,
        namespace_id,
        (body.engine_id, body.rank),
        body.page_hashes,
        gone,
        generations=body.generation,
    )
    context.metrics.cleared(cleared, stale)
    return bodies.answer(request, MissingResult(cleared=cleared, stale=stale))


def _lookup_result(found: LookupAnswer, *, advisory: bool) -> LookupResult:
    miss = found.miss
    return LookupResult(
        queried_pages=found.queried_pages,
        hit_pages=found.hit_pages,
        hit_tokens=found.hit_tokens,
        restorable=found.restorable,
        pools=found.pools,
        generation=found.generations,
        advisory=advisory,
        degraded=found.degraded,
        unchecked_window_pages=found.unchecked_window_pages,
        miss=None
        if miss is None
        else Miss(
            page=miss.page,
            pool=miss.pool,
            reason=miss.reason,  # type: ignore[arg-type]  # the domain's reasons are the contract's
            shards=miss.shards,
            age_seconds=miss.age_seconds,
        ),
        pages=None if found.explained is None else [_explained(page) for page in found.explained],
    )


def _explained(page: Explained) -> ExplainedPage:
    pools = {
        name: PoolState(
            state=pool.state,
            shards=pool.missing_shards,
            note=None if pool.lost is None else MissNote(reason=pool.lost[0], age_seconds=pool.lost[1]),
        )
        for name, pool in page.pools.items()
    }
    return ExplainedPage(page=page.page, pools=pools)
