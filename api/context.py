"""What a request handler may use: one typed object instead of names on the application's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from api.settings import Settings
from metadata.hit_counters import HitCounters
from metadata.page_index import IndexSettings, PageIndex
from metadata.prefix_lookup import PrefixLookup
from metadata.redis_server import RedisServer, RedisSettings
from metadata.registry import Registry
from metadata.stored_pages import StoredPages

LOCAL_TENANT = "default"
"""Whose data a server without tokens holds; such a server listens on loopback only."""


@dataclass(frozen=True)
class Context:
    """The control plane's parts."""

    settings: Settings
    redis: RedisServer
    registry: Registry
    index: PageIndex
    counters: HitCounters
    lookups: PrefixLookup
    pages: StoredPages

    @classmethod
    def build(cls, settings: Settings) -> Context:
        """Put the parts together; connects on first use."""
        redis = RedisServer.connect(
            RedisSettings(
                settings.redis_url.get_secret_value(),
                connect_seconds=settings.redis_connect_seconds,
                command_seconds=settings.redis_command_seconds,
            )
        )
        registry = Registry(redis, lease_seconds=settings.lease_seconds)
        index = PageIndex(redis, IndexSettings(settings.companion_seconds, settings.note_seconds))
        counters = HitCounters(redis, settings.flush_seconds)
        return cls(
            settings,
            redis,
            registry,
            index,
            counters,
            PrefixLookup(registry, index, counters),
            StoredPages(registry, index, counters),
        )


def get_context(request: Request) -> Context:
    """Return the context of the application that serves `request`."""
    return cast(Context, request.app.state.context)


def get_tenant() -> str:
    """Return whose data the request may see."""
    return LOCAL_TENANT


ContextDep = Annotated[Context, Depends(get_context)]
TenantDep = Annotated[str, Depends(get_tenant)]
