"""Commands of the pages are run as a reader would, on loopback, with a small model and a short text.

Those that start a run, join, keep, watch and use it, and those that plan it. An owner's commands and
`swarm up` are run by the tests of these programs.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from peers.events import JoinLine, Kept, Serving
from swarm.manifest import BatchSpec, DataSpec, ModelSpec, OptimizerSpec, Run
from tests.process.swarm_processes import ROOT, Processes, eventually, swarm_command
from tests.test_docs import ADDRESS, COMMANDS, JOIN_FILE
from tests.test_docs import RUN as RUN_ID
from tests.test_docs import blocks as blocks_of

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = Run(
    name="docs",
    seed=1,
    steps=1000,
    checkpoint_every=50,  # often enough to wait for, seldom enough for a keeper to get one of both stages
    model=ModelSpec(layers=2, hidden=32, heads=2, ffn_hidden=64, vocab_size=256, stages=2),
    data=DataSpec(source="files", sequence_length=32),
    batch=BatchSpec(microbatch_size=2, microbatches_per_step=4),
    optimizer=OptimizerSpec(lr=1e-2, warmup_steps=1),
)
FILES = frozenset(
    {"run.toml", "corpus.txt", "join.txt", "ckpt", "history.jsonl", "model.safetensors", "devices.toml"}
    | {"spot.csv"}
)
INSTEAD = {"0.0.0.0": "127.0.0.1", "31337": "0", ":8080": ":0", ":9090": ":0"}
"""What is this machine's only, and free."""


class Reader:
    """Runs what the pages say, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.join: list[str] = []

    def words(self, page: str, command: str, nth: int = 0) -> list[str]:
        """The `nth` command `swarm COMMAND` of a page, for this machine."""
        found = [w[1:] for p, w in COMMANDS if p == page and w[:2] == [".venv/bin/swarm", command]][nth]
        if "--announce" in found:  # nobody reaches us there
            at = found.index("--announce")
            found = found[:at] + found[at + 2 :]
        instead = {**INSTEAD, **dict(zip((RUN_ID, ADDRESS), self.join[1::2], strict=False))}
        run_id = self.join[1] if self.join else ""
        return [self._here(instead.get(word, word.replace(RUN_ID, run_id))) for word in found]

    def _here(self, word: str) -> str:
        if word == JOIN_FILE:
            return f"@{self.folder / word[1:]}"
        is_file = word.partition("/")[0] in FILES or word.endswith(".key")
        return str(self.folder / word) if is_file else word

    def run(self, words: Sequence[str]) -> str:
        """What it prints; it ends with 0."""
        done = swarm_command(*words)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout


def test_a_public_run_is_started_joined_kept_watched_and_used(tmp_path: Path) -> None:
    reader, manifest, text = Reader(tmp_path), tmp_path / "run.toml", tmp_path / "corpus.txt"
    manifest.write_text(reader.run(reader.words("docs/public-run.md", "manifest", 0)))
    assert "[admission]" in reader.run(reader.words("docs/public-run.md", "manifest", 1))
    manifest.write_text(SMALL.to_toml())
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    history = tmp_path / "history.jsonl"
    with Processes() as programs:
        bootstrap = programs.start("bootstrap", reader.words("docs/public-run.md", "bootstrap"))
        reader.join = programs.hear(bootstrap, JoinLine).line.split()[2:]
        for n, page in enumerate(("docs/join.md", "docs/spot.md")):
            peer = programs.start(f"peer {n}", reader.words(page, "peer"))
            programs.hear(peer, Serving)
        keeper = programs.start("keeper", reader.words("docs/public-run.md", "keeper"))
        trainer = programs.start("trainer", reader.words("docs/public-run.md", "train"))
        programs.until(lambda: any(kept.version >= 100 for kept in keeper.heard(Kept)), "nothing is kept")
        trainer.signal(signal.SIGINT)
        assert trainer.wait() == 0
        status = json.loads(reader.run(reader.words("docs/public-run.md", "status")))
        assert [stage["serving"] for stage in status["stages"]] == [1, 1]
        for nth in range(2):
            words = reader.words("docs/public-run.md", "dashboard", nth)
            command = [sys.executable, "-u", "-m", "peers", *words]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as dashboard:
                assert dashboard.stdout is not None
                said = dashboard.stdout.readline()
                if nth:
                    eventually(lambda: history.exists() and history.stat().st_size > 0, lambda: "no history")
                dashboard.send_signal(signal.SIGINT)
                assert ("the dashboard is at http://127.0.0.1:" in said) == (nth == 1), said
                dashboard.stdout.read()
        reader.run(reader.words("README.md", "export"))  # of a run that is not at its end
        assert reader.run(reader.words("README.md", "generate")).startswith("Once upon a time ")
        keeper.signal(signal.SIGINT)
        assert keeper.wait() == 0
    said = reader.run(reader.words("docs/public-run.md", "verify"))
    assert "steps 0 to 99 are what the peers signed, to the last bit" in said
    assert "compared: 200 of 200 signed steps" in said
    reader.run(reader.words("docs/public-run.md", "export"))
    assert reader.run(reader.words("docs/public-run.md", "generate")).startswith("The import ")
    assert "perplexity" in reader.run(reader.words("docs/public-run.md", "eval"))


def test_machines_are_planned_and_simulated(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    (tmp_path / "run.toml").write_text(reader.run(["manifest"]))
    (devices,) = blocks_of("docs/planning.md", "toml")
    (tmp_path / "devices.toml").write_text(devices)
    (trace,) = blocks_of("docs/spot.md", "csv")
    (tmp_path / "spot.csv").write_text(trace)
    assert "stage 0" in reader.run([*reader.words("docs/spot.md", "plan"), "--budget", "0.5"])
    reader.run([*reader.words("docs/spot.md", "simulate"), "--hours", "0.002"])
