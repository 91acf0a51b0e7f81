"""The control plane as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from importlib.metadata import version
from typing import Any, Final

from fastapi import Depends, FastAPI

from api import errors
from api.context import Context, get_caller
from api.limits import InFlightLimit
from api.observer import RequestObserver
from api.openapi import describe
from api.purges import ObjectPurger
from api.routes import engines, jobs, keys, namespaces, observe, pages
from api.settings import Settings

SAMPLE_SECONDS: Final = 1.0
"""How often gauges are set; with several workers the one that is scraped cannot ask the others."""


def create_app(settings: Settings, purger: ObjectPurger | None = None) -> FastAPI:
    """Return the application; it connects to Redis on first use and closes on shutdown.

    Args:
        settings: what it is told.
        purger: the store, as far as a purge needs it; without one a purge clears the claims only.
    """
    context = Context.build(settings, purger)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            async with (
                _running(_sampling(context)),
                _running(context.purge_runner.run()),
                _running(context.counters.run()),
            ):
                yield
        finally:
            await context.redis.close()

    app = FastAPI(
        title="caketin",
        version=version("caketin"),
        summary="Control plane of the L3 tier of the hierarchical KV cache for hybrid LLMs",
        lifespan=lifespan,
        dependencies=[Depends(get_caller)],
    )
    app.state.context = context
    errors.install(app)
    for room in (pages, keys, engines, namespaces, jobs, observe):  # the first is found fastest
        app.include_router(room.router)
    describe(app)
    app.add_middleware(InFlightLimit, most=settings.max_calls_at_once)
    app.add_middleware(RequestObserver, metrics=context.metrics, log_requests=settings.log_requests)
    return app


@contextlib.asynccontextmanager
async def _running(loop: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a loop until the end of the block, and let it finish what it does on cancellation."""
    task = asyncio.create_task(loop)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _sampling(context: Context) -> None:
    while True:
        context.sample()
        await asyncio.sleep(SAMPLE_SECONDS)
