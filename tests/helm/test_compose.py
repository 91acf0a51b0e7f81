"""docker-compose.yml: valid, careful, and what it starts works: its own commands and checks, as processes."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from caketin.cli import _COMMANDS
from tests.helm.chart import CHART, render
from tests.helm.compose import COMPOSE, Project, read_compose, services_of, wait_until
from tests.helm.image_walk import REPO, ImageWalk, needs_root
from tests.helm.test_settings import flags_of

pytestmark = [pytest.mark.helm, pytest.mark.timeout(900)]

ALL_PROFILES = ("rdma", "observability", "replay")
ONCE = {"tokens", "replay"}
"""Services that do their work and end."""
DEFAULT = {
    *("tokens", "redis", "mooncake-master", "storage-1", "storage-2", "api-1", "api-2", "proxy", "agent")
}


def test_the_file_follows_the_compose_specification_smoke() -> None:
    import compose_spec

    merged = yaml.safe_load(COMPOSE.read_text())  # with its anchors resolved, which the checker does not do
    for variables in ({}, {"CAKETIN_STORE_PROTOCOL": "rdma"}):
        checked = compose_spec.PyCompose.from_json(json.dumps(read_compose(variables)))
        assert set(checked.service_names()) == set(merged["services"])
    with pytest.raises(ValueError, match="comand"):
        compose_spec.PyCompose.from_json(json.dumps({"services": {"a": {"image": "a", "comand": ["b"]}}}))


def test_profiles_start_what_they_say_smoke() -> None:
    compose = read_compose()
    assert set(services_of(compose)) == DEFAULT
    assert set(services_of(compose, ["observability"])) == DEFAULT | {"prometheus", "grafana"}
    assert set(services_of(compose, ["rdma"])) == DEFAULT | {"storage-rdma"}
    assert set(services_of(compose, ["replay"])) == DEFAULT | {"replay"}


def test_every_service_is_hardened_pinned_checked_and_reachable_from_this_machine_only_smoke() -> None:
    compose = read_compose()
    for name, service in services_of(compose, ALL_PROFILES).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert not service.get("privileged"), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert re.search(r":v?\d+\.\d+", service["image"]), f"{name}: {service['image']}"
        assert all(p.startswith("127.0.0.1:") for p in service.get("ports", [])), name
        if name not in ONCE:
            assert "healthcheck" in service, name
            assert service["restart"] == "unless-stopped", name
    assert compose["services"]["storage-rdma"]["ulimits"]["memlock"] == -1
    assert compose["services"]["storage-rdma"]["devices"]
    assert compose["services"]["storage-rdma"]["cap_add"] == ["IPC_LOCK"]


def test_what_is_given_to_a_read_only_service_is_mounted_from_a_file_that_is_here_smoke() -> None:
    """Compose copies the text or variable of a config or secret into the container, and refuses where it is
    read-only; a folder that Docker makes up in place of a missing file is no configuration either."""
    compose = read_compose()
    for kind in ("configs", "secrets"):
        assert all(set(given) == {"file"} for given in compose.get(kind, {}).values())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source, place, *mode = volume.split(":")
            if source.startswith("."):
                assert (REPO / source).exists(), f"{name}: {source}"
                assert (REPO / source).is_file() == bool(Path(place).suffix), f"{name}: {volume}"
                assert mode == ["ro"], f"{name}: {volume}"


def test_only_the_control_planes_are_on_the_network_of_redis_smoke() -> None:
    services = read_compose()["services"]
    assert {n for n, s in services.items() if "index" in s.get("networks", [])} == {"redis", "api-1", "api-2"}
    assert read_compose()["networks"]["index"] == {"internal": True}


def test_our_programs_take_the_flags_and_variables_that_they_are_given_smoke() -> None:
    from api.settings import setting_fields, variable_of

    known = {variable_of(name) for name, _ in setting_fields()}
    for name, service in read_compose()["services"].items():
        variables = {v for v in service.get("environment", {}) if v.startswith("CAKETIN_")}
        assert variables <= known, name
        command = service.get("command", [])
        if command and command[0] in set(_COMMANDS) - {"mooncake-master"}:
            flags = {str(a).partition("=")[0] for a in command[1:]}
            assert flags <= flags_of(command[0]), name


def test_chart_and_compose_tell_the_agent_the_same_smoke() -> None:
    chart = render({"agent": {"enabled": True}}).containers()["DaemonSet/caketin-agent/agent"]["args"]
    compose = read_compose()["services"]["agent"]["command"]
    assert [a.partition("=")[0] for a in chart] == [a.partition("=")[0] for a in compose]
    assert {a.partition("=")[0] for a in chart[1:]} <= flags_of("agent")


def test_alerts_and_dashboards_have_one_source_smoke() -> None:
    services = read_compose()["services"]
    sources = [
        v.split(":")[0] for n in ("prometheus", "grafana") for v in services[n]["volumes"] if v[0] == "."
    ]
    assert {at for s in sources if (at := (REPO / s).resolve()).is_relative_to(CHART)} == {
        CHART / "files" / "alerts.yaml",
        CHART / "files" / "dashboards",
    }


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    needs_root()
    for program in ("haproxy", "prometheus", "redis-cli"):
        if shutil.which(program) is None:
            pytest.skip(f"not installed: {program}")
    folder = tmp_path_factory.mktemp("compose")
    compose = read_compose({"CAKETIN_SEGMENT": "128Mi", "CAKETIN_AGENT_MEMORY": "64Mi"})
    started = Project(ImageWalk(), folder, compose)
    try:
        # Grafana is no program of this machine.
        started.up([n for n in services_of(compose, ["observability"]) if n != "grafana"])
        for name, service in started.running.items():
            if name != "tokens":
                service.wait_healthy()
        yield started
    finally:
        started.down()


def token(project: Project, who: str) -> str:
    return (project.folder / "volumes" / "tokens" / f"{who}.token").read_text().strip()


def curl(project: Project, url: str, *more: str) -> Any:
    done = project.run_client(["curl", "-sS", "-m", "10", *more, url])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_services_run_as_users_without_root(project: Project) -> None:
    for name, service in project.running.items():
        if name == "tokens":
            continue
        status = Path(f"/proc/{service.child.process.pid}/status").read_text()
        uid = re.search(r"^Uid:\t(\d+)", status, re.MULTILINE)
        assert uid
        assert int(uid[1]) > 0, name


def test_a_replay_through_the_proxy_restores_every_byte(project: Project) -> None:
    replay = project.start("replay")
    assert replay.child.process.wait(120) == 0, replay.child.tail()
    assert "wrong bytes" in replay.child.log.read_text()
    operator = ("-H", f"Authorization: Bearer {token(project, 'operator')}")
    proxy = f"http://{project.address('proxy')}:7411"
    rates = curl(project, f"{proxy}/v1/hit-rates?window=1h&step=1h", *operator)
    assert sum(sum(s["hit_pages"]) for s in rates["series"]) > 0
    master = f"http://{project.address('mooncake-master')}:9003"
    segments = curl(project, f"{master}/get_segments_detail")["segments"]
    assert {s["segment_name"].split(":")[0] for s in segments} == {
        project.address("storage-1"),
        project.address("storage-2"),
    }
    metrics = project.run_client(["curl", "-sS", f"{master}/metrics"]).stdout
    held = re.findall(r"^segment_allocated_bytes\{.*\} (\d+)", metrics, re.MULTILINE)
    assert len(held) == 2
    assert all(int(n) > 0 for n in held), "the pages went to one node only"


def test_without_a_token_nobody_is_served(project: Project) -> None:
    proxy = f"http://{project.address('proxy')}:7411"
    assert curl(project, f"{proxy}/v1/engines")["code"] == "unauthenticated"


def test_tokens_stay_when_all_of_it_is_started_again(project: Project) -> None:
    before = {who: token(project, who) for who in ("engine", "operator", "scraper")}
    again = project.start("tokens")
    assert again.child.process.wait(60) == 0, again.child.tail()
    assert {who: token(project, who) for who in before} == before


def test_prometheus_scrapes_every_control_plane_and_the_master_and_has_the_alerts(project: Project) -> None:
    at = f"http://{project.address('prometheus')}:9090/api/v1"

    def all_up() -> bool:
        targets = curl(project, f"{at}/targets")["data"]["activeTargets"]
        return sorted(t["health"] for t in targets) == ["up", "up", "up", "up"]

    wait_until(all_up, 30, "a target is not scraped")
    rules = curl(project, f"{at}/rules")["data"]["groups"]
    assert len(rules[0]["rules"]) == len(
        yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"][0]["rules"]
    )
    assert all(r["health"] != "err" for r in rules[0]["rules"])


def test_the_agent_is_ready_on_its_socket_and_ends_in_order(project: Project) -> None:
    agent = project.running["agent"]
    ask = ["curl", "-sS", "-m", "5", "--unix-socket", "/run/caketin/agent.sock"]
    assert json.loads(agent.run([*ask, "http://agent/readyz"]).stdout)["status"] == "ready"
    assert "caketin_agent_ready 1.0" in agent.run([*ask, "http://agent/metrics"]).stdout
    # Over TCP it says how it is, and opens no session.
    at = f"http://{project.address('agent')}:7412"
    assert curl(project, f"{at}/readyz")["status"] == "ready"
    done = project.run_client(["curl", "-sS", "-X", "POST", "-d", "{}", f"{at}/v1/sessions"])
    assert json.loads(done.stdout)["status"] in {403, 404}
    assert agent.stop() == 0, agent.child.tail()
    project.start("agent").wait_healthy()


def test_control_planes_are_replaced_one_by_one_and_no_call_is_lost(project: Project) -> None:
    """A rolling update behind the proxy: SIGTERM, end in order, a new one, then the other."""
    script = (
        "import http.client, sys, time\n"
        "host, key, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])\n"
        "counts, end, c = {}, time.monotonic() + seconds, None\n"
        "while time.monotonic() < end:\n"
        "    c = c or http.client.HTTPConnection(host, 7411, timeout=10)\n"
        "    try:\n"
        "        c.request('GET', '/v1/engines', headers={'Authorization': 'Bearer ' + key})\n"
        "        r = c.getresponse(); r.read(); what = str(r.status)\n"
        "    except Exception as e:\n"
        "        c.close(); c, what = None, repr(e)\n"
        "    counts[what] = counts.get(what, 0) + 1\n"
        "    time.sleep(0.005)\n"
        "import json; print(json.dumps(counts))\n"
    )
    found: list[dict[str, int]] = []

    def load() -> None:
        done = project.run_client(
            ["python3", "-c", script, project.address("proxy"), token(project, "operator"), "40"], timeout=80
        )
        found.append(json.loads(done.stdout) if done.returncode == 0 else {done.stderr: 1})

    callers = [threading.Thread(target=load) for _ in range(3)]
    for caller in callers:
        caller.start()
    time.sleep(2)
    for name in ("api-1", "api-2"):
        assert project.running[name].stop() == 0, project.running[name].child.tail()
        time.sleep(1)
        project.start(name).wait_healthy()
        time.sleep(2)
    for caller in callers:
        caller.join()
    total: dict[str, int] = {}
    for counts in found:
        for what, n in counts.items():
            total[what] = total.get(what, 0) + n
    assert set(total) == {"200"}, total
    assert total["200"] > 1000


def test_redis_keeps_claims_over_a_restart(project: Project) -> None:
    operator = ("-H", f"Authorization: Bearer {token(project, 'operator')}")
    proxy = f"http://{project.address('proxy')}:7411"

    def claimed() -> int:
        listed = curl(project, f"{proxy}/v1/namespaces", *operator).get("namespaces", [])
        ids = [n["namespace_id"] for n in listed]
        return sum(curl(project, f"{proxy}/v1/namespaces/{i}", *operator)["pages"] for i in ids)

    before = claimed()
    assert before > 0
    assert project.running["redis"].stop() == 0, project.running["redis"].child.tail()
    project.start("redis").wait_healthy()
    wait_until(lambda: claimed() == before, 30, "claims are gone")
