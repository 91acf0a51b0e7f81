"""A call beside the caller's own work."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from dataplane.beside import Beside


def test_what_a_call_returns_or_raises_is_told_as_often_as_it_is_asked_for():
    done = Beside(lambda: 7, "test")
    assert [done.result(), done.result()] == [7, 7]

    def fails() -> None:
        raise KeyError("x")

    failed = Beside(fails, "test")
    for _ in range(2):
        with pytest.raises(KeyError):
            failed.result()
    failed.wait()


def test_it_runs_while_its_caller_goes_on():
    go = threading.Event()
    waiting = Beside(lambda: go.wait(10), "test")
    go.set()
    assert waiting.result()


def test_one_that_hangs_does_not_hold_the_end_of_the_process():
    code = "import threading; from dataplane.beside import Beside; Beside(threading.Event().wait, 'hung')"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
