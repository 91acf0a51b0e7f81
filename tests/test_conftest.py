"""A skip is loud on a developer's machine and a failure in CI: tried on a pytest run of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parent / "conftest.py"

SKIPS = {
    "in_the_test": "import pytest\ndef test_x():\n    pytest.skip('no server')\n",
    "by_a_mark": "import pytest\n@pytest.mark.skipif(True, reason='no server')\ndef test_x():\n    pass\n",
    "in_a_fixture": "import pytest\n@pytest.fixture\ndef f():\n    pytest.skip('no server')\n"
    "def test_x(f):\n    pass\n",
    "of_a_module": "import pytest\npytest.skip('no server', allow_module_level=True)\n",
    "for_an_import": "import pytest\npytest.importorskip('no_such_server')\n",
    "for_the_trace": "def test_x(conversation_trace):\n    pass\n",
}


def run_pytest(
    folder: Path, test: str, *arguments: str, ci: str, allowed: str = "{}"
) -> subprocess.CompletedProcess[str]:
    conftest = CONFTEST.read_text()
    listed = re.compile(r"SKIPS_ALLOWED_IN_CI: dict\[str, str\] = \{.*?^\}", re.DOTALL | re.MULTILINE)
    assert listed.search(conftest)
    (folder / "conftest.py").write_text(listed.sub(f"SKIPS_ALLOWED_IN_CI = {allowed}", conftest))
    (folder / "test_it.py").write_text(test)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "CI": ci,
        "CAKETIN_TRACE": str(folder / "absent.jsonl"),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    ]
    command += [*arguments, str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("how", SKIPS)
def test_a_skip_fails_in_ci_and_says_why(tmp_path: Path, how: str) -> None:
    done = run_pytest(tmp_path, SKIPS[how], ci="true")
    assert done.returncode in {1, 2}, done.stdout
    assert "skipped where it must run (CI=true)" in done.stdout


@pytest.mark.parametrize("how", ["in_the_test", "of_a_module"])
def test_a_skip_in_another_process_fails_in_ci_too(tmp_path: Path, how: str) -> None:
    done = run_pytest(tmp_path, SKIPS[how], "-p", "xdist", "-n", "2", ci="true")
    assert done.returncode in {1, 2}, done.stdout
    assert "skipped where it must run (CI=true)" in done.stdout


@pytest.mark.parametrize("how", SKIPS)
def test_a_skip_stays_one_elsewhere(tmp_path: Path, how: str) -> None:
    done = run_pytest(tmp_path, SKIPS[how], ci="")
    assert "1 skipped" in done.stdout
    assert done.returncode in {0, 5}


def test_a_skip_on_the_list_stays_one_in_ci(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, SKIPS["in_the_test"], ci="true", allowed="{'no ser': 'because'}")
    assert (done.returncode, "1 skipped" in done.stdout) == (0, True), done.stdout


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.xfail\ndef test_x():\n    assert False\n"
    done = run_pytest(tmp_path, test, ci="true")
    assert (done.returncode, "1 xfailed" in done.stdout) == (0, True), done.stdout
