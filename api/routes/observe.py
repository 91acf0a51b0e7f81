"""What operators and probes look at: hit rates, metrics, process health, readiness."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from api import bodies
from api.context import CallerDep, ContextDep
from api.metrics import CONTENT_TYPE
from api.readiness import readiness
from api.schemas.observe import Health, HitRates, HitRatesQuery, Readiness

router = APIRouter(tags=["observing"])


@router.get("/v1/hit-rates", response_model=HitRates)
async def hit_rates(
    request: Request,
    context: ContextDep,
    caller: CallerDep,
    *,
    window: str = "3600",
    step: str = "60",
    by: str = "",
) -> Response:
    """Give hit rates over time; without `pool` in `by` a row counts the whole prefix."""
    query = HitRatesQuery.parse(window, step, by)
    rates = await context.counters.series(query.window, query.step, query.by, caller.counts_of)
    return bodies.answer(request, HitRates.model_validate(rates))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(context: ContextDep) -> Response:
    """Give the metrics in Prometheus' text format."""
    context.sample()
    return Response(context.metrics.text(), media_type=CONTENT_TYPE)


@router.get("/healthz", response_model=Health)
async def healthz(request: Request) -> Response:
    """Say that the process runs."""
    return bodies.answer(request, Health())


@router.get("/readyz", response_model=Readiness)
async def readyz(request: Request, context: ContextDep, caller: CallerDep) -> Response:
    """Say whether the process can take work; what is wrong if not is for an operator of all tenants."""
    checks = await readiness(context.redis, context.registry)
    ready = all(check.ok for check in checks)
    checks += context.access.checks()
    if not caller.sees_all:
        checks = [check.model_copy(update={"detail": ""}) for check in checks]
    return bodies.answer(request, Readiness(ready=ready, checks=checks), 200 if ready else 503)
