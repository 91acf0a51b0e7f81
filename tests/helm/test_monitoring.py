"""Dashboards and alerts: every metric and label that they name is given by a program, and alerts fire."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.metrics import Metrics
from dataplane.agent import Agent
from dataplane.agent_metrics import AgentCollector
from dataplane.agent_settings import AgentSettings
from dataplane.mooncake_node import MooncakeCluster
from tests.helm.chart import CASES, CHART, render

pytestmark = [pytest.mark.helm, pytest.mark.timeout(300)]

ALERTS = CHART / "files" / "alerts.yaml"
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
OURS = re.compile(r"\b((?:caketin|master)_\w+)\b(?:\{([^}]*(?:\{[^}]*\}[^}]*)*)\})?")
OF_PROMETHEUS = {"job", "instance", "le", "pod", "namespace"}


@cache
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return found


def rules() -> list[dict[str, Any]]:
    return [r for group in yaml.safe_load(ALERTS.read_text())["groups"] for r in group["rules"]]


def dashboard_expressions() -> list[tuple[str, str]]:
    """(panel, expression) of every target of every dashboard."""
    return [
        (panel["title"], target["expr"])
        for file in DASHBOARDS
        for panel in json.loads(file.read_text())["panels"]
        for target in panel.get("targets", [])
    ]


def expressions() -> list[tuple[str, str]]:
    return [*((r["alert"], r["expr"]) for r in rules()), *dashboard_expressions()]


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Every series of the control plane and of a real Mooncake master."""
    metrics = Metrics()
    found: dict[str, set[str]] = {}
    for collector, names in metrics.registry._collector_to_names.items():
        labels = set(getattr(collector, "_labelnames", ()))
        found |= dict.fromkeys(names, labels)
    with (
        MooncakeCluster(1 << 24) as cluster,
        urllib.request.urlopen(f"http://{cluster.master_http}/metrics", timeout=10) as answer,
    ):
        for line in answer.read().decode().splitlines():
            if line and not line.startswith("#"):
                found[re.split(r"[ {]", line, maxsplit=1)[0]] = set(re.findall(r"(\w+)=\"", line))
    return found | given_by_an_agent()


def given_by_an_agent() -> dict[str, set[str]]:
    """Every series of an agent that nobody uses yet -> its labels."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        place = Path(folder)
        settings = AgentSettings("http://127.0.0.1:1", socket=place / "a.sock", shared_dir=place / "pools")

        async def collected() -> dict[str, set[str]]:
            agent = Agent(settings)
            await agent.start()
            try:
                return {
                    f.name + ("_total" if f.type == "counter" else ""): set(f._labelnames)
                    for f in AgentCollector(agent).collect()
                }
            finally:
                await agent.stop()

        return asyncio.run(collected())


def test_every_metric_and_every_label_of_dashboards_and_alerts_exists_smoke(
    series: dict[str, set[str]],
) -> None:
    named = set()
    for where, text in expressions():
        for name, selector in OURS.findall(text):
            assert name in series, f"{where}: nobody gives {name}"
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert labels <= series[name] | OF_PROMETHEUS, f"{where}: {name} has no {labels - series[name]}"
            named.add(name)
        for group in re.findall(r"by \(([^)]*)\)", text):
            known = set().union(*(series[n] for n, _ in OURS.findall(text))) | OF_PROMETHEUS
            assert {w.strip() for w in group.split(",")} <= known, f"{where}: by ({group})"
    assert {n for n in named if n.startswith("caketin_")} > {"caketin_redis_up", "caketin_lookups_total"}


def test_every_value_that_a_selector_asks_for_is_one_that_the_program_counts() -> None:
    counted = (CHART.parent.parent / "api" / "metrics.py").read_text()
    counted += (CHART.parent.parent / "dataplane" / "agent_metrics.py").read_text()
    for where, text in expressions():
        for value in re.findall(r"(?:outcome|state|result|purpose)=\"(\w+)\"", text):
            assert f'"{value}"' in counted, f"{where}: {value}"


def test_the_lookup_route_is_called_so_in_the_program() -> None:
    from api.auth import RULES

    routes = {path for _, path in RULES}
    for where, text in expressions():
        for route in re.findall(r"route=\"([^\"]+)\"", text):
            assert route in routes, f"{where}: {route}"
        for pattern in re.findall(r"route=~\"([^\"]+)\"", text):
            assert any(re.fullmatch(pattern, r) for r in routes), f"{where}: {pattern}"


def test_prometheus_takes_the_alerts_and_every_expression_of_the_dashboards(tmp_path: Path) -> None:
    found = [
        {"record": f"panel_{i}", "expr": text.replace("$__rate_interval", "1m").replace("$job", "caketin")}
        for i, (_, text) in enumerate(dashboard_expressions())
    ]
    assert len(found) > 20
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": found}]}))
    for checked in (file, ALERTS):
        done = subprocess.run(
            [promtool(), "check", "rules", str(checked)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_how_bad_it_is_and_what_it_means() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]


def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    lookups = 'caketin_lookups_total{job="caketin",purpose="prefetch",outcome='
    beat = (
        'caketin_http_request_duration_seconds_count{job="caketin",method="POST",code="200",'
        'route="/v1/engines/{engine_id}/ranks/{rank}/heartbeat"}'
    )
    fired = [
        ("CaketinRedisAway", "6m", {"job": "caketin", "severity": "critical"}),
        ("CaketinDegraded", "25m", {"job": "caketin", "severity": "warning"}),
        ("CaketinEnginesSilent", "60m", {"job": "caketin", "severity": "warning"}),
        ("CaketinStoreWithoutNodes", "40m", {"severity": "critical"}),
    ]
    quiet = [("CaketinRedisAway", "3m"), ("CaketinDegraded", "9m"), ("CaketinEnginesSilent", "35m")]
    test = {
        "rule_files": ["alerts.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": 'caketin_redis_up{job="caketin",instance="a"}', "values": "1x3 0x20"},
                    {"series": 'caketin_redis_up{job="caketin",instance="b"}', "values": "1x23"},
                    {"series": lookups + '"hit"}', "values": "0+600x60"},
                    {"series": lookups + '"degraded"}', "values": "0x9 0+60x50"},
                    {"series": beat, "values": "0+60x40 2400x40"},
                    {"series": "master_total_capacity_bytes", "values": "1000x20 0x40"},
                ],
                "alert_rule_test": [
                    {"alertname": name, "eval_time": at, "exp_alerts": [{"exp_labels": labels}]}
                    for name, at, labels in fired
                ]
                + [{"alertname": name, "eval_time": at, "exp_alerts": []} for name, at in quiet],
            }
        ],
    }
    # Texts are not compared: only whether it fires, and for whom.
    stripped = yaml.safe_load(ALERTS.read_text())
    for group in stripped["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations")
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(stripped))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [promtool(), "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_are_what_grafana_reads() -> None:
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        assert board["uid"]
        ids = [p["id"] for p in board["panels"]]
        assert len(ids) == len(set(ids))
        names = {v["name"] for v in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps([p.get("targets", []) for p in board["panels"]])))
        assert used <= names | {"__rate_interval"}
        for panel in board["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24, panel["title"]


def test_the_chart_hands_both_on_as_they_are() -> None:
    rendered = render(CASES["production"])
    assert rendered.one("PrometheusRule")["spec"] == yaml.safe_load(ALERTS.read_text())
    data = rendered.one("ConfigMap", "caketin-dashboards")["data"]
    assert {name: json.loads(text) for name, text in data.items()} == {
        f.name: json.loads(f.read_text()) for f in DASHBOARDS
    }
