"""`swarm graph`: models by name, by config and by manifest, shown as lines, JSON, Graphviz and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from peers.cli import Exit, main
from peers.programs.graph import run_graph
from peers.programs.tool_options import GraphOptions
from swarm.errors import SetupError
from swarm.model.graph.model_source import from_code, from_hf

UNET = "tests.model.graph.zoo:unet"
HERE = "tests.peers.programs.test_graph"


def apart() -> tuple:
    return nn.Linear(4, 2), torch.ones(3, 4), nn.functional.mse_loss, torch.zeros(3, 2)


def by_name() -> tuple:
    return nn.Linear(4, 1), {"input": torch.ones(3, 4)}, torch.sum, ()


def nothing() -> tuple:
    return 1, 2, 3


def graph(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["graph", *argv]) == Exit.OK
    return capsys.readouterr().out


def test_a_table_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    lines = graph(capsys, "--model", UNET, "--stages", "3").splitlines()
    assert lines[0].startswith("32 operators (0 computed where they are needed); 28 parameters")
    assert "inputs: image_NCHW float32[2, 1, 32, 32]" in lines
    assert [line.split()[0] for line in lines[-5:-2]] == ["0", "1", "2"]
    assert lines[-3].endswith("4 B  mse_loss float32[]")
    assert "image_NCHW float32[2, 1, 32, 32]" in lines[-4], "the target is carried"
    assert lines[-1].startswith(
        "a peer holds 24 bytes a weight (adamw), 16 on a GPU with --host-sums; with moments in bfloat16 20, "
        "12: of the largest stage "
    )


def test_tied_weights_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "one tensor: tokens.weight, head.weight" in graph(capsys, "--model", "tests.model.graph.zoo:gpt2")


def test_costs_are_seconds_of_this_machine_and_its_stages_are_cut_by_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = json.loads(graph(capsys, "--model", UNET, "--stages", "2", "--calibrate", "--json"))
    seconds = [0.0, 0.0]
    for op in told["operators"]:
        assert 0 < op["cost"] < 1
        seconds[op["stage"]] += op["cost"]
    assert max(seconds) < 0.8 * sum(seconds)


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(graph(capsys, "--model", UNET, "--stages", "2", "--json"))
    stages = {op["name"]: op["stage"] for op in told["operators"]}
    assert set(stages.values()) == {0, 1} and stages[told["loss"]] == 1
    assert told["stages"][0]["outputs"] == told["stages"][1]["inputs"]
    sizes = {value["name"]: value["bytes"] for value in told["values"]}
    assert told["stages"][0]["bytes_out"] == sum(sizes[name] for name in told["stages"][0]["outputs"])


def test_dot_has_every_operator_in_its_stages_colour(capsys: pytest.CaptureFixture[str]) -> None:
    lines = graph(capsys, "--model", UNET, "--stages", "2", "--dot").splitlines()
    assert (lines[0], lines[-1]) == ("digraph model {", "}")
    assert sum("fillcolor=" in line for line in lines) == 1 + 32
    assert {line.split('"')[3] for line in lines if 'fillcolor="#' in line} == {"#a6cee3", "#fdbf6f"}
    assert sum("->" in line for line in lines) >= 32


def test_a_models_own_function_is_called_by_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    text = graph(capsys, "--model", "tests.model.graph.zoo:quantised", "--stages", "2", "--dot")
    assert text.count('label="Coarse\\n') == 3 and 'label="gelu\\n' in text


@pytest.mark.slow
def test_the_decoder_of_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["manifest"])
    text = capsys.readouterr().out
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert "x int64" in graph(capsys, "--model", str(path), "--stages", "2")


def test_a_manifest_with_a_model_of_its_own_shows_its_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "own"\nseed = 1\nsteps = 2\n[model]\nkind = "code"\nsource = "tests.model.graph.zoo:unet"\n'
        'stages = 2\n[data]\nsource = "code"\ncode = "tests.model.graph.zoo:none"\n'
        "[batch]\nmicrobatch_size = 2\nmicrobatches_per_step = 2\n[optimizer]\nlr = 0.1\n"
    )
    shown = json.loads(graph(capsys, "--model", str(path), "--json"))
    assert len(shown["stages"]) == 2


# --- models that users bring --------------------------------------------------------------------------------


def test_a_loss_and_inputs_by_name_may_be_given() -> None:
    assert from_code(f"{HERE}:apart").trace().graph.inputs == ("input", "target")
    assert from_code(f"{HERE}:by_name").trace().graph.inputs == ("input",)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("zoo", "a model is given as package.module:function, not 'zoo'"),
        ("./zoo.py:build", "a model is given as package.module:function, not './zoo.py:build'"),
        (
            "no.such.package:build",
            "no.such.package:build cannot be imported here: No module named 'no'; install",
        ),
        ("tests.model.graph.zoo:vgg", "tests.model.graph.zoo has no vgg: check the name after the colon"),
        (f"{HERE}:nothing", r"has to return \(module, inputs\), or .*targets\); it returned a tuple"),
    ],
)
def test_a_function_that_is_none_is_refused(spec: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        from_code(spec)


def test_a_config_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("swarm.model.graph.model_source.importlib.import_module", absent)
    with pytest.raises(SetupError, match=r"needs transformers: pip install 'swarm-train\[hf\]'"):
        from_hf({"model_type": "gpt2"}, rows=1, length=8)


def test_a_config_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no\.json cannot be read: No such file"):
        run_graph(GraphOptions(model=f"hf:{tmp_path}/no.json"))
    for text in ("5", "[1]", '{"model_type": '):
        (tmp_path / "some.json").write_text(text)
        with pytest.raises(SetupError, match=r"some\.json is no config\.json of transformers: "):
            run_graph(GraphOptions(model=f"hf:{tmp_path}/some.json"))


@pytest.mark.slow
def test_models_of_transformers_by_their_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    path = tmp_path / "config.json"
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50}
    path.write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    text = graph(capsys, "--model", f"hf:{path}", "--length", "12", "--rows", "3")
    assert "inputs: input_ids int64[3, 12], labels int64[3, 12]" in text
    assert "one tensor: transformer.wte.weight, lm_head.weight" in text
    image = {"model_type": "resnet", "depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 4}
    made = from_hf({**image, "architectures": ["ResNetForImageClassification"]}, rows=3, length=1).trace()
    assert made.graph.inputs == ("pixel_values", "labels") and made.statistics
    speech = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "num_hidden_layers": 1}
    with pytest.raises(
        SetupError, match=r"Wav2Vec2ForCTC\.forward: missing .* say what it is given, such as"
    ):
        from_hf(speech, rows=1, length=8)
    with pytest.raises(SetupError, match=r"Wav2Vec2ForCTC\.forward: .* model\.inputs = "):
        from_hf(speech, rows=1, length=8, inputs=("input_ids int 8",))
    with pytest.raises(SetupError, match=r"transformers makes no model of this config: .*nonesuch") as told:
        from_hf({"model_type": "nonesuch"}, rows=1, length=8)
    assert len(told.value.text) < 500  # transformers lists the 700 that it knows


def test_more_stages_than_operators_with_weights_are_refused() -> None:
    with pytest.raises(SetupError, match="1 operator with weights: too few for 2 stages"):
        run_graph(GraphOptions(model=f"{HERE}:by_name", stages=2))
