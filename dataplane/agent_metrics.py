"""The agent's metrics, read from its state whenever they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dataplane.agent import Agent

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class AgentCollector:
    """A collector for `prometheus_client`: no state of its own, so nothing can be counted twice."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield from self._pools()
        yield from self._transfers()
        yield from self._store()

    def _pools(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415  extra server

        agent = self._agent
        slots = GaugeMetricFamily(
            "caketin_agent_slots", "Page slots of host memory by pool and state", labels=["pool", "state"]
        )
        for name, pool in agent.status().pools.items():
            for state in ("free", "resident", "locked", "quarantined"):
                slots.add_metric([name, state], getattr(pool, state))
        yield slots
        evicted = CounterMetricFamily(
            "caketin_agent_evicted_pages", "Pages evicted from host memory", labels=["pool"]
        )
        totals: dict[str, int] = {}
        for tier in agent.tiers:
            for name, pages in tier.evicted.items():
                totals[name] = totals.get(name, 0) + pages
        for name, pages in totals.items():
            evicted.add_metric([name], pages)
        yield evicted
        yield GaugeMetricFamily("caketin_agent_sessions", "Open sessions", value=len(agent.sessions))
        yield GaugeMetricFamily(
            "caketin_agent_memory_bytes", "Shared memory of all pools", value=agent.tiers.used_bytes
        )
        yield GaugeMetricFamily(
            "caketin_agent_memory_limit_bytes",
            "Most shared memory that pools may take",
            value=agent.settings.memory_bytes,
        )

    def _transfers(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415  extra server

        transfers = self._agent.transfers
        counts = transfers.counts()
        now = GaugeMetricFamily("caketin_agent_transfers", "Transfers under way by state", labels=["state"])
        now.add_metric(["queued"], counts.queued)
        now.add_metric(["running"], counts.running)
        now.add_metric(["hanging"], transfers.hanging)
        yield now
        ended = CounterMetricFamily(
            "caketin_agent_transfers_ended", "Transfers that ended, by state", labels=["state"]
        )
        for state in ("done", "cancelled", "failed"):
            ended.add_metric([state], getattr(counts, state))
        yield ended
        yield GaugeMetricFamily(
            "caketin_agent_bytes_in_flight",
            "Most bytes that the running transfers move",
            value=transfers.bytes_in_flight,
        )

    def _store(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415  extra server

        health = self._agent.stores.health
        moved = CounterMetricFamily(
            "caketin_agent_bytes", "Bytes moved between host memory and the store", labels=["direction"]
        )
        moved.add_metric(["read"], health.bytes_read)
        moved.add_metric(["written"], health.bytes_written)
        yield moved
        yield GaugeMetricFamily(
            "caketin_agent_ready",
            "1 while the agent can move bytes",
            value=0 if self._agent.not_ready() else 1,
        )
