"""`swarm export` and `swarm eval`: one file that says what it is, whole or refused, and worth what it was."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from peers.cli import Exit, main
from peers.options import WeightsOptions
from peers.programs import manifest_pinning
from peers.programs.tool_options import ExportOptions
from peers.programs.trained import evaluate, export, open_text, run_export, spread
from peers.start_line import program
from peers.storage import atomic_file, checkpoint, model_file
from peers.storage.dataset import Dataset, open_dataset
from peers.storage.weights import Weights, load_weights, model_shapes
from swarm.data import sample_offsets
from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.installed import import_file
from swarm.manifest import (
    BatchSpec,
    CodecSpec,
    CustomModelSpec,
    DataSpec,
    Run,
    audit_run,
    demo_run,
    parse_run,
)
from swarm.model.evaluate import loss_of
from swarm.model.graph.custom_model import build
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute
from tests.model.chain import loss_of_single, weights_of
from tests.peers.admitted import admitting
from tests.process.models import held_out_images
from tests.seeds import some

SMALL = replace(
    demo_run(stages=3, steps=20),
    model=replace(demo_run(stages=3).model, layers=3, hidden=32, heads=2, ffn_hidden=64),
    data=DataSpec(source="files", sequence_length=16),
    batch=BatchSpec(microbatch_size=4, microbatches_per_step=4),
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 60)
    return path


def pinned(run: Run, text: Path) -> tuple[Run, Dataset]:
    data = open_dataset(run, [text])
    return data.pinned(run), data


def saved(folder: Path, run: Run, step: int = 3) -> None:
    for stage in range(run.S):
        state = StageCompute(run, stage).state.copy()
        state["weights"] += step / 1000
        checkpoint.Checkpoint(folder, run, stage, step).save(state, keep=9)


@pytest.fixture
def run(text: Path, tmp_path: Path) -> Run:
    """Its checkpoints of step 3 are in the folder `ckpt`."""
    run, _ = pinned(SMALL, text)
    saved(tmp_path / "ckpt", run)
    return run


@pytest.fixture
def model(run: Run, tmp_path: Path) -> Path:
    export(tmp_path / "ckpt", run, None, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


# --- exporting


def test_an_exported_model_holds_the_weights_of_all_stages_and_says_what_it_is(
    model: Path, run: Run, tmp_path: Path
) -> None:
    found = load_weights(WeightsOptions(model=model))
    expected = load_weights(WeightsOptions(checkpoint_dir=tmp_path / "ckpt"))
    assert (found.run, found.step) == (run, 3) == (expected.run, expected.step)
    assert found.by_name.keys() == expected.by_name.keys()
    assert all(torch.equal(found.by_name[name], expected.by_name[name]) for name in expected.by_name)
    # Other programs can read both files.
    assert safetensors.torch.load_file(model).keys() == expected.by_name.keys()
    config = json.loads(model.with_suffix(".json").read_text())
    assert (config["run"], config["step"]) == (run.id, 3)
    assert parse_run(config["manifest"]) == run
    assert config["parameters"] == sum(tensor.numel() for tensor in expected.by_name.values())


def test_the_command_says_what_it_wrote_and_what_to_paste_next(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a new" / "model.safetensors"
    assert main(["export", "--checkpoint-dir", str(tmp_path / "ckpt"), "--out", str(out)]) == Exit.OK
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"wrote {out} (") and said[0].endswith(") and model.json")
    assert said[1] == f"run demo {run.id}, step 3, 0.0 M parameters"
    assert said[2] == f"try it: {program()} generate --model '{out}' 'The '"


def test_one_stage_is_in_memory_at_a_time(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    load = checkpoint.Checkpoint.load

    def noted(one: checkpoint.Checkpoint, *rest: Any, **named: Any) -> Any:
        assert "weights" in named["only"] and "exp_avg" not in named["only"]
        read.append(int(one.path.stem.removeprefix("stage-")))
        return load(one, *rest, **named)

    monkeypatch.setattr(checkpoint.Checkpoint, "load", noted)
    export(tmp_path / "ckpt", run, None, tmp_path / "m.safetensors")
    assert read == [0, 1, 2]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: os.truncate(path, 50), r"is damaged: 50 bytes long, not \d+"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
            r"is damaged: its bytes are not those",
        ),
        (lambda path: path.unlink(), r"cannot read .*No such file"),
    ],
)
def test_a_damaged_checkpoint_is_not_exported_and_what_was_there_stays(
    model: Path, run: Run, tmp_path: Path, spoil: Any, words: str
) -> None:
    before = model.read_bytes()
    (path,) = (tmp_path / "ckpt" / run.id / "step-000000003").glob("stage-2-*.safetensors")
    spoil(path)
    with pytest.raises(SetupError, match=words):
        export(tmp_path / "ckpt", run, None, model)
    assert model.read_bytes() == before
    assert load_weights(WeightsOptions(model=model)).step == 3
    assert not list(tmp_path.glob(atomic_file.TEMPORARY + "*"))


def test_an_older_step_is_exported_where_it_is_asked_for_or_the_newest_is_damaged(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "ckpt", run, step=6)
    out = tmp_path / "m.safetensors"
    assert export(tmp_path / "ckpt", run, None, out).step == 6
    assert export(tmp_path / "ckpt", run, 3, out).step == 3
    (tmp_path / "ckpt" / run.id / "step-000000006" / "stage-1.json").write_bytes(b"{")
    assert export(tmp_path / "ckpt", run, None, out).step == 3
    assert "step 6 cannot be used: the checkpoint file " in capsys.readouterr().err
    with pytest.raises(SetupError, match=r"stage-1\.json is damaged"):
        export(tmp_path / "ckpt", run, 6, out)
    with pytest.raises(SetupError, match=r"step 5 is not complete in .*\(complete steps: 6 3\)"):
        export(tmp_path / "ckpt", run, 5, out)


def test_a_full_disk_leaves_the_old_model(model: Path, run: Run, tmp_path: Path) -> None:
    before = model.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_file, "write_all", full)
        with pytest.raises(SetupError, match=r"cannot write the model in .*: the disk is full.* --out"):
            export(tmp_path / "ckpt", run, None, model)
    assert model.read_bytes() == before
    assert load_weights(WeightsOptions(model=model)).step == 3


def test_a_disk_that_is_full_once_the_weights_are_written_leaves_the_old_model(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, write_all = load_weights(WeightsOptions(model=model)).by_name, atomic_file.write_all

    def room_for_weights(file: Any, data: Any) -> None:
        (write_full if bytes(data[:2]) == b"{\n" else write_all)(file, data)

    monkeypatch.setattr(atomic_file, "write_all", room_for_weights)
    with pytest.raises(SetupError, match="the disk is full"):
        model_file.write(model, run, 2, weights, lambda name: weights[name] + 1)
    assert load_weights(WeightsOptions(model=model)).step == 3
    assert not list(model.parent.glob(f"{atomic_file.TEMPORARY}*"))


def test_what_up_has_trained_is_kept_in_memory_until_the_disk_has_room(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Peers could save nothing either: it was nowhere else, and took days."""
    by_name = {name: torch.ones(it.shape, dtype=it.dtype) for name, it in model_shapes(run).items()}

    class Trained(list[Any]):
        def __enter__(self) -> Trained:
            return self

        def __exit__(self, *_: object) -> None: ...

        def trained(self) -> Any:
            return by_name, run.steps

    assert main(["init", str(tmp_path / "mine")]) == 0
    (tmp_path / "mine" / "run.toml").write_text(run.to_toml())
    monkeypatch.setattr("peers.api.local_swarm.local", lambda *_, **__: Trained())
    monkeypatch.setattr("peers.api.run.Run.from_toml", lambda *_, **__: SimpleNamespace(terms=run))
    waited = list[float]()

    def room_is_made(pause_s: float) -> None:
        waited.append(pause_s)
        full.undo()

    full = pytest.MonkeyPatch()
    full.setattr(atomic_file, "write_all", write_full)
    monkeypatch.setattr("peers.programs.demo.time.sleep", room_is_made)
    assert main(["up", str(tmp_path / "mine")]) == 0
    said = capsys.readouterr().out
    assert "! cannot write the model in" in said and "the disk is full" in said
    assert "tried again every 30 s" in said and len(waited) == 1
    found = load_weights(WeightsOptions(model=tmp_path / "mine" / "model.safetensors"))
    assert found.step == run.steps and all(
        torch.equal(by_name[name], it) for name, it in found.by_name.items()
    )
    started = list[object]()
    monkeypatch.setattr("peers.api.local_swarm.local", lambda *_, **__: started.append(1) or Trained())
    assert main(["up", str(tmp_path / "mine")]) == 0 and not started, "it is there already"
    assert "the trained model is" in capsys.readouterr().out
    os.truncate(tmp_path / "mine" / "model.safetensors", 9)
    assert main(["up", str(tmp_path / "mine")]) == 0 and started, "it is damaged"


def write_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_name_that_would_mislead_and_a_strangers_json_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--out .*model\.bin must end in \.safetensors"):
        run_export(ExportOptions(checkpoint_dir=tmp_path / "ckpt", out=tmp_path / "model.bin"))
    with pytest.raises(SetupError, match="must end in"):  # before anything is fetched
        run_export(ExportOptions(join=("no address",), run="0" * 32, out=tmp_path / "model.bin"))
    mine = tmp_path / "notes.json"
    mine.write_text('{"mine": 1}')
    with pytest.raises(SetupError, match=r"notes\.json is there already and is not of a model"):
        export(tmp_path / "ckpt", run, None, tmp_path / "notes.safetensors")
    assert mine.read_text() == '{"mine": 1}'
    assert not (tmp_path / "notes.safetensors").exists()


# --- reading


def changed(path: Path, **fields: Any) -> None:
    config = path.with_suffix(".json")
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: os.truncate(m, 9), r"model\.safetensors is damaged: 9 bytes long, not \d+"),
        (
            lambda m: m.write_bytes(m.read_bytes()[:-1] + b"\1"),
            "is damaged: its bytes are not those that were",
        ),
        (lambda m: m.unlink(), r"there is no model file .*: swarm export makes one"),
        (lambda m: (m.unlink(), m.mkdir()), r"there is no model file .*: swarm export makes one"),
        (lambda m: m.with_suffix(".json").unlink(), r"model\.json is missing: it says what .* is"),
        (lambda m: m.with_suffix(".json").write_bytes(b'{"format"'), r"model\.json is damaged: "),
        (lambda m: m.with_suffix(".json").write_bytes(b" " * 10**6), r"is damaged: longer than 64000 bytes"),
        (lambda m: changed(m, format=2), "has format 2; this version reads format 1"),
        (lambda m: changed(m, run="0" * 32), "is damaged: the manifest is of run"),
        (lambda m: changed(m, manifest="x = 1"), r"is damaged: .*manifest"),
        (lambda m: changed(m, step=21), "is damaged: step 21 of a run of 20"),
    ],
)
def test_a_model_that_is_not_what_it_says_is_refused(model: Path, change: Any, words: str) -> None:
    change(model)
    with pytest.raises(SetupError, match=words):
        load_weights(WeightsOptions(model=model))


def test_weights_of_another_model_under_a_fitting_digest_are_refused(model: Path, run: Run) -> None:
    shapes = model_shapes(run)
    other = {name: torch.zeros(tensor.shape) for name, tensor in shapes.items()}
    name = next(iter(other))
    for wrong in ({**other, "extra": torch.zeros(2)}, {**other, name: torch.zeros(3)}):
        model_file.write(model, run, 3, wrong, wrong.__getitem__)
        with pytest.raises(SetupError, match=f"its tensors are not those of run {run.id}: (extra|{name})"):
            load_weights(WeightsOptions(model=model))
    bad = {**other, name: torch.full(shapes[name].shape, math.nan)}
    model_file.write(model, run, 3, bad, bad.__getitem__)
    with pytest.raises(SetupError, match=f"is damaged: {name} is not finite"):
        load_weights(WeightsOptions(model=model))


# --- evaluating


def reference_loss(run: Run, weights: dict[str, torch.Tensor], rows: np.ndarray) -> float:
    """What the single process says, with the same weights, of the same samples."""
    batches = iter([rows])
    single = SingleProcess(run, lambda offsets: next(batches))
    for stage in single.stages.values():
        for name, own in stage.weights.items():
            own.copy_(weights[name])
    return loss_of_single(single, Microbatch(0, 0))


@pytest.mark.parametrize("dtype", some(["float64", "float32", "bfloat16"], quick=["float64", "bfloat16"]))
@pytest.mark.parametrize("codec", ["none", "blockwise8"])
def test_the_loss_is_that_of_the_single_process_after_the_round_trip(
    text: Path, tmp_path: Path, dtype: Any, codec: Any
) -> None:
    run, data = pinned(replace(SMALL, dtype=dtype, codec=CodecSpec(forward=codec, backward=codec)), text)
    saved(tmp_path / "ckpt", run)
    export(tmp_path / "ckpt", run, None, tmp_path / "model.safetensors")
    model = load_weights(WeightsOptions(model=tmp_path / "model.safetensors"))
    found = evaluate(model, data, 8)
    offsets = spread(data.tokens, 17, 8)
    losses = [reference_loss(run, model.by_name, data.batch(offsets[i : i + 4])) for i in (0, 4)]
    assert found.loss == sum(losses) / 2
    assert (found.samples, found.tokens, found.bytes, found.step) == (8, 128, 128, 3)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))


@pytest.mark.parametrize("loss", [math.nan, 800.0])
def test_what_is_no_number_is_not_called_infinite(
    text: Path, monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    """Of weights so large that a product of them is none."""
    run, data = pinned(SMALL, text)
    monkeypatch.setattr("peers.programs.trained.loss_of", lambda *_: lambda rows: loss)
    found = evaluate(Weights(run, 3, {}), data, 8)
    assert str(found.perplexity) == {"nan": "nan", "800.0": "inf"}[str(loss)]


def test_a_swarms_own_training_loss_is_found_again(text: Path, tmp_path: Path) -> None:
    """The samples of microbatch (t, m) have, with weights t, the loss that the swarm reported."""
    run, data = pinned(
        replace(SMALL, dtype="float64", codec=CodecSpec(forward="none", backward="none")), text
    )
    single = SingleProcess(run, data.batch)
    for t in range(3):
        single.step(t)
    again = loss_of(run, single.named_weights())(data.batch(sample_offsets(run, 3, 1)))
    assert again == loss_of_single(single, Microbatch(3, 1))


def test_dropout_is_off(text: Path) -> None:
    run, data = pinned(replace(SMALL, model=replace(SMALL.model, dropout=0.5)), text)
    weights = {n: w for s in range(run.S) for n, w in weights_of(StageCompute(run, s)).items()}
    rows = data.batch([0, 5])
    assert loss_of(run, weights)(rows) == loss_of(replace(run, model=SMALL.model), weights)(rows)


def test_the_command_evaluates_the_training_text_or_any_other(
    model: Path, run: Run, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("0123456789" * 50)
    words = {}
    for source in (["--model", str(model)], ["--checkpoint-dir", str(tmp_path / "ckpt")]):
        for data in ([], [text], [other]):
            files = ["--data", *map(str, data)] if data else []
            assert main(["eval", *source, *files, "--samples", "9", "--json"]) == Exit.OK
            found = json.loads(capsys.readouterr().out)
            assert (found["run"], found["step"], found["samples"]) == (run.id, 3, 9)
            words[source[0], tuple(data)] = found["loss"]
    # The same weights and the same text: the same loss. Another text: another.
    assert len(set(words.values())) == 2
    assert words["--model", ()] == words["--checkpoint-dir", (text,)]
    assert main(["eval", "--model", str(model), "--data", str(other)]) == Exit.OK
    shown = capsys.readouterr().out
    assert "bits per byte" in shown and "from other.txt" in shown
    assert main(["eval", "--model", str(model)]) == Exit.OK
    assert "64 samples of 16 tokens from its training's data" in capsys.readouterr().out


def test_a_run_that_names_its_trainers_is_measured_on_any_text(text: Path, tmp_path: Path) -> None:
    """It pins the root of the tokens that they prove, which is not that of another text."""
    run, _ = pinned(admitting(SMALL), text)
    assert run.data.root
    other = tmp_path / "other.txt"
    other.write_text("0123456789" * 50)
    assert open_text(run, (other,), None).pinned(run).data.sha256 != run.data.sha256


def test_the_text_of_the_training_has_to_be_there(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "elsewhere"))
    assert main(["eval", "--model", str(model)]) == Exit.SETUP
    assert "the run reads text files" in capsys.readouterr().err


def test_bytes_are_those_of_the_text_behind_the_tokens(text: Path, tmp_path: Path) -> None:
    import tokenizers

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"to": 0, "be": 1, "[UNK]": 2}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    words.save(str(path))
    spec = DataSpec(source="files", sequence_length=16, tokenizer="file")
    run = replace(SMALL, data=spec, model=replace(SMALL.model, vocab_size=5))
    data = open_dataset(run, [text], path)
    run = data.pinned(run)
    saved(tmp_path / "ckpt", run)
    model = load_weights(WeightsOptions(checkpoint_dir=tmp_path / "ckpt", run=run.id))
    found = evaluate(model, open_text(run, (text,), path), 3)
    rows = data.batch(spread(data.tokens, 17, 3))
    size = sum(len(words.decode(row[1:].tolist()).encode()) for row in rows)
    assert (found.tokens, found.bytes) == (48, size)
    assert size > 48
    assert found.bits_per_byte == pytest.approx(found.loss * 48 / math.log(2) / size)


@pytest.mark.parametrize(
    ("tokens", "window", "samples", "starts"),
    [(100, 10, 3, [0, 30, 60]), (12, 10, 9, [0, 1, 2]), (10, 10, 5, [0]), (1000, 11, 2, [0, 495])],
)
def test_samples_are_spread_over_the_text(
    tokens: int, window: int, samples: int, starts: Sequence[int]
) -> None:
    assert spread(tokens, window, samples) == list(starts)
    assert spread(tokens, window, samples, slice(1, 3)) == list(starts)[1:3]


def test_what_does_not_fit_the_run_is_refused() -> None:
    run = SMALL
    weights = {n: w for s in range(run.S) for n, w in weights_of(StageCompute(run, s)).items()}
    name = next(iter(weights))
    with pytest.raises(SetupError, match=f"no weights for {name}: take those of all stages"):
        loss_of(run, {n: w for n, w in weights.items() if n != name})
    with pytest.raises(SetupError, match=rf"weights {name} have shape \[2\]; expected"):
        loss_of(run, {**weights, name: torch.zeros(2)})
    with pytest.raises(SetupError, match=f"weights that run {run.id} does not have: more"):
        loss_of(run, {**weights, "more": torch.zeros(2)})
    with pytest.raises(SetupError, match=r'model\.kind = "counting" has no loss of its own'):
        loss_of(audit_run(), {})


def test_samples_that_code_makes_have_a_loss_and_no_words() -> None:
    model = CustomModelSpec(kind="code", source="tests.process.models:resnet", stages=3, vocab_size=4)
    spec = DataSpec(source="code", code="tests.process.models:images", sequence_length=1)
    run = replace(SMALL, model=model, data=spec)
    other = open_text(run, (Path("tests.process.models:held_out_images"),), None)
    found = evaluate(Weights(run=run, step=0, by_name={}), other, 10)  # 10: the last batch is not whole
    module, own = build(run).module.eval(), held_out_images()
    images, labels = zip(*(own[i] for i in spread(64, 1, 10)), strict=True)
    with torch.no_grad():
        expected = module(torch.tensor(np.stack(images)), torch.tensor(np.stack(labels))).item()
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert (found.samples, found.tokens, found.perplexity, found.bits_per_byte) == (10, None, None, None)
    with pytest.raises(SetupError, match="samples are made by one function: give one package"):
        open_text(run, (Path("a.b:c"), Path("a.b:d")), None)


@pytest.mark.slow
def test_a_run_whose_code_was_handed_over_is_evaluated_and_exported_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "handed_over_images.py"
    code.write_text("from tests.process.models import images, resnet\n")
    model = CustomModelSpec(kind="code", source="handed_over_images:resnet", stages=1, vocab_size=4)
    data = DataSpec(source="code", code="handed_over_images:images", sequence_length=1)
    import_file(code)
    run = replace(SMALL, model=model, data=data, codec=CodecSpec())
    run = manifest_pinning.pinned(run)
    saved(tmp_path / "ckpt", run)
    monkeypatch.delitem(sys.modules, code.stem)
    words = ["--checkpoint-dir", str(tmp_path / "ckpt")]
    assert main(["eval", *words]) == Exit.SETUP
    out = ["export", *words, "--out", str(tmp_path / "a.safetensors"), "--allow-code", str(code)]
    assert main(out) == Exit.OK
    capsys.readouterr()
    evaluated = [
        "eval",
        "--model",
        str(tmp_path / "a.safetensors"),
        "--allow-code",
        str(code),
        "--samples",
        "4",
    ]
    assert main(evaluated) == Exit.OK
    assert capsys.readouterr().out.startswith("loss ")
