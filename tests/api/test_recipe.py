"""The curve of a recipe: one that was ended and went on is that of one which was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.api.run import Run
from scripts.bench.loss.recipe import read, rows, train
from swarm import tales

RECIPE = """
name = "tiny"
seed = 1
steps = 5
[model]
layers = 2
hidden = 16
heads = 2
ffn_hidden = 32
vocab_size = 256
stages = 2
[data]
source = "tales"
sequence_length = 16
[batch]
microbatch_size = 2
microbatches_per_step = 2
[optimizer]
lr = 0.01
[eval]
every = 2
samples = 4
"""


def test_a_recipe_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "held-out.txt").write_bytes(tales.text(3))
    run = Run.from_toml(tmp_path / "recipe.toml", eval_data=[tmp_path / "held-out.txt"])
    told = []
    for name, ends in (("once", [99]), ("ended", [3, 99])):
        folder = tmp_path / name
        folder.mkdir()
        for until in ends:
            train(run, folder, 1, until)
        told.append(
            {(one["step"], "loss" in one): one.get("loss", one.get("eval_loss")) for one in read(folder)}
        )
    once, ended = told
    assert ended == {**once, (3, False): ended[3, False]}
    curve = rows(read(tmp_path / "once"), run.terms.tokens_per_step)
    assert [(row["step"], row["tokens"]) for row in curve] == [(0, 0), (2, 128), (4, 256), (5, 320)]
    assert curve[0]["loss"] is None and curve[-1]["eval_loss"] < curve[0]["eval_loss"]
