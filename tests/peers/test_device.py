"""Devices, memory, the allocator, and dying with one's parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from peers import device
from peers.device import choose_device, describe, die_with_parent, host_memory, tune_malloc
from swarm.errors import SetupError


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def with_cuda(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (free[n], 100))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda n: f"GPU {n}")


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    assert choose_device("auto") == choose_device("cpu") == "cpu"


def test_auto_is_the_gpu_with_most_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, [10, 30, 30])
    assert choose_device("auto") == "cuda:1"
    assert choose_device("cuda") == "cuda:0"
    assert choose_device("cuda:2") == "cuda:2"
    found = describe("cuda:1")
    assert (found.model, found.free_bytes, found.total_bytes) == ("GPU 1", 30, 100)


def test_a_gpu_that_is_not_there_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(SetupError, match=r"this torch \(.*\) has no CUDA; take --device cpu"):
        choose_device("cuda")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with pytest.raises(SetupError, match=r"sees no GPU: .*nvidia-smi.* --gpus all, .*; take --device cpu"):
        choose_device("cuda")
    with_cuda(monkeypatch, [10, 10])
    with pytest.raises(SetupError, match="cuda:0 to cuda:1"):
        choose_device("cuda:2")


@pytest.mark.parametrize("word", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "CUDA", "", "cuda:²"])
def test_a_device_word_that_means_nothing_is_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, [10])
    if word == "cuda:":
        assert choose_device(word) == "cuda:0"  # torch takes it too
        return
    with pytest.raises(SetupError, match="take auto, cpu, cuda or cuda:N"):
        choose_device(word)


def test_the_cpu_has_a_name_cores_and_memory() -> None:
    found = describe("cpu")
    assert "cores" in found.model
    assert 0 < found.free_bytes <= found.total_bytes
    assert device.free_bytes("cpu") <= found.total_bytes


def test_a_container_limit_counts_rather_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=800_000 * 1024, total=1_000_000 * 1024)
    monkeypatch.setattr(device.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    assert host_memory() == (800_000 * 1024, 1_000_000 * 1024)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory() == (800_000 * 1024, 1_000_000 * 1024)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert host_memory() == (400_000, 1_000_000)


def test_glibc_takes_the_allocator_settings() -> None:
    # In a process of its own: the settings are for good.
    said = run("from peers.device import tune_malloc; print(tune_malloc())")
    assert said in ("True", "False")  # False: not glibc
    if "glibc" in " ".join(os.confstr("CS_GNU_LIBC_VERSION") or "" for _ in "1"):
        assert said == "True"


def test_another_system_keeps_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tune_malloc() is False
    with pytest.raises(SetupError, match="needs Linux"):
        die_with_parent()


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.mark.process
def test_a_child_dies_with_its_parent() -> None:
    grandchild = (
        "from peers.device import die_with_parent; die_with_parent(); print('up', flush=True); input()"
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
def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    code = "import os; from peers.device import die_with_parent; die_with_parent(os.getpid()); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.process
def test_a_program_whose_parent_is_another_than_it_was_told_ends_at_once() -> None:
    words = ["peer", "--run", "5a" * 16, "--join", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooW"]
    words += ["--die-with-parent", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "peers.cli", *words], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
