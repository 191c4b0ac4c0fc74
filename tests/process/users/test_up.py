"""`swarm init` and `swarm up`, as a newcomer types them: a run that trains as it was made, and goes on."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from peers.cli import main
from swarm.manifest import demo_run, load_run
from tests.process.forkserver import ForkServer
from tests.process.swarm_processes import LIMIT_S, MARK, ROOT, family_of_mark, swarm_command

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """All processes of the test inherit it."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "cache"))
    yield
    family_of_mark(mark).assert_gone()


def test_a_run_is_made_trained_interrupted_and_trained_to_its_end(
    fork_server: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First by new Pythons, as a newcomer has it, and then by processes that have imported already."""
    terms, folder, manifest = demo_run(stages=2), tmp_path / "myrun", tmp_path / "a.toml"
    model = replace(terms.model, hidden=32, ffn_hidden=64, heads=2)
    data = replace(terms.data, sequence_length=16)
    batch = replace(terms.batch, microbatch_size=2, microbatches_per_step=4)
    small = replace(terms, steps=60, checkpoint_every=5, model=model, data=data, batch=batch)
    manifest.write_text(small.to_toml())
    made = swarm_command("init", str(folder), "--manifest", str(manifest))
    assert made.returncode == 0, made.stderr
    # As a shell starts what is followed by `&`: with SIGINT ignored.
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    up = [*background, sys.executable, "-u", "-m", "peers", "up", str(folder)]
    slowly = {**os.environ, "SWARM_JOB_S": "0.1"}  # it must not be over before it is interrupted
    with subprocess.Popen(
        up, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=slowly
    ) as first:
        assert first.stdout is not None
        said = ""
        while not list((folder / "checkpoints").glob("*/*/stage-1.json")) and first.poll() is None:
            said += first.stdout.readline()
        first.send_signal(signal.SIGINT)
        said += first.stdout.read()
        assert first.wait(LIMIT_S) == 130, said
    assert re.search(r"step \d+ done", said) and "is lost" not in said
    with fork_server.fork_children():
        assert main(["up", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "step 0 done" not in said, "it goes on from a checkpoint"
    assert "step 59 done" in said
    assert load_run(folder / "run.toml").admission.trainers, "the keys of the folder are used"
    assert f"generate --model {folder}/model.safetensors" in said
    written = swarm_command("generate", "--model", f"{folder}/model.safetensors", "Once ")
    assert written.stdout.startswith("Once ")
