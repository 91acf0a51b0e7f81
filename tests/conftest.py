"""What holds for every suite: a test that was to run does run, and where the published trace lies.

With `CI=true` a skip is a failure, unless its reason is on the list below. A machine without Mooncake, an
index that does not answer, a trace that is not there: each would turn a suite green by not running it.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

SKIPS_ALLOWED_IN_CI: dict[str, str] = {
    "needs root: mounts and chroot": "an image can be walked by root only, and CI may run as another user",
}
"""Start of a skip's reason -> why not running is right even in CI."""

REPO = Path(__file__).resolve().parent.parent


# Who starts the tests in the background of a script has them ignore Ctrl-C, and so would what they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _in_ci() -> bool:
    return os.environ.get("CI") == "true"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return re.sub(r"^Skipped: ", "", text)


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not _in_ci() or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = _reason(report)
    if any(reason.startswith(start) for start in SKIPS_ALLOWED_IN_CI):
        return
    report.outcome = "failed"
    report.longrepr = (
        f"skipped where it must run (CI=true): {reason}\n"
        "Give the machine what the test needs, or add the reason to SKIPS_ALLOWED_IN_CI in tests/conftest.py."
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.fixture(scope="session")
def conversation_trace() -> Path:
    """Mooncake's published conversation trace: `CAKETIN_TRACE`, or `shared/traces` beside the repository."""
    named = os.environ.get("CAKETIN_TRACE")
    path = Path(named) if named else REPO.parent / "shared" / "traces" / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"the published trace is not at {path}; set CAKETIN_TRACE to its file")
    return path
