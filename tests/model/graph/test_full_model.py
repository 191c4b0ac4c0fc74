"""A custom model with trained weights, as one module and in evaluation mode."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.manifest import BatchSpec, CustomModelSpec, DataSpec, OptimizerSpec, Run
from swarm.model.evaluate import FullModel, loss_of
from swarm.model.reference import SingleProcess
from tests.model.chain import loss_of_single
from tests.model.graph import zoo

pytest.importorskip("transformers", reason="the extra [hf] is not installed")


def run_of(model: CustomModelSpec, data: DataSpec) -> Run:
    return Run(
        name="custom",
        seed=3,
        steps=4,
        dtype="float64",
        model=model,
        data=data,
        batch=BatchSpec(microbatch_size=3, microbatches_per_step=2),
        optimizer=OptimizerSpec(lr=1e-2),
    )


def gpt2(dropout: float) -> Run:
    config = {
        "model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 256, "n_positions": 8,
        "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout,
    }  # fmt: skip
    model = CustomModelSpec(kind="hf", config=json.dumps(config), stages=1, vocab_size=256)
    return run_of(model, DataSpec(source="tales", sequence_length=8, tokens=1000))


ROWS = np.random.default_rng(0).integers(0, 256, (3, 9)).astype(np.uint8)


def test_of_a_language_model_the_loss_is_the_trainings_without_its_dropout() -> None:
    run = gpt2(0.0)
    single = SingleProcess(run, lambda _: ROWS)
    single.step(0)
    trained = loss_of_single(single, Microbatch(1, 0))
    weights = single.named_weights()
    assert loss_of(run, weights)(ROWS) == pytest.approx(trained, rel=1e-12)
    tokens = torch.from_numpy(ROWS[:, :-1])
    dropping = FullModel(gpt2(0.5), weights).loss([tokens, tokens])
    assert dropping == pytest.approx(trained, rel=1e-12), "dropout is off"
    assert loss_of(run, weights)(ROWS[:1]) != pytest.approx(trained, rel=1e-3), "any number of samples"


def test_a_batch_norm_uses_its_statistics_so_no_sample_depends_on_its_neighbours() -> None:
    model = CustomModelSpec(kind="code", source="tests.model.graph.zoo:resnet", stages=1, vocab_size=7)
    run = run_of(model, DataSpec(source="code", code="tests.model.graph.zoo:resnet", sequence_length=1))
    torch.manual_seed(run.seed)
    own = zoo.resnet()[0].double()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 2, 3, 4])
    with torch.no_grad():
        own.train()(images, labels)  # the statistics move
        tensors = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        weights = {name: tensor for name, tensor in tensors.items() if "num_batches" not in name}
        expected = own.eval()(images, labels).item()
    loss = loss_of(run, weights)
    assert loss([images.numpy(), labels.numpy()]) == pytest.approx(expected, rel=1e-12)
    alone = [loss([images[i : i + 1].numpy(), labels[i : i + 1].numpy()]) for i in range(4)]
    assert sum(alone) / 4 == pytest.approx(expected, rel=1e-9)


def test_weights_of_another_model_are_refused() -> None:
    run = gpt2(0.0)
    with pytest.raises(SetupError, match="weights that this model does not have: head"):
        FullModel(run, {"head": torch.zeros(2)})
    with pytest.raises(SetupError, match=r"weights transformer.ln_f.bias have shape \[2\]; expected \[8\]"):
        FullModel(run, {"transformer.ln_f.bias": torch.zeros(2)})
