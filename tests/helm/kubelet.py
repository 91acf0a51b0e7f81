"""What a kubelet makes of the chart's pods, as far as processes can show it; `compose` starts them.

Commands, arguments and variables with Kubernetes' own `$(NAME)`; Secrets and ConfigMaps as files of root that
the pod's group may read; folders of the node; users, and of root's powers only those that are added; a
read-only root. Services are names of one pod each.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tests.helm.chart import NAMESPACE, Rendered

_REFERENCE = re.compile(r"\$\(([A-Z_]+)\)")


def pods_as_services(rendered: Rendered, folder: Path, address: Any) -> dict[str, Any]:
    """Return the rendered pods in the words of a compose file.

    Args:
        rendered: the chart's objects.
        folder: where files and the node's folders are made.
        address: function from a pod's name to its address.
    """
    services: dict[str, Any] = {}
    aliases = {}
    for o in rendered.objects:
        template = o if o["kind"] == "Pod" else o.get("spec", {}).get("template")
        if template is None:
            continue
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        for index in range(o["spec"].get("replicas", 1)):
            for c in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
                name = component if component != "test" else c["name"]
                name = f"{name}-{index}" if o["spec"].get("replicas", 1) > 1 else name
                services[name] = _container(rendered, template["spec"], c, folder / name, address(name))
        for service in rendered.of("Service"):
            if service["spec"]["selector"].items() <= template["metadata"]["labels"].items():
                first = component if component in services else f"{component}-0"
                aliases[f"{service['metadata']['name']}.{NAMESPACE}.svc"] = first
    return {"services": services, "volumes": {}, "aliases": aliases}


def _container(
    rendered: Rendered, pod: dict[str, Any], c: dict[str, Any], folder: Path, address: str
) -> dict[str, Any]:
    env = _environment(rendered, c, address)
    security = pod["securityContext"]
    volumes, tmpfs = _volumes(rendered, pod, c, folder)
    added = [cap.lower() for cap in c["securityContext"]["capabilities"].get("add", [])]
    assert c["securityContext"]["capabilities"]["drop"] == ["ALL"]
    powers = ",".join(["-all", *(f"+{cap}" for cap in added)])
    command = c.get("command") or ([] if c["image"].startswith("valkey/") else ["caketin"])
    service = {
        "image": c["image"],
        "user": f"{security['runAsUser']}:{security['runAsGroup']}",
        "entrypoint": ["setpriv", "--bounding-set", powers, "--no-new-privs", *command],
        "command": [_filled(a, env) for a in c["args"]],
        "environment": env,
        "volumes": volumes,
        "tmpfs": tmpfs,
    }
    if "readinessProbe" in c:
        service["healthcheck"] = _probe(c, pod)
        service["stop_grace_period"] = f"{pod['terminationGracePeriodSeconds']}s"
    return service


def _environment(rendered: Rendered, c: dict[str, Any], address: str) -> dict[str, str]:
    env: dict[str, str] = {}
    for variable in c.get("env", []):
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            ref = source["secretKeyRef"]
            env[variable["name"]] = rendered.one("Secret", ref["name"])["stringData"][ref["key"]]
        elif "fieldRef" in source:
            env[variable["name"]] = address
        else:
            env[variable["name"]] = _filled(str(variable["value"]), env)
    return env


def _filled(text: str, env: dict[str, str]) -> str:
    return _REFERENCE.sub(lambda m: env.get(m[1], m[0]), str(text))


def _probe(c: dict[str, Any], pod: dict[str, Any]) -> dict[str, Any]:
    probe, start = c["readinessProbe"], c["startupProbe"]
    if "exec" in probe:
        test = ["CMD", *probe["exec"]["command"]]
    else:
        scheme = probe["httpGet"].get("scheme", "HTTP").lower()
        ports = {p["name"]: p["containerPort"] for p in c["ports"]}
        get = probe["httpGet"]
        url = f"{scheme}://127.0.0.1:{ports[get['port']]}{get['path']}"
        test = ["CMD", "curl", "-fsSk", "-m", "5", url]  # a kubelet trusts any certificate
    limit = start["periodSeconds"] * start["failureThreshold"]
    return {
        "test": test,
        "timeout": f"{probe.get('timeoutSeconds', 1)}s",
        "interval": f"{probe['periodSeconds']}s",
        "retries": 3,
        "start_period": f"{min(limit, 60)}s",
    }


def _volumes(
    rendered: Rendered, pod: dict[str, Any], c: dict[str, Any], folder: Path
) -> tuple[list[str], list[str]]:
    named = {v["name"]: v for v in pod.get("volumes", [])}
    group = pod["securityContext"].get("fsGroup", pod["securityContext"]["runAsGroup"])
    volumes, tmpfs = [], []
    for mount in c["volumeMounts"]:
        volume = named.get(mount["name"], {"claim": mount["name"]})
        place, mode = mount["mountPath"], ":ro" if mount.get("readOnly") else ""
        at = folder / mount["name"]
        if "emptyDir" in volume:
            tmpfs.append(place)
        elif "hostPath" in volume:
            # One folder of the node for all pods; made by the kubelet, so it is root's.
            at = folder.parent / "node" / volume["hostPath"]["path"].strip("/").replace("/", "-")
            at.mkdir(parents=True, exist_ok=True)
            volumes.append(f"{at}:{place}{mode}")
        elif "claim" in volume:
            at.mkdir(parents=True, exist_ok=True)
            os.chown(at, 0, group)
            at.chmod(0o2775)
            volumes.append(f"{at}:{place}{mode}")
        else:
            at.mkdir(parents=True, exist_ok=True)
            files, mode_of = _files(rendered, volume)
            for name, text in files.items():
                (at / name).write_text(text)
                os.chown(at / name, 0, group)
                (at / name).chmod(mode_of)
            volumes.append(f"{at}:{place}{mode}")
    return volumes, tmpfs


def _files(rendered: Rendered, volume: dict[str, Any]) -> tuple[dict[str, str], int]:
    if "secret" in volume:
        secret = volume["secret"]
        files = rendered.one("Secret", secret["secretName"])["stringData"]
        chosen = {i["key"]: i["path"] for i in secret.get("items", [])} or {k: k for k in files}
        return {path: files[key] for key, path in chosen.items()}, secret.get("defaultMode", 0o644)
    return rendered.one("ConfigMap", volume["configMap"]["name"])["data"], 0o644
