"""Swarms of processes whose peers share a CUDA device: killed, verified, paused, beside peers on the CPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peers.events import Paused, Serving
from peers.programs.tool_options import VerifyOptions
from peers.programs.verify import run_verify
from peers.storage.transcript import path_of
from swarm.manifest import Run
from tests.process.faults.test_exact import tiny
from tests.process.swarm_processes import LIMIT_S, Swarm, farthest, swarm_command

DEVICE = "cuda:0"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of other tests, and of whoever works here, are not meant."""
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    "run",
    [
        tiny(dtype="float32", codec="blockwise8", steps=20),
        replace(tiny(dtype="bfloat16", codec="hadamard4", steps=20), delayed_updates=True),
    ],
    ids=["float32", "bfloat16, delayed"],
)
def test_weights_equal_one_process_on_the_device_to_the_last_bit_whoever_was_killed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A keeper writes down what all signed; verified on the device that is the same, also to the last bit."""
    with Swarm(tmp_path, run, device=DEVICE) as swarm:
        swarm.bootstrap()
        doomed = [swarm.peer(0, kill_at="forward:5"), swarm.peer(1, kill_at="backward:5")]
        doomed.append(swarm.peer(2, kill_at="reduce:3"))
        swarm.peers(2)
        keeper = swarm.keeper(tmp_path / "kept")
        trainer = swarm.trainer("--window", "3")
        for program in doomed:
            swarm.dies(program)
        swarm.ends(trainer)
        weights = swarm.audited_weights()
        swarm.leaves(keeper)
    assert farthest(weights, swarm.single_process(run.steps)) == 0.0
    transcript = path_of(tmp_path / "kept", swarm.run)
    assert run_verify(VerifyOptions(transcript=transcript, from_=0, to=run.steps, device=DEVICE))
    out = capsys.readouterr().out
    assert "to the last bit" in out, out


def test_peers_on_the_processor_and_on_the_device_train_one_model(tmp_path: Path) -> None:
    """float64, codec none: to 1e-9, and nobody is taken for a liar."""
    run = tiny(dtype="float64", codec="none", steps=20)
    with Swarm(tmp_path, run, device=DEVICE) as swarm:
        swarm.bootstrap()
        swarm.peers(1)
        others = [swarm.peer(stage, "--device", "cpu") for stage in range(run.S)]
        doomed = swarm.peer(1, kill_at="backward:9")
        swarm.all_serve()
        trainer = swarm.trainer("--window", "3")
        swarm.dies(doomed)
        swarm.ends(trainer)
        weights = swarm.audited_weights()
        assert all(program.returncode is None for program in others), "none was sent away"
    assert farthest(weights, swarm.single_process(run.steps)) < 1e-9


def test_a_pause_gives_the_memory_of_the_device_back(tmp_path: Path) -> None:
    base = tiny(dtype="float32", codec="blockwise8", steps=2000)
    run = replace(base, model=replace(base.model, hidden=1024, ffn_hidden=4096, layers=12, heads=16))
    with Swarm(tmp_path, run, device=DEVICE) as swarm:
        swarm.bootstrap()
        swarm.peers(1)
        before = torch.cuda.mem_get_info()[0]
        guest = swarm.peer(1)
        swarm.hear(guest, Serving)
        swarm.trainer("--window", "3")
        swarm.until_version(2)
        held = before - torch.cuda.mem_get_info()[0]
        told = swarm_command("pause", "--pid", str(guest.pid))
        assert told.returncode == 0 and "paused at stage 1" in told.stdout
        swarm.hear(guest, Paused)
        given = torch.cuda.mem_get_info()[0]
        version = swarm.version()
        swarm.goes_on(2)
        left = before - given
        print(f"held {held / 1e6:.0f} MB; when paused {left / 1e6:.0f} MB (its CUDA context)")
        assert left < held / 2 and left < 1e9
        assert swarm_command("resume", "--pid", str(guest.pid)).returncode == 0
        swarm.hear(guest, Serving, 2)
        assert swarm.version() > version


def test_a_peer_pauses_by_itself_while_another_program_wants_the_device(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    run = tiny(dtype="float64", codec="none", steps=4000)
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        swarm.peers(1)
        guest = swarm.peer(1, "--device", DEVICE, "--pause-when-busy")
        swarm.hear(guest, Serving)
        swarm.trainer("--window", "3")
        swarm.until_version(1)
        # Another program, this one: it takes memory and computes.
        large, end = torch.randn(8192, 8192, device=DEVICE), threading.Event()

        def compute() -> None:
            while not end.is_set():
                torch.mm(large, large)
                torch.cuda.synchronize()

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        try:
            swarm.until(lambda: bool(guest.heard(Paused)), "it does not pause", LIMIT_S)
        finally:
            end.set()
            thread.join()
