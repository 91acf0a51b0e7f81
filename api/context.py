"""What a request handler may use: one typed object instead of names on the application's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request
from structlog.contextvars import bind_contextvars

from api.auth import Access, Caller, require_loopback_name
from api.limits import RateLimiter
from api.metrics import Metrics
from api.purges import ObjectPurger, PurgeRunner
from api.settings import Settings
from api.token_file import open_token_file
from metadata.circuit import CircuitSettings
from metadata.hit_counters import HitCounters
from metadata.page_explanation import PageExplainer
from metadata.page_index import IndexSettings, PageIndex
from metadata.prefix_lookup import PrefixLookup
from metadata.purge_jobs import PurgeJobs
from metadata.quota_rules import Quota
from metadata.quotas import TenantQuotas
from metadata.redis_server import RedisServer, RedisSettings
from metadata.registry import Registry
from metadata.stored_pages import StoredPages


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
    purges: PurgeJobs
    purge_runner: PurgeRunner
    metrics: Metrics
    access: Access

    @classmethod
    def build(cls, settings: Settings, purger: ObjectPurger | None = None) -> Context:
        """Put the parts together; connects on first use.

        Raises:
            InvalidInput: the token file cannot be used.
        """
        access = Access(
            open_token_file(settings.token_file),
            RateLimiter(settings.calls_per_second, settings.calls_burst),
            Quota(settings.tenant_max_pages or None, settings.tenant_max_bytes or None),
        )
        redis = RedisServer.connect(
            RedisSettings(
                settings.redis_url.get_secret_value(),
                connect_seconds=settings.redis_connect_seconds,
                command_seconds=settings.redis_command_seconds,
                circuit=CircuitSettings(settings.redis_failures_to_open, settings.redis_probe_seconds),
            )
        )
        registry = Registry(redis, lease_seconds=settings.lease_seconds)
        lives = IndexSettings(settings.companion_seconds, settings.note_seconds, settings.negative_seconds)
        index = PageIndex(redis, lives)
        counters = HitCounters(redis, settings.flush_seconds)
        purges = PurgeJobs(redis, registry, index)
        return cls(
            settings,
            redis,
            registry,
            index,
            counters,
            PrefixLookup(registry, index, counters, PageExplainer(redis)),
            StoredPages(registry, index, counters, TenantQuotas(registry, index, access.quota)),
            purges,
            PurgeRunner(purges, purger),
            Metrics(),
            access,
        )

    def sample(self) -> None:
        """Let the metrics take over the state of the parts."""
        self.metrics.sample(self.counters, redis_up=not self.redis.open_circuits())


def context_of(request: Request) -> Context:
    """Return the context of the application that serves `request`.

    For the calls of which there are thousands a second; FastAPI solves a dependency in 40 us.
    """
    return cast(Context, request.app.state.context)


def caller_of(request: Request) -> Caller:
    """Return who calls, as `get_caller` found before any route ran."""
    return cast(Caller, request.state.caller)


async def get_context(request: Request) -> Context:
    """Return the context of the application that serves `request`.

    A coroutine like every dependency here: FastAPI runs plain functions in a thread, which costs 0.2 ms.
    """
    return context_of(request)


ContextDep = Annotated[Context, Depends(get_context)]


async def get_caller(request: Request) -> Caller:
    """Return who calls; the whole application depends on it, so that no route is without.

    Raises:
        Unauthenticated, Forbidden, RateLimited: the call is refused.
    """
    route = getattr(request.scope.get("route"), "path", "")
    context = context_of(request)
    if context.access.tokens is None:
        require_loopback_name(request.headers.get("host", ""))
    caller = context.access.authorize(request.method, route, request.headers.getlist("authorization"))
    if caller.token_id:
        bind_contextvars(token_id=caller.token_id, tenant=caller.tenant)
    request.state.caller = caller
    return caller


CallerDep = Annotated[Caller, Depends(get_caller)]


async def get_tenant(request: Request) -> str:
    """Return whose data the request may see: the token says it, never the body."""
    return caller_of(request).tenant


TenantDep = Annotated[str, Depends(get_tenant)]
