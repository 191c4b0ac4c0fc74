"""What Linux has and others have not, in both forms."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peers.system import (
    STALE_AFTER_S,
    cpu_model,
    killed_with_parent,
    private_folder,
    tune_malloc,
    usable_cores,
)


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is not Linux, as far as programs of ours know."""
    monkeypatch.setenv("SWARM_PORTABLE", "1")


@pytest.fixture(params=["linux", "portable"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both."""
    monkeypatch.setenv("SWARM_PORTABLE", "1" if request.param == "portable" else "")
    return request.param


def test_a_folder_whose_owners_were_killed_is_removed_when_the_next_is_made(tmp_path: Path) -> None:
    (left, lock), (young, its_lock), (used, _) = (private_folder(tmp_path, "swarm-x-") for _ in range(3))
    for ended in (lock, its_lock):
        os.close(ended)
    (other := tmp_path / "swarm-x-12345678").mkdir()
    old = time.time() - STALE_AFTER_S - 1
    for folder in (left, used, other):
        os.utime(folder, (old, old))
    made, _ = private_folder(tmp_path, "swarm-x-")
    assert {*tmp_path.iterdir()} == {young, used, other, made}
    assert made.stat().st_mode & 0o777 == 0o700


def test_glibc_takes_the_allocator_settings() -> None:
    # In a process of its own: the settings are for good.
    said = run("from peers.system import tune_malloc; print(tune_malloc())")
    assert said in ("True", "False")  # False: not glibc
    if "glibc" in " ".join(os.confstr("CS_GNU_LIBC_VERSION") or "" for _ in "1"):
        assert said == "True"


def test_another_system_keeps_its_allocator_and_does_without_the_kernels_help(portable: None) -> None:
    assert tune_malloc() is False
    assert killed_with_parent(["p2pd", "-x"]) == ["p2pd", "-x"]
    assert usable_cores() == os.cpu_count() and cpu_model()


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.mark.process
def test_a_child_dies_with_its_parent(form: str) -> None:
    grandchild = (
        "import os; from peers.system import die_with_parent\n"
        "die_with_parent(os.getppid()); print('up', flush=True); input()"
    )
    # The pipe closes when the last holder of its writing end, the grandchild, is gone.
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            f"subprocess.Popen([sys.executable, '-c', {grandchild!r}], stdin=subprocess.PIPE)\n"
            "time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        parent.wait(timeout=30)
        assert parent.stdout.read() == b""


@pytest.mark.process
def test_a_child_whose_parent_is_gone_already_ends_at_once(form: str) -> None:
    code = "import os; from peers.system import die_with_parent; die_with_parent(os.getpid()); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.process
def test_a_program_whose_parent_is_another_than_it_was_told_ends_at_once(form: str) -> None:
    words = ["peer", "--run", "5a" * 16, "--join", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooW"]
    words += ["--die-with-parent", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "peers", *words], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
