"""What the chart hands to the programs is what they take: settings, tokens, Redis' URL, commands."""

from __future__ import annotations

import hashlib
import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from api.settings import Settings, setting_fields
from api.tokens import TOKEN_FORM, TokenTable, read_access_file
from caketin.cli import command_line
from metadata.redis_url import parse_redis_url
from tests.helm.chart import CASES, PRODUCTION, RDMA, REPO, Rendered, defaults, render

pytestmark = pytest.mark.helm

WORKED_OUT_BY_THE_CHART = {
    "host", "port", "token_file", "tls_cert", "tls_key", "redis_url",
    "store.kind", "store.master", "store.metadata", "store.protocol", "store.devices",
}  # fmt: skip
FOR_ONE_MACHINE = {"store.path", "store.max_bytes"}
"""Of the file store, which the chart does not deploy."""


def config_of(rendered: Rendered) -> dict[str, Any]:
    return tomllib.loads(rendered.one("ConfigMap", "caketin-api")["data"]["caketin.toml"])


def test_every_config_value_of_the_chart_is_a_setting_and_every_setting_is_there_smoke() -> None:
    settings = {name for name, _ in setting_fields()}
    assert set(defaults()["api"]["config"]) == settings - WORKED_OUT_BY_THE_CHART - FOR_ONE_MACHINE


def test_the_charts_defaults_are_the_programs() -> None:
    fields = dict(setting_fields())
    for name, value in defaults()["api"]["config"].items():
        assert value == fields[name].default, name


@pytest.mark.parametrize("case", CASES)
def test_the_settings_file_is_read_as_it_was_meant(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in __import__("os").environ if n.startswith("CAKETIN_")]:
        monkeypatch.delenv(name)
    rendered = render(CASES[case])
    file = tmp_path / "caketin.toml"
    file.write_text(rendered.one("ConfigMap", "caketin-api")["data"]["caketin.toml"])
    settings = Settings.load(file=file)
    merged = defaults()["api"]["config"] | CASES[case].get("api", {}).get("config", {})
    for name, value in merged.items():
        assert getattr(settings, name) == value, name
    assert settings.store.kind == "mooncake"
    assert bool(settings.tls_cert) == CASES[case].get("tls", {}).get("enabled", False)


def test_the_variables_are_the_programs() -> None:
    for case, values in CASES.items():
        for where, container in render(values).containers().items():
            for variable in container.get("env", []):
                name = variable["name"]
                if name.startswith("CAKETIN_"):
                    assert name in {"CAKETIN_CONFIG", "CAKETIN_REDIS_URL"}, f"{case}: {where}: {name}"


def url_of(rendered: Rendered) -> str:
    """Redis' URL as Kubernetes makes it up: variables filled in where they come before."""
    known = {"REDIS_PASSWORD": "pw-1.2_3~4"}
    for variable in rendered.containers()["Deployment/caketin-api/api"]["env"]:
        if "value" in variable:
            filled = re.sub(r"\$\((\w+)\)", lambda m: known.get(m[1], m[0]), variable["value"])
            known[variable["name"]] = filled
    return known["CAKETIN_REDIS_URL"]


@pytest.mark.parametrize(
    ("case", "text", "password"),
    [
        ("minimal", "redis://caketin-redis.ml.svc:6379", "pw-1.2_3~4"),
        (
            "production",
            "rediss+sentinel://sentinel-0.redis:26379,sentinel-1.redis:26379/caketin",
            "pw-1.2_3~4",
        ),
        ("redis by url", "redis+cluster://a:6379,b:6379", None),
        ("redis by parts", "redis://redis:6379/3", "pw-1.2_3~4"),
    ],
)
def test_redis_is_where_the_values_say(case: str, text: str, password: str | None) -> None:
    url = url_of(render(CASES[case]))
    found = parse_redis_url(url)
    assert (str(found), found.password) == (text, password)
    Settings(redis_url=SecretStr(url), store={"kind": "file", "path": "x"})  # type: ignore[arg-type]


def test_the_made_tokens_open_what_they_are_for_and_are_new_each_time() -> None:
    seen = set()
    for _ in range(2):
        rendered = render(CASES["more tokens"])
        table = read_access_file(rendered.one("Secret", "caketin-tokens")["stringData"]["tokens.toml"])
        find = TokenTable(table.tokens, b"k" * 16).find
        for who, scope, tenant in [
            ("engine", "engine", "default"),
            ("operator", "operator", "default"),
            ("scraper", "operator", "*"),
        ]:
            shown = rendered.one("Secret", f"caketin-{who}-token")["stringData"]["token"]
            assert TOKEN_FORM.fullmatch(shown)
            token = find(shown)
            assert token is not None
            assert (token.token_id, token.scopes, token.tenant) == (who, {scope}, tenant)
            seen.add(shown)
        assert {t.token_id for t in table.tokens} == {"engine", "operator", "scraper", "router", "x"}
        (dated,) = [t for t in table.tokens if t.token_id == "x"]
        assert dated.expires == datetime(2027, 1, 31, 12, tzinfo=UTC)
        assert dated.comment == 'says "hello"'
        assert table.quotas["acme"].max_bytes == 40_000_000_000_000
    assert len(seen) == 6


def test_no_token_is_in_anything_but_its_own_secret() -> None:
    rendered = render({})
    secrets = {
        o["metadata"]["name"]: o["stringData"]["token"] for o in rendered.of("Secret")
        if "token" in o["stringData"]
    }  # fmt: skip
    for o in rendered.objects:
        for name, token in secrets.items():
            assert o["metadata"]["name"] == name or token not in repr(o)
    digest = hashlib.sha256(secrets["caketin-engine-token"].encode()).hexdigest()
    assert digest in rendered.one("Secret", "caketin-tokens")["stringData"]["tokens.toml"]


def flags_of(command: str) -> set[str]:
    import typer

    group = typer.main.get_command(command_line([command]))
    return {flag for p in group.commands[command].params for flag in p.opts}


@pytest.mark.parametrize("case", ["minimal", "production", "rdma", "tls"])
def test_the_programs_take_the_flags_that_they_are_given(case: str) -> None:
    checked = set()
    commands = set(__import__("caketin.cli").cli._COMMANDS)
    for where, container in render(CASES[case]).containers().items():
        arguments = container["args"]
        if arguments[0] not in commands or arguments[0] == "mooncake-master":
            continue
        given = {a.partition("=")[0] for a in arguments[1:] if a.startswith("--")}
        assert given <= flags_of(arguments[0]), where
        checked.add(arguments[0])
    assert {"serve", "storage-node", "doctor", "replay"} <= checked
    assert ("agent" in checked) == (case in {"rdma", "tls"})


def test_the_master_takes_the_flags_that_it_is_given() -> None:
    from dataplane.mooncake_node import master_binary

    known = set(re.findall(rb"[a-z][a-z_]{5,40}", Path(master_binary()).read_bytes()))
    arguments = render({}).containers()["Deployment/caketin-mooncake-master/master"]["args"]
    for flag in arguments[1:]:
        assert flag.partition("=")[0].removeprefix("--").encode() in known, flag


def test_rdma_asks_for_the_clusters_devices_and_for_memory_that_fits() -> None:
    rendered = render(RDMA)
    storage = rendered.containers()["StatefulSet/caketin-mooncake-storage/storage"]
    assert storage["resources"]["limits"]["rdma/ib"] == "2"
    assert int(storage["resources"]["limits"]["hugepages-2Mi"]) == 256 << 30
    assert int(storage["resources"]["limits"]["memory"]) == 1 << 30
    assert f"--segment={256 << 30}" in storage["args"]
    agent = rendered.containers()["DaemonSet/caketin-agent/agent"]
    assert agent["resources"]["limits"]["rdma/ib"] == "2"
    # Memory of a tmpfs counts for the pod that touches it first.
    assert int(agent["resources"]["limits"]["memory"]) == 65 << 30
    assert f"--memory={64 << 30}" in agent["args"]
    assert "--allow-uid=1000" in agent["args"]
    for container in (storage, agent):
        given = {e["name"]: e.get("value") for e in container["env"] if e["name"].startswith("MC_")}
        assert (given["MC_GID_INDEX"], given["MC_MTU"]) == ("3", "4096")
        assert "MC_IB_TC" not in given
    for pod in ("StatefulSet/caketin-mooncake-storage", "DaemonSet/caketin-agent"):
        spec = rendered.pods()[pod]
        assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
        assert "ulimit -l unlimited" in spec["containers"][0]["command"][2]
    assert config_of(rendered)["store"]["devices"] == "mlx5_0,mlx5_1"


def test_over_rdma_the_test_pod_has_what_a_storage_node_has_and_looks_at_the_devices() -> None:
    """It reads and writes what storage nodes hold, which nobody can over TCP there."""
    rendered = render(RDMA)
    pod, storage = (
        rendered.pods()["Pod/caketin-test"],
        rendered.pods()["StatefulSet/caketin-mooncake-storage"],
    )
    for key in ("hostNetwork", "dnsPolicy", "securityContext"):
        assert pod[key] == storage[key], key
    (node,) = storage["containers"]
    (doctor,), (replay,) = pod["initContainers"], pod["containers"]
    for container in (doctor, replay):
        assert container["command"] == node["command"]
        assert container["securityContext"] == node["securityContext"]
        assert container["resources"]["limits"]["rdma/ib"] == "2"
        assert "--devices=mlx5_0,mlx5_1" in container["args"]
        given = {e["name"]: e.get("value") for e in container["env"]}
        assert (given["MC_GID_INDEX"], given["MC_MTU"]) == ("3", "4096")
        # Redis lets in pods, and this one is on the node's network.
        assert "CAKETIN_REDIS_URL" not in given
    assert "--rdma" in doctor["args"]
    plain = render({}).pods()["Pod/caketin-test"]
    assert "rdma" not in repr(plain)
    assert "CAKETIN_REDIS_URL" in repr(plain["initContainers"])


def test_the_variables_for_rdma_are_those_that_the_program_knows() -> None:
    from dataplane.rdma_settings import _VARIABLES

    chart = (REPO / "helm/caketin/templates/_pod.tpl").read_text()
    assert set(re.findall(r'"(MC_\w+)"', chart)) == set(_VARIABLES.values())


def test_a_storage_node_without_hugepages_may_use_what_it_lends_and_the_overhead() -> None:
    values = {"mooncake": {"storage": {"segmentSize": "10Gi", "memoryOverhead": "2Gi"}}}
    container = render(values).containers()["StatefulSet/caketin-mooncake-storage/storage"]
    assert int(container["resources"]["limits"]["memory"]) == 12 << 30


def test_a_changed_setting_rolls_the_pods_and_a_password_does_not() -> None:
    def checksum(values: dict[str, Any]) -> str:
        pod = render(values).one("Deployment", "caketin-api")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/config"])

    assert checksum({}) == checksum({})
    assert checksum({}) != checksum({"api": {"config": {"lease_seconds": 31}}})


def test_the_drain_and_the_last_requests_fit_into_the_grace_period() -> None:
    spec = render(PRODUCTION).pods()["Deployment/caketin-api"]
    drain = float(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    last = defaults()["api"]["config"]["shutdown_seconds"]
    kill_after = 5.0  # of the parent of several workers
    assert spec["terminationGracePeriodSeconds"] >= drain + last + kill_after


def test_the_charts_version_is_the_packages() -> None:
    import yaml

    import caketin

    chart = yaml.safe_load((REPO / "helm/caketin/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == caketin.__version__


def test_the_doctor_names_values_that_the_chart_has() -> None:
    from caketin.doctor.pod import VALUES_OF

    for what, names in VALUES_OF.items():
        for name in names:
            at: Any = defaults()
            for step in name.split("."):
                assert step in at, f"{what}: there is no value {name}"
                at = at[step]
