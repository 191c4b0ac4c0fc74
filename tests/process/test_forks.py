"""Tests that run in forks are reported as if they had run in the process that was started."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.swarm_processes import eventually

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]

SOME = """
import os, pathlib, pytest, sys

PARENT = os.getppid()

@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    yield "made"
    (pathlib.Path(__file__).parent / f"{pathlib.Path(__file__).stem}.gone").write_text(str(os.getpid()))

@pytest.mark.parametrize("n", range(3))
def test_right(n, shared, tmp_path):
    assert "fork" in str(tmp_path) and os.getppid() != PARENT

def test_wrong(shared):
    print("said before")
    os.write(1, b"written before")
    assert shared == "never made"

@pytest.mark.skip(reason="no need")
def test_skipped(): ...
"""

DIES = """
import os, signal

def test_that_kills_its_process():
    os.kill(os.getpid(), signal.SIGKILL)

def test_that_has_no_process(): ...
"""

WAITS = """
import pathlib, pytest, select

@pytest.fixture
def made(tmp_path_factory):
    yield
    (pathlib.Path(__file__).parent / f"{pathlib.Path(__file__).stem}.gone").touch()

def test_that_waits(made):
    (pathlib.Path(__file__).parent / f"{pathlib.Path(__file__).stem}.runs").touch()
    select.select([], [], [], 60)
"""


def command(folder: Path, *arguments: str) -> list[str]:
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    words = [sys.executable, "-m", "pytest", "-q", "-rA", "-c", str(folder / "pytest.ini")]
    return [*words, "-p", "scripts.forks", "--forks", "2", "-p", "no:cacheprovider", *arguments, str(folder)]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *arguments), cwd=ROOT, capture_output=True, text=True)


def test_each_test_is_reported_once_with_what_it_said(tmp_path: Path) -> None:
    names = ("test_a", "test_b", "test_c")
    for name in names:
        (tmp_path / f"{name}.py").write_text(SOME)
    done = run(tmp_path)
    assert "9 passed, 3 skipped" in done.stdout and "3 failed" in done.stdout, done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    for name in names:
        assert len(re.findall(rf"^FAILED \S*{name}.py::test_wrong", done.stdout, re.MULTILINE)) == 1
        assert (tmp_path / f"{name}.gone").exists(), "what the tests of a file share was not taken down"
    assert done.stdout.count("written before\n") == done.stdout.count("said before\n") == 3
    assert "assert 'made' == 'never made'" in done.stdout


def test_what_a_process_took_along_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(SOME.replace("test_wrong", "wrong"))
    (tmp_path / "test_dies.py").write_text(DIES)
    done = run(tmp_path)
    assert "2 failed, 3 passed" in done.stdout, done.stdout
    assert "the process that ran it ended with -9" in done.stdout
    assert "the process that was to run it has ended" in done.stdout


def test_the_first_failure_is_the_last_if_that_is_asked_for(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"test_{number}.py").write_text("def test_fails(): assert False\n")
    done = run(tmp_path, "-x")
    assert "stopping after 1 failures" in done.stdout and "\n1 failed in" in done.stdout, done.stdout


def test_what_cannot_be_imported_is_said(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import nothing_of_that_name\n")
    done = run(tmp_path)
    assert done.returncode == pytest.ExitCode.INTERRUPTED and "nothing_of_that_name" in done.stdout


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda signum: signum.name)
def test_forks_end_with_the_process_that_made_them_and_leave_nothing(tmp_path: Path, signum: int) -> None:
    names = ("test_a", "test_b")
    for name in names:
        (tmp_path / f"{name}.py").write_text(WAITS)
    with subprocess.Popen(command(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL) as started:
        eventually(
            lambda: all((tmp_path / f"{name}.runs").exists() for name in names), lambda: "no test runs"
        )
        started.send_signal(signum)
    eventually(lambda: all((tmp_path / f"{name}.gone").exists() for name in names), lambda: "a fork is left")
