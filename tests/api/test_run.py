"""`swarm.Run`: what it makes of a module and samples, and what it refuses before anything is started."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

import swarm
from peers.api.background import as_in_peers
from peers.api.local_swarm import LocalSwarm
from peers.api.processes import Processes
from peers.cli import build_parser, main
from peers.events import Event, Note, Serving, Working, to_json
from peers.net.charter.signed import certify, open_credential, seal_credential
from peers.net.identity import Identity
from peers.options import TOKEN_START, PeerOptions, from_environment, options_from
from peers.programs.fleet import Child
from peers.programs.trained import NoRoom
from peers.storage import written
from peers.storage.samples import Samples
from swarm.errors import SetupError
from swarm.manifest import demo_run, parse_run
from swarm.model.evaluate import loss_of
from tests.api.nets import Net, net, samples
from tests.model.graph.custom_models import Bag
from tests.seeds import some
from tests.test_docs import ADDRESS

TEXT = "the quick brown fox jumps over the lazy dog. " * 40


def run(**changed: Any) -> swarm.Run:
    given = {"model": net(), "loss": functional.cross_entropy, "data": samples(), "steps": 3}
    return swarm.Run(**{**given, **changed})


def test_a_module_and_its_samples_become_a_run_that_others_can_have() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = run(model=model, stages=3, optimizer={"lr": 0.02}, batch={"microbatches_per_step": 2})
    terms = found.terms
    assert terms.pinned and terms == parse_run(found.to_toml())
    assert (terms.S, terms.steps, terms.M, terms.batch.microbatch_size) == (3, 3, 2, 8)
    assert (terms.optimizer.lr, terms.model.vocab_size, terms.data.tokens) == (0.02, 10, 24)
    assert found.code is not None and sorted(path.name for path in found.code.glob("*.*")) == [
        "__init__.py", "model.safetensors", "samples.safetensors",
    ]  # fmt: skip
    assert terms.code == (f"{found.code.name}:build", f"{found.code.name}:samples")
    assert f"swarm.Run notebook {found.id}: 3 stages, 3 steps" in repr(found)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} of the caller's module was changed"


class Keeping(nn.Module):
    """Keeps what it computed in a list and as an attribute, as some do to look at later."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.kept = nn.utils.weight_norm(nn.Linear(5, 3)), [torch.zeros(())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.kept[0] = self.net(x)
        return self.last


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_module_that_keeps_what_it_computed_before_is_copied_before_and_after_the_run() -> None:
    tokens, classes = samples()
    model = Keeping()
    model(tokens.float())
    made = run(model=model, data=(tokens.float(), classes), stages=1, steps=1)
    assert made.terms.pinned
    loss = model(tokens.float()).sum()  # between them too
    trained = made.trained(swarm.reference(made).weights(), 1)
    assert trained(tokens.float()).shape == (24, 3) and model.last.grad_fn is not None and loss.requires_grad
    assert not torch.equal(trained.net.weight_v, model.net.weight_v)


def test_the_same_is_the_same_run_and_other_weights_or_samples_are_another() -> None:
    first = run()
    assert (run().id, run().code) == (first.id, first.code)
    other = net()
    with torch.no_grad():
        other.narrow.bias.add_(1.0)
    tokens, classes = samples()
    ids = {first.id, run(model=other).id, run(data=(tokens, 2 - classes)).id, run(seed=7).id}
    assert len(ids) == 4


@pytest.mark.parametrize(
    "name",
    some(["__init__.py", "model.safetensors", "samples.safetensors"], quick=["model.safetensors"]),
)
def test_what_was_written_before_and_is_damaged_is_written_anew(name: str) -> None:
    first = run()
    assert first.code is not None
    whole = {path.name: path.read_bytes() for path in first.code.glob("*.*")}
    (first.code / name).write_bytes(whole[name][:-1] + b"?")
    assert run().id == first.id
    assert {path.name: path.read_bytes() for path in first.code.glob("*.*")} == whole
    (first.code / name).unlink()
    assert run().id == first.id
    assert (first.code / name).read_bytes() == whole[name]


@pytest.mark.parametrize("write", ["save_file", "save_arrays"])
def test_a_disk_with_no_room_for_what_is_written_is_told(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(written, write, full)
    with pytest.raises(SetupError, match=r"notebook_\w+ cannot be written: No space left on device"):
        run()


@pytest.mark.parametrize("form", ["columns", "dataset", "list", "numpy"])
def test_samples_may_come_in_any_form(form: str) -> None:
    tokens, classes = samples()
    data: Any = {
        "columns": (tokens, classes),
        "dataset": TensorDataset(tokens, classes),
        "list": [(one.tolist(), int(of)) for one, of in zip(tokens, classes, strict=True)],
        "numpy": (tokens.numpy().astype(np.uint8), classes.numpy().astype(np.int16)),
    }[form]
    opened = run(data=data).open_data()
    assert isinstance(opened, Samples)
    (first, second) = opened.batch([0, 5])
    assert np.array_equal(first, tokens[[0, 5]]) and np.array_equal(second, classes[[0, 5]])


def test_numbers_of_any_kind_are_what_they_were() -> None:
    tokens, classes = samples()
    halves = tokens.bfloat16() / 4
    example = np.zeros((2, 5), "float32")
    opened = run(model=Sums(), data=(halves, classes), inputs=example, stages=1).open_data()
    assert isinstance(opened, Samples) and np.array_equal(opened.batch([3])[0][0], halves[3].float())
    model = Complex(trained=False)  # complex numbers have two parts
    whole = {"microbatch_size": 24, "microbatches_per_step": 1}
    made = run(model=model, data=(tokens.float(), classes), stages=1, batch=whole)
    step = next(iter(swarm.reference(made)))
    assert step.loss == pytest.approx(functional.cross_entropy(model(tokens.float()), classes).item())


def test_an_example_says_rows_names_and_dtypes() -> None:
    tokens, classes = samples()
    found = run(inputs={"tokens": tokens[:4].to(torch.int32)}, data=(tokens, classes))
    assert found.terms.batch.microbatch_size == 4
    assert found.code is not None
    text = (found.code / "__init__.py").read_text()
    assert "def forward(self, tokens, target):" in text and "torch.zeros([4, 5], dtype=torch.int32)" in text


class Timed(Net):
    def forward(self, tokens: torch.Tensor, times: float = 1.0, twice: bool = False) -> torch.Tensor:
        return super().forward(tokens) * times * (1 + twice)


def test_numbers_in_an_example_may_be_numpys() -> None:
    with torch.random.fork_rng(devices=[]):
        model = Timed()
    tokens, classes = samples()
    found = [
        run(
            model=model, data=(tokens, classes), inputs={"tokens": tokens[:4], "times": times, "twice": twice}
        )
        for times, twice in ((3, True), (np.int64(3), np.bool_(True)))
    ]
    assert found[0].id == found[1].id


class Foretell(nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x)).transpose(1, 2)


def test_a_module_may_be_trained_on_text(tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text(TEXT)
    found = run(
        model=Foretell(), data={"source": "files", "sequence_length": 16}, files=[text], steps=5,
        optimizer={"lr": 0.1},
    )  # fmt: skip
    assert (found.terms.data.tokens, found.terms.model.vocab_size) == (len(TEXT), 256)
    first, *_, last = (step.loss or 0.0 for step in swarm.reference(found))
    assert last < 0.9 * first


def test_the_reference_trains_and_gives_the_module_back_trained() -> None:
    found = run(steps=20, optimizer={"lr": 0.05})
    threads = torch.get_num_threads()
    steps = list(single := swarm.reference(found))
    assert [step.t for step in steps] == list(range(20))
    losses = [step.loss or 0.0 for step in steps]
    assert losses[-1] < 0.5 * losses[0]
    assert losses[3] == sum(steps[3].losses) / 8
    model = single.model()
    assert type(model) is Net and not model.training and model is not found.module
    tokens, classes = samples()
    assert (model(tokens).argmax(1) == classes).float().mean() > 0.8
    assert int(model.norm.num_batches_tracked) == 20
    assert torch.equal(model.idle, torch.ones(2))
    assert torch.equal(model.narrow.weight, single.weights()["narrow.weight"])
    assert torch.get_num_threads() == threads


class KeepsNorm(Net):
    """Keeps the statistics of its norm, as those do who train on few samples."""

    def train(self, mode: bool = True) -> KeepsNorm:
        super().train(mode)
        self.norm.eval()
        return self


def test_a_part_that_train_leaves_in_evaluation_mode_is_trained_in_it() -> None:
    with torch.random.fork_rng(devices=[]):
        model = KeepsNorm()
    single = swarm.reference(run(model=model, steps=1))
    assert "norm.running_mean" not in single.weights() and "norm.weight" in single.weights()
    assert torch.equal(cast(Any, single.model()).norm.running_mean, torch.zeros(16))


class Lit(Net):
    """Switches gradients on itself, which for whoever calls it are on anyway."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return super().forward(tokens)


def test_a_module_may_switch_gradients_on() -> None:
    """It was refused for weights that are part of no module."""
    with torch.random.fork_rng(devices=[]):
        lit, plain = Lit(), net()
        lit.load_state_dict(plain.state_dict())
    first, other = (swarm.reference(run(model=model, steps=1)) for model in (lit, plain))
    assert [step.losses for step in first] == [step.losses for step in other]
    assert all(torch.equal(weight, other.weights()[name]) for name, weight in first.weights().items())


class Weighted(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits * self.scale, target)


def told_by_the_program() -> tuple[object, ...]:
    kinds: Any = (torch.backends.mkldnn, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_default_device(), torch.get_default_dtype(), torch.is_anomaly_enabled(),
        torch.backends.cuda.flash_sdp_enabled(), *(kind.fp32_precision for kind in kinds),
        sys.float_info.min / 2 > 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [
        "no_grad",
        "inference",
        "autocast",
        "float64",
        "medium",
        "bf16",
        "anomaly",
        "attention",
        "device",
        "tiny",
    ],
)
def test_what_a_program_told_torch_changes_neither_a_run_nor_its_reference(told: str) -> None:
    model, data, kind = net(), samples(), cast(Any, torch.backends.mkldnn.matmul)
    first = run(model=model, data=data)
    expected, usual = swarm.reference(first).weights(), told_by_the_program()
    heard: list[object] = []

    def listening(*given: torch.Tensor) -> torch.Tensor:
        heard.append(told_by_the_program()[1:])
        return functional.cross_entropy(*given)

    with contextlib.ExitStack() as stack:
        if told in ("no_grad", "inference"):
            stack.enter_context(torch.no_grad() if told == "no_grad" else torch.inference_mode())
        elif told == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif told == "anomaly":
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        elif told == "attention":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        elif told == "device":
            stack.enter_context(torch.device("meta"))
        elif told == "tiny":
            stack.callback(torch.set_flush_denormal, False)
            torch.set_flush_denormal(True)
        elif told == "float64":
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        else:
            stack.callback(setattr, kind, "fp32_precision", "none")
            stack.callback(torch.set_float32_matmul_precision, "highest")
            if told == "medium":
                torch.set_float32_matmul_precision("medium")
            else:
                kind.fp32_precision = "bf16"
        before = told_by_the_program()
        assert before != usual
        again = run(model=model, data=data, loss=listening)
        found = swarm.reference(again)
        weights = found.weights()
        assert again.id == first.id and isinstance(found.model(), Net) and {*heard} == {usual[1:]}
        assert told_by_the_program() == before
    assert weights.keys() == expected.keys() and told_by_the_program() == usual
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_hooks_of_a_program_on_what_it_saves_round_nothing_of_the_reference() -> None:
    def halved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.half() if tensor.dtype == torch.float32 else tensor

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == torch.float16 else tensor

    first = run(steps=1)
    expected = swarm.reference(first).weights()
    with torch.autograd.graph.saved_tensors_hooks(halved, doubled):
        again = run(steps=1)
        weights = swarm.reference(again).weights()
    assert again.id == first.id
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("precision", ["none", "tf32"])
def test_a_program_keeps_what_it_told_torch_of_products_on_a_gpu(precision: str) -> None:
    """Its own training was several times slower once it had made a run."""
    kind = cast(Any, torch.backends.cuda.matmul)
    kind.fp32_precision = precision
    try:
        with as_in_peers():
            assert kind.fp32_precision == "none"
        assert kind.fp32_precision == precision
    finally:
        kind.fp32_precision = "none"


def of_no_slope(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Finite, but for its gradient."""
    return functional.cross_entropy(out, target) + (0.0 * out).square().sum().sqrt()


@pytest.mark.parametrize(
    ("dtype", "loss", "words"),
    [
        ("float32", of_no_slope, r"the gradient of \S+ for \(0, 0\) is beyond 32768; the run diverged"),
        (
            "float32",
            lambda *given: 1e8 * functional.cross_entropy(*given),
            r"for \(0, 0\) is beyond 32768; the",
        ),
        ("float64", of_no_slope, "the gradient of step 0 is not finite; the run diverged"),
    ],
)
def test_a_gradient_that_no_swarm_adds_ends_the_reference_too(dtype: str, loss: Any, words: str) -> None:
    """Added up in fixed point it became any numbers, and the training went on with them."""
    with pytest.raises(SetupError, match=words):
        next(iter(swarm.reference(run(loss=loss, dtype=dtype, stages=1))))


def test_a_loss_that_is_no_number_ends_the_reference_as_it_ends_a_swarm() -> None:
    single = swarm.reference(run(loss=lambda *given: functional.cross_entropy(*given) * float("nan")))
    with pytest.raises(SetupError, match=r"the loss of microbatch \(0, 0\) is not finite: nan; the run div"):
        next(iter(single))


@pytest.mark.parametrize("trained", [True, False])
def test_a_module_with_a_weight_that_is_no_number_is_refused_and_a_mask_may_be_infinite(
    trained: bool,
) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.maximum(self.inner(tokens), self.mask)

    model = Masked()
    assert run(model=model).terms.pinned
    model.inner.narrow.bias.requires_grad_(trained)
    with torch.no_grad():
        model.inner.narrow.bias[1] = torch.nan
    with pytest.raises(SetupError, match=r"inner.narrow.bias, a weight that the run starts with, is not fin"):
        run(model=model)


def test_a_loss_may_have_weights_which_are_trained_too() -> None:
    single = swarm.reference(run(loss=Weighted(), steps=2))
    weights = single.weights()
    assert not torch.equal(weights["loss.scale"], torch.ones(3))
    assert isinstance(single.model(), Net)
    assert loss_of(single.run.terms, weights)([*samples(8)]) != loss_of(single.run.terms, {})([*samples(8)])


@pytest.mark.parametrize("made", [{"preset": "1M"}, None])
def test_the_built_in_decoder_needs_no_module(made: dict[str, Any] | None) -> None:
    if made is not None:
        found = swarm.Run(model=made, data={"source": "tales", "sequence_length": 16}, steps=1)
        assert (found.terms.S, found.terms.built_in.hidden, found.code) == (2, 128, None)
        return
    terms = demo_run(stages=2, steps=1)
    small = {"layers": 2, "hidden": 8, "heads": 2, "ffn_hidden": 8, "vocab_size": 256, "stages": 2}
    found = swarm.Run(
        model=small, data={"source": "tales", "sequence_length": 8}, steps=1, codec={"forward": ["none"]}
    )
    model = swarm.reference(found).model()
    assert model(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 256)
    assert terms.S == 2


def test_a_model_of_a_table_starts_from_the_weights_of_a_folder(tmp_path: Path) -> None:
    """No argument could say so: `start` names the folder, and the table [start] has the same name."""
    save_file({name: value + 1 for name, value in Bag().state_dict().items()}, tmp_path / "model.safetensors")
    found = swarm.Run(
        model={"kind": "code", "source": "tests.model.graph.custom_models:bag", "vocab_size": 256},
        data={"source": "tales", "sequence_length": 5}, batch={"microbatch_size": 2}, start=tmp_path,
    )  # fmt: skip
    assert found.terms.start.weights == "folder" and len(found.terms.start.digests) == 2


def test_a_manifest_can_be_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(demo_run(steps=5).to_toml())
    found = swarm.Run.from_toml(path)
    assert found.terms.steps == 5 and found.terms.pinned and swarm.Run.of(found.terms).id == found.id


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Complex(Sums):
    """Turns numbers by angles, as rotary positions do; a subclass may train the angles."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        turned = torch.polar(torch.ones(3), torch.tensor([0.3, 1.2, 2.0]))
        self.turned: torch.Tensor
        if trained:
            self.turned = nn.Parameter(turned)
        else:
            self.register_buffer("turned", turned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.turned).imag


class Hidden(Sums):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            y.mul_(2.0)
        return self.linear(x) * y


class Scattered(Sums):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), 3).index_add(0, torch.arange(len(x)), self.linear(x))


class Chancy(Sums):
    """Skips a layer now and then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if random.random() < 2.0 else x


class Shared(Sums):
    """Weights that are tied by their memory, which no copy has."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(5, 3)
        self.other.weight.data = self.linear.weight.data


class Augmented:
    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.rand(5), number % 3


def half_evaluated() -> Net:
    model = net()
    model.norm.eval()
    return model


class Planned(Sums):
    """A part of it is called as a stage's own."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plan(self.linear(x))


TOKENS, CLASSES = samples()
TOO_LARGE = TOKENS % 9
TOO_LARGE[23, 0] = 9
OTHER = nn.Linear(1, 1)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": Net}, "model is the class Net: give a torch.nn.Module that is made, or a table"),
    ({"model": net(words=9), "data": (TOO_LARGE, CLASSES)},
     "sample 23 of .*:samples has 9 for the model's input tokens, which takes 0 to 8"),
    ({"model": nn.Linear(4, 3)}, "Linear cannot be traced.*"),
    ({"loss": "mse"}, "loss is 'mse': give a function, such as torch.nn.functional.mse_loss"),
    ({"loss": nn.CrossEntropyLoss}, "loss is <class .*CrossEntropyLoss'>: give a function"),
    ({"loss": lambda out, target: None}, "or the loss that is given, has to return a scalar loss .* nothing"),
    ({"loss": lambda out, target: 1.0}, "has to return a scalar loss .*, not nothing of the kind"),
    ({"model": Complex(), "data": (TOKENS.float(), CLASSES)}, "turned is complex: train its parts as floats"),
    ({"model": Hidden(), "data": (TOKENS.float(), CLASSES)},
     r"^test_run.py:\d+: operator aten.mul.Tensor writes to a tensor that needs a gradient, under no_grad"),
    ({"model": Planned(), "data": (TOKENS.float(), CLASSES)}, "a part called 'plan', as a stage has: rename"),
    ({"model": Chancy(), "data": (TOKENS.float(), CLASSES)}, "draws random numbers by Python's random, once"),
    ({"model": Shared(), "data": (TOKENS.float(), CLASSES)}, "other.weight lies in the memory of linear.wei"),
    ({"model": half_evaluated()}, "norm of Net is in evaluation mode, and would be trained in training mode"),
    ({"model": Sums(), "data": Augmented()}, r"data\[0\] holds other numbers when it is read again"),
    ({"data": (TOKENS, CLASSES > 1)}, "^Net cannot be computed: expected target dtype to be Long or Byte"),
    ({"model": Scattered(), "data": (TOKENS.float(), CLASSES), "dtype": "bfloat16", "stages": 1},
     r"^Scattered cannot be computed in bfloat16: test_run.py:\d+: `return torch.zeros.*same scalar type"),
    ({"data": (TOKENS.float().to_sparse(), CLASSES)}, "data holds a tensor that is no array: can't conv"),
    ({"loss": lambda out, target: (out[:, 0] - target).square().mean() + sum(OTHER.parameters()).sum()},
     "return what a loss reads of the model from the model"),
    ({"model": net().to("meta")}, "the module cannot be copied: Cannot copy out of meta tensor"),
    ({"data": "corpus.txt"}, r"data is a str: give samples"),
    ({"data": [{"tokens": 1}, {"tokens": 2}]}, "data holds dict: integers, booleans and floats can be"),
    ({"loss": functional.mse_loss}, "cannot be traced as one graph of operators"),
    ({"data": (TOKENS, CLASSES[:5])}, r"data has arrays of \[5, 24\] samples: all must have as many"),
    ({"data": (TOKENS, CLASSES, CLASSES)}, "Net.forward"),
    ({"data": (TOKENS,)}, "samples have one array each, and the loss needs another: the target"),
    ({"data": 5}, "data is a int: give samples"),
    ({"data": DataLoader(TensorDataset(TOKENS, CLASSES))}, r"give samples \(of a DataLoader its .dataset\)"),
    ({"data": {"x": TOKENS, "y": CLASSES}}, "data is a dict of arrays: give a tuple, of the module's inputs"),
    ({"loss": None}, r"does not fit Net.forward: .*If it does not give its loss itself, give a loss"),
    ({"data": []}, "data has no samples"),
    ({"data": [([1], 0), ([1, 2], 0)]}, r"data\[1\] is \[2\] and \[\], data\[0\] is \[1\] and \[\]: make"),
    ({"data": [("word", 1)]}, "data holds <U4: integers, booleans and floats can be trained on"),
    ({"data": (TOKENS.float().fill_(float("nan")), CLASSES), "model": Sums()}, "that are not finite"),
    ({"inputs": TOKENS[:2, :4]}, r"the example has an input \[2, 4\], and samples have \[5\] each"),
    ({"inputs": (TOKENS[:2], CLASSES[:2])}, "samples have 2 arrays each, but the example has 3|Net.forward"),
    ({"stages": 0}, "model.stages = 0 in the run's manifest: it must be an integer from 1 to 1024"),
    ({"steps": 0}, "steps = 0 in the run's manifest"),
    ({"setps": 5}, r"setps = 5 in the run's manifest: unknown key \(did you mean steps\?\)"),
    ({"optimizer": {"rate": 1}}, r"optimizer.rate = 1 in the run's manifest: unknown key"),
    ({"optimizer": "adamw"}, r"optimizer = \"adamw\" .* a table: .* its keys; or a dict$"),
    ({"optimizer": torch.optim.SGD(net().parameters())}, r"^optimizer = SGD \( Parameter .* or a dict$"),
    ({"stage": 2}, r"stage = 2 in the run's manifest: unknown key \(did you mean stages in \[model\]\?\)"),
    ({"lr": 0.1}, r"lr = 0.1 in the run's manifest: unknown key \(it stands in \[optimizer\]\)"),
    ({"optimizer": {"lr": 0.1, "seed": 3}}, r"optimizer.seed = 3 .* \(it stands before all tables\)"),
    ({"batch": 8}, "batch = 8 in the run's manifest: it must be a table"),
    ({"eval_data": "held.txt"}, r"--eval-data held\.txt: the manifest of run 'notebook' has no table"),
    ({"batch": {"microbatch_size": "8"}}, 'batch.microbatch_size = "8" in the run\'s manifest: it must be'),
    ({"data": (TOKENS, CLASSES.where(CLASSES > 0, -100))}, r"holds -100: .*; leave out labels of -100 by"),
    ({"vocab_size": 5}, r"holds [5-9]: integers must be 0 to 4 \(model.vocab_size\)"),
    ({"name": "a/b"}, "name = \"a/b\" in the run's manifest"),
    ({"model": {"preset": "1M"}}, "inputs, loss and targets belong to a module"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_what_cannot_be_trained_is_refused_by_name_at_once(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        run(**changed)


def test_of_what_cannot_be_traced_one_sentence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch logs 300 lines of it, and the model is traced once more to tell of its own lines."""
    told = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [told])
    with pytest.raises(SetupError, match="Linear cannot be traced"):
        run(model=nn.Linear(4, 3))
    assert told.stream.getvalue() == ""


def test_more_processes_than_a_machine_bears_are_not_started() -> None:
    found = run(steps=1)
    with pytest.raises(
        SetupError, match=r"2 stages of 500 peers are 1002 processes.*--yes \(from Python: yes=T"
    ):
        swarm.local(found, peers=500)
    with pytest.raises(SetupError, match="peers = 0: each stage needs at least one"):
        swarm.local(found, peers=0)
    with pytest.raises(SetupError, match=r"run is a str: give a swarm\.Run, as swarm\.Run\.from_toml\("):
        swarm.local("run.toml")  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"run is a str: give a swarm\.Run"):
        swarm.reference("run.toml")  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="--device 'gpu' is unknown; take auto, cpu"):
        swarm.local(found, device="cpu,gpu")
    with pytest.raises(SetupError, match="on_event is 'print': give a function, which is called with each"):
        swarm.local(found, on_event="print")  # type: ignore[arg-type]

    def fails(event: Event) -> None:
        raise ValueError("a slip")

    # A process whose output nobody read on waited for ever.
    swarm.local(found, peers=1, on_event=fails)._processes._emit(Note(text="starting"))
    idle = swarm.local(found, peers=1)
    with pytest.raises(SetupError, match=r"start the swarm first: with .* It runs in that block only"):
        next(iter(idle))
    with pytest.raises(SetupError, match="the run is not trained to its end"):
        idle.model()


def test_a_folder_that_holds_no_run_or_another_one_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, folder = run(steps=1), tmp_path / "myrun"
    with pytest.raises(SetupError, match=r"myrun holds no run: make one with .*swarm init .*myrun"):
        swarm.local(found, folder=folder)
    folder.mkdir()
    for name in ("charter", "owner.key", "trainer.key"):
        (folder / name).touch()
    (folder / "run.toml").write_text(run(steps=2).to_toml())
    with pytest.raises(SetupError, match=r"myrun holds another run than <swarm\.Run note.* 1 steps>: take"):
        swarm.local(found, folder=folder)
    (folder / "run.toml").write_text(found.to_toml())
    swarm.local(found, folder=folder)
    with (folder / "owner.key").open() as key:
        fcntl.flock(key, fcntl.LOCK_EX)  # as the p2pd of a bootstrap there has it
        with pytest.raises(SetupError, match=r"myrun is in use: another .* dashboard @\S+join.txt, or"):
            swarm.local(found, folder=folder)
    swarm.local(found, folder=folder)
    monkeypatch.setattr("peers.programs.fleet.os.access", lambda path, mode: False)  # of root all is writable
    with pytest.raises(SetupError, match="myrun cannot be written, and checkpoints go there"):
        swarm.local(found, folder=folder)


class Deaf(Processes):
    """One process, which does not leave when it is asked to."""

    waited = False

    async def start(self) -> None:
        words = ("sh", "-c", "trap '' TERM; echo here; exec sleep 60")
        process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        self.children.append(Child(process, lambda child, line: self._changed.set()))
        await self._changed.wait()

    async def close(self) -> None:
        await super().close()
        self.waited = True


def test_a_local_swarm_that_is_interrupted_at_its_end_waits_for_its_processes() -> None:
    made = swarm.Run.of(demo_run())
    processes = Deaf(made, 1, lambda event: None)
    interrupt = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), LocalSwarm(made, processes, progress=False):
        interrupt.start()
    assert processes.waited and processes.children[0].returncode == -signal.SIGKILL


def test_a_local_swarm_is_started_once() -> None:
    found = swarm.local(run(steps=1), peers=1)
    found._processes.children.append(object())  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"started once: for another, call swarm.local again"), found:
        pass


def test_of_a_local_swarm_that_was_not_started_nothing_is_known() -> None:
    found = swarm.local(run(steps=1), peers=1, device=torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="start the swarm first"):
        _ = found.addresses
    with pytest.raises(SetupError, match="--device 'None' is unknown; take auto, cpu"):
        swarm.local(run(steps=1), device=None)  # type: ignore[arg-type]


async def test_the_peers_of_a_local_swarm_have_the_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[list[str]] = []

    async def spawn(self: Processes, words: list[str], **_: Any) -> object:
        spawned.append(words)
        return object()

    monkeypatch.setattr(Processes, "_spawn", spawn)
    monkeypatch.setattr("peers.api.processes.choose_device", lambda name: name)
    for device, expected in (("cpu", ["cpu"] * 3), ("cuda:0, cuda:1", ["cuda:0", "cuda:1", "cuda:0"])):
        spawned.clear()
        processes = Processes(swarm.Run.of(demo_run()), 1, lambda event: None, device=device)
        for stage in range(3):
            await processes._spawn_peer(stage)
        assert [words[words.index("--device") + 1] for words in spawned] == expected


async def test_more_peers_of_a_stage_than_the_manifest_names_are_invited_and_keep_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`swarm up --peers 2` of a run that admits by token ended at the second peer. Later the second peer's
    token stood on its command line, where each user of the machine could read it."""
    folder, spawned = tmp_path / "mine", list[list[str]]()
    assert main(["init", str(folder), "--peers", "token"]) == 0

    async def spawn(cls: type, words: list[str], *_: Any, environment: dict[str, str], **more: Any) -> object:
        assert not any(TOKEN_START in word for word in words)
        spawned.append([*words, *from_environment(PeerOptions, words, environment)])
        return object()

    monkeypatch.setattr(Child, "spawn", classmethod(spawn))
    run = swarm.Run.from_toml(folder / "run.toml")
    processes: Any = Processes(run, 2, lambda event: None, folder=folder)
    processes.children = []

    async def started() -> tuple[PeerOptions, object]:
        await processes._spawn_peer(1)
        words = [*spawned[-1], "--run", run.id, "--join", ADDRESS]
        child = [*processes._stages][-1]
        return options_from(PeerOptions, build_parser(["peer"]).parse_args(words)), child

    named, second = await started(), await started()
    assert (named[0].identity, named[0].token) == (folder / "peer1.key", None)
    assert (second[0].identity, second[0].checkpoint_dir) == (folder / "peer1-1.key", None)
    me, owner = Identity.load(folder / "peer1-1.key").peer_id, run.terms.admission.owner
    role, certificate = certify(second[0].token, run.id, me)
    brought = open_credential(seal_credential(certificate), run.id, owner, me)
    assert role == "peer" and brought.token is not None and brought.token.uses == 1
    for died in (second, named):
        processes._bury(died[1])
        again, _ = await started()
        assert (again.identity, again.checkpoint_dir) == (died[0].identity, died[0].checkpoint_dir)


async def test_that_a_stage_that_is_not_there_cannot_be_killed_ends_nothing() -> None:
    processes = Processes(swarm.Run.of(demo_run()), 1, lambda event: None)
    for stage in (3, -1, "0"):
        with pytest.raises(SetupError, match=rf"^stage = {stage!r}: 'demo' has stages 0 to 2$"):
            await processes.kill(stage)  # type: ignore[arg-type]
    assert not processes.children and not processes._failure


@pytest.mark.parametrize("dead", [False, True])
async def test_the_last_peer_of_a_stage_is_killed_once_another_serves_it(
    monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    """It was at once, if a peer of another stage began to serve meanwhile, or if one was dead already."""

    class _Peer:
        returncode: int | None = None

        def __init__(self, stage: str) -> None:
            self.stage = int(stage)
            processes.children.append(self)

        def signal(self, number: int) -> None:
            self.returncode = -number

        async def wait(self) -> int:
            return self.returncode or 0

        def serves(self) -> None:
            name = str(processes.children.index(self))
            processes._hear(self, to_json(Serving(peer=name, stage=self.stage, version=0, device="cpu")))

    async def spawn(self: Processes, words: list[str], **_: Any) -> _Peer:
        return _Peer(words[words.index("--stage") + 1])

    async def told() -> None:
        for _ in range(9):
            await asyncio.sleep(0)

    monkeypatch.setattr(Processes, "_spawn", spawn)
    processes: Any = Processes(swarm.Run.of(demo_run()), 1, lambda event: None)
    processes._random = SimpleNamespace(random=lambda: 0.0, choice=lambda among: among[0])
    for stage in (0, 1, *[0] * dead):
        await processes._spawn_peer(stage)
    last, other, *gone = processes.children
    for peer in (last, *gone):
        peer.serves()
        peer.returncode = -9 if peer in gone else None
    killing = asyncio.create_task(processes.kill(0))
    await told()
    other.serves()
    await told()
    assert last.returncode is None and not killing.done()
    processes.children[-1].serves()
    await killing
    assert last.returncode == -signal.SIGKILL and processes.tally.preemptions == 1


async def test_what_ends_says_so_and_nothing_after_it() -> None:
    class Stuck:
        def signal(self, number: int) -> None: ...

        async def stop(self) -> None:
            processes._emit(Note(text="a peer is lost"))

    said: list[Event] = []
    processes = Processes(swarm.Run.of(demo_run()), 1, said.append)
    processes.children.append(Stuck())  # type: ignore[arg-type]
    await processes.close()
    assert said == [Note(text="ending all processes")]


async def test_a_local_swarm_whose_step_takes_minutes_is_given_up_only_if_nothing_is_done() -> None:
    said: list[Event] = []
    processes: Any = Processes(swarm.Run.of(demo_run()), 1, said.append)
    processes.stall_s = 0.5
    processes._trainer = trainer = SimpleNamespace(returncode=None)
    working = Working(t=0, done=1, count=8, after_s=31.0)
    loop = asyncio.get_running_loop()
    loop.call_later(0.4, processes._hear, trainer, to_json(working))
    began_s = loop.time()
    with pytest.raises(SetupError, match=r"the first step is not taken, and nothing else for 0\.5 s"):
        await processes.next_step()
    assert loop.time() - began_s > 0.85
    assert said == [working], "whoever waits sees that it works"


async def test_trained_weights_are_fetched_once_there_is_room_and_before_that_their_peers_do_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, said = list[Path](), list[Event]()

    async def collect(run: Any, transport: Any, directory: Any, folder: Path, emit: Any) -> int:
        calls.append(folder)
        if len(calls) < 3:
            raise NoRoom("no room for version 5 of stage 0")
        return 5

    @contextlib.asynccontextmanager
    async def node(**_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(transport=None, directory=None)

    monkeypatch.setattr("peers.programs.trained.collect", collect)
    monkeypatch.setattr("peers.net.node.Node", node)
    monkeypatch.setattr("peers.storage.weights.read_stage", lambda *_: {"w": torch.ones(1)})
    for folder in (None, tmp_path):
        processes: Any = Processes(swarm.Run.of(demo_run()), 1, said.append, folder=folder)
        processes.again_s = 0.0
        if folder is None:  # from Python nobody may be told to make room
            with pytest.raises(NoRoom):
                await processes.weights()
    assert (await processes.weights())[1] == 5 and len(calls) == 3
    monkeypatch.setattr("peers.storage.checkpoint.found_steps", lambda *_: [processes.run.steps])
    calls.clear()
    assert (await processes.weights())[1] == processes.run.steps, "the peers' checkpoints are here"
    assert [event.words() for event in said] == ["no room for version 5 of stage 0: tried again every 0 s"]
