"""The control plane as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version

from fastapi import FastAPI

from api import errors
from api.context import Context
from api.routes import engines, keys, namespaces, observe, pages
from api.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """Return the application; it connects to Redis on first use and closes on shutdown."""
    context = Context.build(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        flusher = asyncio.create_task(context.counters.run())
        try:
            yield
        finally:
            flusher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flusher
            await context.redis.close()

    app = FastAPI(
        title="caketin",
        version=version("caketin"),
        summary="Control plane of the L3 tier of the hierarchical KV cache for hybrid LLMs",
        lifespan=lifespan,
    )
    app.state.context = context
    errors.install(app)
    for room in (engines, namespaces, pages, keys, observe):
        app.include_router(room.router)
    return app
