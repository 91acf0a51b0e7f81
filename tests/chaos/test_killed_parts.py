"""SIGKILL of each part in mid-replay: no wrong byte, no call past its deadline, hits come back unaided."""

from pathlib import Path

import pytest

from dataplane.mooncake_store import MooncakeStore
from tests.chaos.torment import in_a_process

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("store", "part"),
    [
        pytest.param("file", "control", id="smoke-control-plane"),
        pytest.param("file", "redis", id="redis"),
        pytest.param("mooncake", "redis", id="redis-in-memory"),
        pytest.param("mooncake", "master", id="mooncake-master"),
        pytest.param("mooncake", "node", id="storage-node"),
    ],
)
def test_a_killed_part_costs_hits_and_nothing_else(tmp_path: Path, store: str, part: str):
    if store == "mooncake":
        loads, why = MooncakeStore.available()
        if not loads:
            pytest.skip(f"Mooncake does not load: {why}")
    print(in_a_process(tmp_path / "stack", store, part, 170))
