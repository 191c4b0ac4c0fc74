"""Devices, memory, the allocator, and dying with one's parent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from peers import device
from peers.device import choose_device, describe, host_memory, limit_memory, release_cached
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


def test_a_mac_computes_on_its_gpu_if_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that can be tried without one."""
    import torch

    without_cuda(monkeypatch)
    with pytest.raises(SetupError, match="--device mps: this machine has no GPU of Apple"):
        choose_device("mps")
    called: list[object] = []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 400)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", called.append)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: called.append("emptied"))
    assert choose_device("mps") == "mps" and choose_device("auto") == "cpu"
    found = describe("mps")
    assert (found.free_bytes, found.total_bytes) == (600, 1000)
    limit_memory("mps", 250)
    limit_memory("mps", None)
    release_cached("mps")
    assert called == [0.25, "emptied"]


@pytest.mark.parametrize("word", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "CUDA", "", "cuda:²"])
def test_a_device_word_that_means_nothing_is_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, [10])
    if word == "cuda:":
        assert choose_device(word) == "cuda:0"  # torch takes it too
        return
    with pytest.raises(SetupError, match=r"take auto, cpu, cuda, cuda:N .* or mps"):
        choose_device(word)


def test_the_cpu_has_a_name_cores_and_memory() -> None:
    found = describe("cpu")
    assert "cores" in found.model
    assert 0 < found.free_bytes <= found.total_bytes


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
