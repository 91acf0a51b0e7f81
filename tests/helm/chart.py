"""The chart as the real Helm renders it, and the values that it is rendered with."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parent.parent.parent
CHART = REPO / "helm" / "caketin"
NAMESPACE = "ml"
RELEASE = "caketin"

PRODUCTION: dict[str, Any] = {
    "image": {"registry": "registry.example/team", "pullSecrets": [{"name": "team"}]},
    "auth": {"existingSecret": "tokens", "engineTokenSecret": "engine", "scraperTokenSecret": "scraper"},
    "tls": {"enabled": True, "existingSecret": "caketin-tls"},
    "api": {
        "replicas": 3,
        "image": {"repository": "caketin/api", "digest": "sha256:" + "0" * 64},
        "config": {"workers": 4, "max_body_bytes": 16777216, "tenant_max_bytes": 40_000_000_000_000},
        "autoscaling": {"enabled": True},
        "ingress": {"enabled": True, "className": "nginx", "host": "kv.example", "tlsSecret": "kv-tls"},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
        "extraEnv": [{"name": "NO_COLOR", "value": "1"}],
        "priorityClassName": "high",
    },
    "redis": {
        "mode": "external",
        "external": {
            "topology": "sentinel",
            "hosts": ["sentinel-0.redis:26379", "sentinel-1.redis:26379"],
            "service": "caketin",
            "passwordSecret": "redis",
            "tls": True,
            "caSecret": "redis-ca",
        },
    },
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
    "networkPolicy": {"nodeCIDRs": ["10.0.0.0/16"], "externalRedisCIDRs": ["10.2.0.0/24"]},
}
RDMA: dict[str, Any] = {
    "store": {"protocol": "rdma"},
    "rdma": {"resourceName": "rdma/ib", "count": 2, "devices": "mlx5_0,mlx5_1", "gidIndex": 3, "mtu": 4096},
    "agent": {"enabled": True, "hostMemory": "64Gi", "allowedUids": [1000]},
    "mooncake": {"storage": {"segmentSize": "256Gi", "hugepages": "2Mi", "prefault": True}},
    "networkPolicy": {"nodeCIDRs": ["10.0.0.0/16"]},
}
CASES: dict[str, dict[str, Any]] = {
    "minimal": {},
    "production": PRODUCTION,
    "rdma": RDMA,
    "agent over tcp": {"agent": {"enabled": True, "hostNetwork": False}},
    "redis by url": {"redis": {"mode": "external", "external": {"url": "redis+cluster://a:6379,b:6379"}}},
    "redis by secret": {"redis": {"mode": "external", "external": {"existingSecret": "redis"}}},
    "redis by parts": {
        "redis": {
            "mode": "external",
            "external": {"hosts": ["redis:6379"], "database": 3, "username": "kv", "passwordSecret": "redis"},
        }
    },
    "tls": {
        "tls": {"enabled": True, "existingSecret": "tls"},
        "agent": {"enabled": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    },
    "existing mooncake": {
        "mooncake": {
            "mode": "external",
            "external": {"master": "10.0.0.5:50051", "masterHttp": "10.0.0.5:9003"},
        }
    },
    "gateway": {"api": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}},
    "more tokens": {
        "auth": {
            "tokens": [
                {"id": "router", "tenant": "acme", "scopes": ["reader"], "sha256": "ab" * 32},
                {
                    "id": "x",
                    "tenant": "acme",
                    "scopes": ["engine", "operator"],
                    "sha256": "cd" * 32,
                    "expires": "2027-01-31T12:00:00Z",
                    "comment": 'says "hello"',
                },
            ],
            "tenants": {"acme": {"max_pages": 2_000_000, "max_bytes": 40_000_000_000_000}},
        }
    },
}
"""Values worth rendering, by name."""

NEEDS: dict[str, dict[str, Any]] = {
    "tls.enabled": {"tls": {"existingSecret": "tls"}},
    "api.httpRoute.enabled": {"api": {"httpRoute": {"parentRefs": [{"name": "public"}]}}},
}
"""What a switch needs beside it."""


@dataclass
class Rendered:
    """The objects of one rendering."""

    objects: list[dict[str, Any]]
    notes: str

    def of(self, kind: str, name: str | None = None) -> list[dict[str, Any]]:
        return [
            o for o in self.objects if o["kind"] == kind and (name is None or o["metadata"]["name"] == name)
        ]

    def one(self, kind: str, name: str | None = None) -> dict[str, Any]:
        (found,) = self.of(kind, name)
        return found

    def pods(self) -> dict[str, dict[str, Any]]:
        """Every pod's spec, by kind and name."""
        found = {}
        for o in self.objects:
            spec = o["spec"] if o["kind"] == "Pod" else o.get("spec", {}).get("template", {}).get("spec")
            if spec is not None:
                found[f"{o['kind']}/{o['metadata']['name']}"] = spec
        return found

    def containers(self) -> dict[str, dict[str, Any]]:
        """Every container, by pod and name."""
        return {
            f"{pod}/{c['name']}": c
            for pod, spec in self.pods().items()
            for c in [*spec.get("initContainers", []), *spec["containers"]]
        }


class _Loader(yaml.SafeLoader):
    """Refuses a key that comes twice, which Kubernetes would settle in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(k, deep=deep) for k, _ in node.value]
        twice = {k for k in keys if keys.count(k) > 1}
        assert not twice, f"{sorted(map(str, twice))} twice{node.start_mark}"
        return super().construct_mapping(node, deep)


def render(
    values: dict[str, Any], *, name: str = RELEASE, namespace: str = NAMESPACE, upgrade: bool = False
) -> Rendered:
    """Render the chart with Helm's own engine, after Helm's own look at the schema."""
    import helm_python

    objects: list[dict[str, Any]] = []
    notes = ""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=name, namespace=namespace, is_upgrade=upgrade)
    for file, text in files.items():
        if file.endswith("NOTES.txt"):
            notes = text
        elif not Path(file).name.startswith("_"):
            # The loader is PyYAML's safe one.
            objects += [o for o in yaml.load_all(text, _Loader) if o]
    return Rendered(objects, notes)


def defaults() -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def switches() -> list[tuple[str, bool]]:
    """Every boolean of values.yaml, by its dotted name, with its default."""
    found: list[tuple[str, bool]] = []

    def walk(values: dict[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, bool):
                found.append((prefix + name, value))
            elif isinstance(value, dict):
                walk(value, f"{prefix}{name}.")

    walk(defaults(), "")
    return found


def flipped(switch: str, value: bool) -> dict[str, Any]:
    """Values with one switch the other way, and what it needs."""
    values = deepcopy(NEEDS.get(switch, {}))
    at = values
    *path, last = switch.split(".")
    for step in path:
        at = at.setdefault(step, {})
    at[last] = not value
    return values


def matrix() -> dict[str, dict[str, Any]]:
    """All cases, and every switch flipped."""
    return CASES | {f"{name} = {str(not on).lower()}": flipped(name, on) for name, on in switches()}
