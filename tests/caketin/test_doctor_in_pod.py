"""The doctor in a pod: the shared folder, Redis' clock, and advice in the chart's own words."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from caketin.doctor.finding import Finding
from caketin.doctor.pod import VALUES_OF, in_chart_words, shared_folder
from caketin.doctor.services import _redis_clock, redis
from caketin.embedded_redis import EmbeddedRedis

GIB = 1 << 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    started = EmbeddedRedis.start(tmp_path, appendonly=False)
    yield started
    started.stop()


def test_a_folder_on_a_tmpfs_with_room_is_well() -> None:
    found = shared_folder(Path("/dev/shm"), 1 << 20)
    assert found.state == "ok"
    assert "on tmpfs at /dev/shm" in found.found


def test_a_folder_on_a_tmpfs_that_is_too_small_says_by_how_much() -> None:
    found = shared_folder(Path("/dev/shm"), 1 << 50)
    assert found.state == "bad"
    assert "the pools take 1048576.0 GiB" in found.advice


def test_a_folder_on_a_disk_is_no_memory(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/vda / ext4 rw 0 0\ntmpfs /other tmpfs rw 0 0\n")
    found = shared_folder(tmp_path, 1, mounts)
    assert found.state == "bad"
    assert "ext4" in found.found
    assert "mount a tmpfs there" in found.advice


def test_the_mount_that_counts_is_the_last_of_the_longest_path(tmp_path: Path) -> None:
    place = str(tmp_path / "a b").replace(" ", "\\040")
    (tmp_path / "a b").mkdir()
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\n/dev/vdb {place} ext4 rw 0 0\nnone {place} tmpfs rw 0 0\n")
    assert shared_folder(tmp_path / "a b", 1, mounts).state == "ok"


def test_a_folder_that_is_not_there_is_told() -> None:
    found = shared_folder(Path("/nowhere/at/all"), 1)
    assert found.state == "bad"
    assert "No such file" in found.found


def test_advice_names_the_charts_values_and_what_is_well_is_left_alone() -> None:
    bad = Finding("shared folder", "too small", "bad", "more")
    well = Finding("shared folder", "fine")
    other = Finding("Python", "3.8", "bad", "another")
    said = list(in_chart_words([bad, well, other]))
    assert said[0].advice == "more (chart: agent.sharedDir, agent.hostMemory)"
    assert said[1:] == [well, other]


def test_every_finding_that_has_chart_values_is_one_that_the_doctor_makes() -> None:
    folder = Path(__file__).resolve().parents[2] / "caketin" / "doctor"
    source = "".join(f.read_text() for f in folder.glob("*.py") if f.name != "pod.py")
    for what in VALUES_OF:
        named = f'"{what}"' in source or what == "shared folder"
        assert named, f"nobody finds anything about {what}"


def test_redis_clock_is_compared(server: EmbeddedRedis) -> None:
    found = {f.what: f for f in redis(server.url)}
    assert found["Redis' clock"].state == "ok"


@pytest.mark.parametrize(("skew", "says"), [(7.5, "7.5 s behind"), (-7.5, "7.5 s ahead of")])
def test_a_clock_that_is_apart_says_which_way(skew: float, says: str) -> None:
    found = _redis_clock("redis:6379", skew)
    assert found.state == "warn"
    assert says in found.found
    assert "NTP" in found.advice


def test_in_a_pod_the_command_speaks_of_the_charts_values(tmp_path: Path) -> None:
    def doctor(**env: str) -> str:
        command = [sys.executable, "-m", "caketin", "doctor", "--json", "--data-dir", str(tmp_path)]
        command += ["--shared-dir", "/dev/shm", "--shared-bytes", str(1 << 50)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, check=False, env=os.environ | env
        )
        assert done.returncode == 1, done.stderr
        return done.stdout

    assert "(chart: agent.sharedDir, agent.hostMemory)" in doctor(KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert "(chart:" not in doctor(KUBERNETES_SERVICE_HOST="")
