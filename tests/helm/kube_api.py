"""So much of a Kubernetes API server that the real Helm installs, upgrades and removes a release on it.

It keeps objects as they come and runs nothing. What it is for: what Helm does with what is there already,
such as tokens that an upgrade must not replace.
"""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

RESOURCES = {
    "v1": {"Secret": "secrets", "ConfigMap": "configmaps", "Service": "services", "Pod": "pods",
           "ServiceAccount": "serviceaccounts", "Namespace": "namespaces"},
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets", "DaemonSet": "daemonsets"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"},
}  # fmt: skip


class KubeApi:
    """A server on loopback; a context manager."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self._version = 0
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = self.rfile.read(length)
                status, answer = api.answer(self.command, self.path, body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        for verb in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            setattr(Handler, f"do_{verb}", Handler._serve)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    def __enter__(self) -> KubeApi:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def kubeconfig(self) -> str:
        """What a client needs to find it."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [{"name": "test", "cluster": {"server": url}}],
                "users": [{"name": "test", "user": {}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            }
        )

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """All objects of a kind, by name; Helm's own records left out."""
        return {
            o["metadata"]["name"]: o
            for o in self.objects.values()
            if o["kind"] == kind and not o.get("type", "").startswith("helm.sh/")
        }

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        """Return status and body for a call."""
        url = urlsplit(target)
        self.calls.append(f"{method} {target}")
        found = self._discovery(url.path)
        if found is not None:
            return 200, found
        given = yaml.safe_load(body) if body else {}
        if method == "POST":
            return self._put(f"{url.path}/{given['metadata']['name']}", given, new=True)
        if method in {"PUT", "PATCH"}:
            old = self.objects.get(url.path, {})
            return self._put(url.path, given if method == "PUT" or not old else _merged(old, given))
        if method == "DELETE":
            gone = self.objects.pop(url.path, None)
            return (200, gone) if gone else (404, _missing(url.path))
        return self._get(url.path, parse_qs(url.query))

    def _get(self, path: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        if path in self.objects:
            return 200, self.objects[path]
        plurals = {
            plural: (group, kind) for group, all_ in RESOURCES.items() for kind, plural in all_.items()
        }
        last = path.rsplit("/", 1)[1]
        if last not in plurals:
            return 404, _missing(path)
        wanted = dict(p.split("=") for p in query.get("labelSelector", [""])[0].split(",") if "=" in p)
        items = [
            o for at, o in sorted(self.objects.items())
            if at.startswith(f"{path}/") and wanted.items() <= o["metadata"].get("labels", {}).items()
        ]  # fmt: skip
        group, kind = plurals[last]
        return 200, {"apiVersion": group, "kind": f"{kind}List", "metadata": {}, "items": items}

    def _put(self, path: str, given: dict[str, Any], *, new: bool = False) -> tuple[int, Any]:
        if new and path in self.objects:
            return 409, _status(409, "AlreadyExists", f"{path} already exists")
        self._version += 1
        given["metadata"] |= {"resourceVersion": str(self._version), "uid": path}
        for name, text in (given.pop("stringData", None) or {}).items():
            given.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()
        self.objects[path] = given
        return (201 if new else 200), given

    def _discovery(self, path: str) -> Any:
        if path == "/version":
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = [g.split("/") for g in RESOURCES if "/" in g]
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [
                    {
                        "name": name,
                        "versions": [{"groupVersion": f"{name}/{v}", "version": v}],
                        "preferredVersion": {"groupVersion": f"{name}/{v}", "version": v},
                    }
                    for name, v in groups
                ],
            }
        if path.startswith("/openapi/v3"):
            return _openapi(path.removeprefix("/openapi/v3").strip("/"))
        group = path.removeprefix("/apis/").removeprefix("/api/")
        if group not in RESOURCES:
            return None
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": group,
            "resources": [
                {"name": p, "singularName": "", "namespaced": k != "Namespace", "kind": k, "verbs": verbs}
                for k, p in RESOURCES[group].items()
            ],
        }


def _openapi(path: str) -> dict[str, Any]:
    """What says that the server checks fields by itself, so that Helm need not have every schema."""
    at = {g: f"apis/{g}" if "/" in g else f"api/{g}" for g in RESOURCES}
    if not path:
        return {"paths": {p: {"serverRelativeURL": f"/openapi/v3/{p}?hash=1"} for p in at.values()}}
    (group,) = [g for g, p in at.items() if p == path]
    name, _, version = group.rpartition("/")
    paths = {
        f"/{path}/namespaces/{{namespace}}/{plural}/{{name}}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "x-kubernetes-group-version-kind": {"group": name, "version": version, "kind": kind},
            }
        }
        for kind, plural in RESOURCES[group].items()
    }
    return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": paths}


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {k: _merged(old[k], v) if isinstance(v, dict) and isinstance(old.get(k), dict) else v
            for k, v in new.items()}  # fmt: skip
    return {k: v for k, v in (old | both).items() if v is not None}


def _missing(path: str) -> dict[str, Any]:
    return _status(404, "NotFound", f"{path} not found")


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code,
            "message": message}  # fmt: skip
