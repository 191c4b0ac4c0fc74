"""Models that a manifest names: built alike everywhere, or refused with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarm.errors import Refused, SetupError
from swarm.manifest import BatchSpec, CodecSpec, CustomModelSpec, DataSpec, Run, demo_run, write_cut
from swarm.model.graph.custom_model import build, custom_model, model_inputs, pin_model
from swarm.model.graph.model_source import from_code, from_hf
from swarm.model.graph.partition import shared_parameters
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute
from swarm.model.stage_io import stage_inputs
from swarm.wire.codec import encode

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests.model.graph.custom_models"
EXACT = CodecSpec(forward="none", backward="none")
SAMPLES = DataSpec(source="code", code=f"{HERE}:samples", sequence_length=1)


def of(
    name: str, *, stages: int = 2, rows: int = 3, length: int = 6, data: DataSpec | None = None, **model: Any
) -> Run:
    """A run of a function of `custom_models`."""
    return replace(
        demo_run(steps=20),
        model=CustomModelSpec(kind="code", source=f"{HERE}:{name}", stages=stages, **model),
        data=data or DataSpec(source="tales", sequence_length=length),
        batch=BatchSpec(microbatch_size=rows, microbatches_per_step=2),
        codec=EXACT,
    )


def changed(run: Run, **values: Any) -> Run:
    return replace(run, model=replace(run.model, **values))


def hf(**config: Any) -> Run:
    import json

    return changed(of("bag"), kind="hf", source="", config=json.dumps(config))


@pytest.mark.slow
def test_a_model_is_the_same_in_every_process_and_its_manifest_pins_it() -> None:
    run = pin_model(of("bag"))
    assert isinstance(run.model, CustomModelSpec) and run.model.pinned
    assert run.model.version.startswith("sha256 ") and run.model.cut == write_cut(
        custom_model(run).assignment
    )
    code = (
        "import sys; from swarm.manifest import parse_run\n"
        "from swarm.model.graph.custom_model import custom_model, pin_model\n"
        "run = parse_run(sys.stdin.read()); custom_model(run); print(pin_model(run).id)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], input=run.to_toml(), capture_output=True, text=True, timeout=120,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert made.stdout.strip() == run.id, made.stderr


@pytest.mark.slow
def test_every_number_in_the_code_is_in_the_digest_of_the_graph() -> None:
    names = ("bag", "twice", "thrice", "by_tensor_two", "by_tensor_three")
    models = [pin_model(of(name)).model for name in names]
    assert len({model.graph for model in models if isinstance(model, CustomModelSpec)}) == len(names)
    assert len({model.digests for model in models if isinstance(model, CustomModelSpec)}) == 1


def test_building_follows_the_seed_and_leaves_torch_s_generator_alone() -> None:
    before = torch.get_rng_state()
    one, other = pin_model(of("bag")), pin_model(replace(of("bag"), seed=2))
    assert torch.equal(before, torch.get_rng_state())
    assert one.model.digests != other.model.digests and one.model.graph == other.model.graph  # type: ignore[union-attr]
    assert all(first != second for first, second in zip(one.model.digests, other.model.digests, strict=True))  # type: ignore[union-attr]
    mine = dict(build(one).module.named_parameters())
    for name in custom_model(one).traced.parameters:
        assert torch.equal(custom_model(one).value(name), mine[name])


def test_what_changes_neither_weights_nor_operators_traces_nothing_anew() -> None:
    run = of("bag")
    others = (
        replace(run, name="other", steps=run.steps + 1, exact_sums=False, delayed_updates=True),
        replace(run, model=replace(run.model, stages=1), checkpoint_every=7),
    )
    assert all(custom_model(other).traced is custom_model(run).traced for other in others)


def test_a_manifest_pins_weights_by_their_stages_only() -> None:
    with pytest.raises(SetupError, match=r"model\.weights = .*: it must be empty: model\.digests pins them"):
        changed(of("bag"), weights="0" * 64)


def test_a_float64_run_has_the_same_weights_in_float64() -> None:
    single, double = custom_model(of("bag")), custom_model(replace(of("bag"), dtype="float64"))
    for name in double.traced.parameters:
        assert double.value(name).dtype == torch.float64
        assert torch.equal(double.value(name), single.value(name).double())


def test_the_graph_is_of_the_run_s_microbatch_and_labels_are_the_tokens_after() -> None:
    run = of("bag", rows=1, length=9)
    model = custom_model(run)
    assert [(i.name, i.shape, i.dtype, i.below) for i in model.inputs] == [
        ("tokens", (1, 9), "uint8", 256),
        ("target", (1, 9), "uint8", 256),
    ]
    rows = np.arange(10, dtype=np.uint8)[None]
    tokens, target = model_inputs(run, rows)
    assert tokens.tolist() == [[*range(9)]] and target.tolist() == [[*range(1, 10)]]
    assert tokens.dtype == target.dtype == torch.uint8 and tokens.is_contiguous() and target.is_contiguous()


def test_a_given_cut_is_taken() -> None:
    run = of("bag")
    count = len(custom_model(run).assignment)
    model = custom_model(changed(run, cut=f"0*1 1*{count - 1}"))
    assert model.assignment == (0, *(1,) * (count - 1))
    assert [plan.stage for plan in model.plans] == [0, 1]
    assert shared_parameters(model.plans) == {}


def test_samples_of_code_become_the_inputs_of_the_model() -> None:
    run = of("classifier", data=SAMPLES)
    image, mask, label = np.ones((3, 6), np.float64), np.zeros((3, 6), bool), np.array([0, 2, 1])
    entering = model_inputs(run, [image, mask, label])
    assert [t.dtype for t in entering] == [torch.float32, torch.uint8, torch.uint8]
    assert entering[2].tolist() == [0, 2, 1]
    assert [i.below for i in custom_model(run).inputs] == [0, 2, 3]  # three classes, not 256
    assert model_inputs(replace(run, dtype="bfloat16"), [image, mask, label])[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "samples_of_pairs",
            r"samples_of_pairs have 2 arrays each, but the model takes 3: image, mask, label",
        ),
        (
            "samples_of_sevens",
            r"samples_of_sevens give \[7\] numbers for the model's input image, which takes \[6\]",
        ),
        (
            "samples_of_whole_images",
            r"give int64 for the model's input image: it takes floating point numbers",
        ),
        ("samples_of_four_classes", r"give 0 to 3 for the model's input label: it takes 0 to 2"),
    ],
)
def test_samples_that_do_not_fit_the_model_are_refused(name: str, text: str) -> None:
    from tests.model.graph import custom_models

    made = getattr(custom_models, name)()
    run = of("classifier", rows=4, data=replace(SAMPLES, code=f"{HERE}:{name}"))
    with pytest.raises(SetupError, match=text):
        model_inputs(run, [np.stack(arrays) for arrays in zip(*made[:4], strict=True)])


PINNED: dict[str, tuple[dict[str, Any], str]] = {
    "file": (
        {"version": "sha256 " + "0" * 64},
        r"model\.version: the run's model is of a source file with sha256 000.*, here is a source file",
    ),
    "version": (
        {"version": "cats 1.0"},
        r"model\.version: the run's model is of cats 1\.0, here is .* install",
    ),
    "digests": (
        {"digests": ("0" * 64, "1" * 64)},
        r"model\.digests: stage 1 of the model begins with other weights here \(.*\) than in the run "
        r"\(111111111111…\): another version of torch \(this is 2\..*\) .* rounds differently; use what",
    ),
    "graph": ({"graph": "0" * 64}, r"model\.graph: the model is made of other operators here .* use what"),
    "count": ({"cut": "0*1 1*1"}, r"model\.cut is not of the \d+ operators of this model: leave it out"),
    "stages": (
        {"cut": "0*{n}"},
        r"model\.cut has stages up to 0, but model\.stages is 2: leave model\.cut out",
    ),
    "backward": ({"cut": "1*1 0*{n-1}"}, r"operator .* of stage 0 reads .*, which stage 1 makes"),
    "idle": ({"cut": "0*{n-1} 1*1"}, r"stage 1 of model\.cut has no weights to train: .* into fewer stages"),
}


@pytest.mark.parametrize("key", PINNED)
def test_what_is_not_as_the_manifest_pins_it_is_refused(key: str) -> None:
    values, text = PINNED[key]
    run = of("bag")
    n = len(custom_model(run).assignment)
    given = dict(values)
    if "cut" in given:
        given["cut"] = given["cut"].replace("{n-1}", str(n - 1)).replace("{n}", str(n))
    with pytest.raises(SetupError, match=text):
        StageCompute(changed(run, **given), 1)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            of("small_bag"),
            r"model\.vocab_size = 256, but operator aten\.embedding\S* of embed takes tokens below 100",
        ),
        (
            of("classifier"),
            r"input image is float32\[3, 6\], and tokens are integers \[3, 6\]: take data\.source",
        ),
        (of("bag", stages=9), r"2 operators with weights: too few for 9 stages\. .* into fewer stages"),
        (of("moody"), r"begins with other weights each time .* by torch's own generator"),
        (of("half_evaluated"), r"drop of Bag is in evaluation mode, and would be trained in training mode"),
        (of("half_evaluated_loss", data=SAMPLES), r"0 of Sequential is in evaluation mode, and would"),
        (of("dice"), r"draws random numbers by numpy, and each microbatch .*apply_spec_augment = false"),
        (of("scalar", data=SAMPLES), r"an input of the model is a single number"),
        (of("empty"), r"sample input is empty: give at least one row"),
        (of("broken"), r"the model tests\.model\.graph\.custom_models:broken fails: no such luck$"),
        (of("gone"), r"^tests\.model\.graph\.custom_models has no gone: check the name"),
        (of("Bag"), r"custom_models:Bag is a type: it must be a function"),
        (changed(of("bag"), source="os:abort"), r"model os:abort is Python's own and makes none"),
        (
            changed(of("bag"), source="no.such:thing"),
            r"no\.such:thing cannot be imported here: No module.*install",
        ),
        (hf(model_type="nonsense"), r"transformers makes no model of this config: "),
        (
            hf(model_type="gpt2", auto_map={"AutoModel": "a--b.c"}),
            r"^auto_map in the model's config asks for some",
        ),
        (
            hf(model_type="x", text_config={"attn_implementation": "a/b"}),
            r"^attn_implementation in the model's",
        ),
        (hf(model_type="x", use_pretrained_backbone=True), r"^use_pretrained_backbone in the model's config"),
    ],
)
def test_models_that_no_swarm_can_train_are_refused(run: Run, text: str) -> None:
    if isinstance(run.model, CustomModelSpec) and run.model.kind == "hf":
        pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    with pytest.raises(SetupError, match=text):
        pin_model(run)


@pytest.mark.parametrize("name", ["half_evaluated", "half_evaluated_loss"])
def test_no_trace_trains_a_part_that_is_in_evaluation_mode(name: str) -> None:
    """As `swarm graph` makes one."""
    with pytest.raises(SetupError, match="is in evaluation mode, and would be trained in training mode"):
        from_code(f"tests.model.graph.custom_models:{name}").trace()


def test_what_cannot_travel_is_named_with_the_operator_that_makes_it() -> None:
    run = of("waves", data=SAMPLES)
    graph = custom_model(run).traced.graph
    made = next(op.index for op in graph.operators if "fft" in op.target)
    cut = write_cut([int(op.index > made) for op in graph.operators])
    text = r", which operator aten\.\S*fft\S* of the model makes, goes from stage 0 to the next: .* complex64"
    with pytest.raises(SetupError, match=text):
        custom_model(changed(run, cut=cut))


@pytest.mark.slow
def test_a_weight_of_several_stages_needs_exact_sums() -> None:
    run = of("gpt2", stages=3, length=10, vocab_size=41, data=replace(SAMPLES, code=f"{HERE}:tokens"))
    shared = shared_parameters(custom_model(run).plans)
    assert shared == {"tokens.weight": (0, 2)}
    inexact = custom_model(replace(run, exact_sums=False, dtype="float64"))
    assert shared_parameters(inexact.plans) == shared
    with pytest.raises(SetupError, match=r"^tokens\.weight is in stages 0 and 2, .* Set exact_sums = tr"):
        custom_model(replace(run, exact_sums=False))


def test_statistics_of_several_stages_need_exact_sums_and_equal_steps() -> None:
    run = of("normed_twice", data=SAMPLES)
    graph = custom_model(run).traced.graph
    first = next(op.index for op in graph.operators if "batch_norm" in op.target)
    run = changed(run, cut=write_cut([int(op.index > first) for op in graph.operators]))
    assert shared_parameters(custom_model(run).plans) == {}, "its norm has no weights"
    said = r"^norm\.running_mean is in stages 0 and 1, .* Set exact_sums = true.*, or cut"
    with pytest.raises(SetupError, match=said):
        custom_model(replace(run, exact_sums=False))


def test_whole_numbers_that_cross_are_bounded_by_what_they_are_looked_up_in() -> None:
    run = of("chosen", rows=2, data=SAMPLES)
    model = custom_model(run)
    assert [i.below for i in model.inputs] == [50, 9, 7]
    graph = model.traced.graph
    argmax = next(op for op in graph.operators if "argmax" in op.target)
    label = next(op for op in graph.operators if "flatten" in op.target and "label" in op.inputs)
    assert model.bounds[argmax.outputs[0]] == (0, 4)
    assert model.bounds[label.outputs[0]] == (0, 7)
    run = changed(run, cut=write_cut([int(op.index > argmax.index) for op in graph.operators]))
    (best,) = (what for what in stage_inputs(run, 1) if what.name == argmax.outputs[0])
    assert (best.least, best.below, best.dtype) == (0, 4, "int64")
    stage = StageCompute(run, 1)
    for number, text in (
        (-1, "hold -1; they are 0 or more"),
        (10**9, "hold 1000000000; the vocabulary has 4"),
    ):
        sent = encode(torch.full(best.shape, number, dtype=torch.int64), "none")
        with pytest.raises(Refused, match=text):
            stage._boundary._decode(best, sent)


@pytest.mark.slow
def test_a_config_of_transformers_is_pinned_with_its_version() -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 256, "n_positions": 16}
    run = pin_model(changed(hf(model_type="gpt2", **sizes), stages=2))
    assert isinstance(run.model, CustomModelSpec)
    assert run.model.version == f"transformers {transformers.__version__}"
    row = np.arange(run.data.sequence_length + 1, dtype=np.uint8)
    tokens, labels = model_inputs(run, np.tile(row, (run.batch.microbatch_size, 1)))
    assert torch.equal(tokens, labels), "it shifts labels itself"
    with pytest.raises(SetupError, match=r"of transformers 4\.0, here is transformers 5"):
        custom_model(changed(run, version="transformers 4.0"))


@pytest.mark.slow
def test_the_pin_of_code_is_the_same_from_its_own_folder_and_from_an_installed_copy(tmp_path: Path) -> None:
    """`swarm` and `python -m peers` differ in whether the folder in which they start can be imported from."""
    source = "import torch\ndef build():\n    return torch.nn.Linear(2, 2), torch.zeros(1, 2)\n"
    for place in (tmp_path / "own", tmp_path / "site"):
        package = place / "my_package"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
    info = tmp_path / "site" / "my_package-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 0.1\n")
    (info / "RECORD").write_text("my_package/__init__.py,,\nmy_package-0.1.dist-info/METADATA,,\n")
    code = (
        "from swarm.installed import import_module, source_digest\n"
        "print(source_digest(import_module('my_package:build', 'model')))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(first), str(ROOT)])},
        ).stdout
        for first in (tmp_path / "own", tmp_path / "site")
    }  # fmt: skip
    assert len(said) == 1 and said.pop().startswith("sha256 ")


def test_what_is_written_at_a_mask_is_cut_and_trained() -> None:
    run = pin_model(of("masked"))
    run = replace(run, data=replace(run.data, tokens=1000, sha256="0" * 64))
    rows = np.random.default_rng(1).integers(0, 256, (3, 7))
    single = SingleProcess(run, lambda offsets: rows)
    before = {name: weights.clone() for name, weights in single.named_weights().items()}
    single.step(0)
    assert not torch.equal(single.named_weights()["mask"], before["mask"])


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32}, (32, 32)),
        (
            {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": [32, 48]},
            (32, 48),
        ),
        ({"model_type": "pvt_v2", "architectures": ["PvtV2ForImageClassification"]}, (224, 224)),
    ],
)
def test_images_have_the_sizes_that_a_config_says_in_any_form(
    config: dict[str, Any], shape: tuple[int, int]
) -> None:
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = from_hf({**config, **(small if config["model_type"] == "vit" else {})}, rows=2, length=1)
    assert model.kwargs["pixel_values"].shape == (2, 3, *shape)


def test_a_manifest_names_the_inputs_of_a_model_of_transformers() -> None:
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    texts = hf(model_type="bert", architectures=["BertForSequenceClassification"], vocab_size=256, **size)
    texts = replace(texts, data=replace(SAMPLES, tokens=100))
    run = pin_model(changed(texts, inputs=("input_ids int 6", "labels int"), vocab_size=256))
    assert [(one.name, one.shape, one.below) for one in stage_inputs(run, 0)] == [
        ("input_ids", (3, 6), 256), ("labels", (3,), 2),
    ]  # fmt: skip
    rows = [np.arange(18).reshape(3, 6), np.array([0, 1, 1])]
    assert [tuple(value.shape) for value in model_inputs(run, rows)] == [(3, 6), (3,)]
    with pytest.raises(
        SetupError, match=r"input labels is int64\[3\], and tokens are integers \[3, 6\]: take"
    ):
        custom_model(replace(run, data=DataSpec(source="tales", sequence_length=6)))
