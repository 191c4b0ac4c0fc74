"""Text from weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarm.errors import SetupError
from swarm.manifest import CustomModelSpec, audit_run
from swarm.model.evaluate import generate
from swarm.model.reference import SingleProcess
from swarm.model.same_bits import threads_as_before
from tests.model.chain import Chain, batch_of, tiny_run

RUN = tiny_run(dtype="float32", steps=40)


@pytest.fixture(scope="module")
def trained() -> dict[str, torch.Tensor]:
    """Trained on one sentence only, which it knows by heart."""
    reference = SingleProcess(RUN, lambda _: batch_of(RUN)([0, 0]))
    for t in range(RUN.steps):
        reference.step(t)
    return reference.named_weights()


@pytest.mark.slow
def test_a_model_that_knows_a_text_by_heart_says_it(trained: dict[str, torch.Tensor]) -> None:
    text = batch_of(RUN)([0])[0].tolist()
    assert generate(RUN, trained, text[:4], 12, temperature=0.0) == text[4:16]


def test_codecs_of_single_boundaries_are_of_the_training_only(trained: dict[str, torch.Tensor]) -> None:
    codecs = ("blockwise8", *["none"] * (RUN.S - 2))
    run = replace(RUN, codec=replace(RUN.codec, forward=codecs))
    text = batch_of(RUN)([0])[0].tolist()
    assert run.codec.forward == codecs and generate(run, trained, text[:4], 8, 0.0) == text[4:12]


@pytest.mark.slow
def test_a_model_with_bottlenecks_says_what_it_knows_by_heart() -> None:
    run = tiny_run(dtype="float32", steps=60, model={"bottleneck": 4})
    reference = SingleProcess(run, lambda _: batch_of(run)([0, 0]))
    for t in range(run.steps):
        reference.step(t)
    text = batch_of(run)([0])[0].tolist()
    assert generate(run, reference.named_weights(), text[:4], 12, temperature=0.0) == text[4:16]


def test_the_same_seed_says_the_same_and_the_weights_may_come_from_stages() -> None:
    weights = Chain(RUN).named_weights()
    cold = [generate(RUN, weights, [1, 2, 3], 30, temperature=t) for t in (0.0, 5e-324, 1e-300, 1e-29)]
    assert cold == cold[:1] * 4
    a, b, c = (generate(RUN, weights, [1, 2, 3], 30, temperature=1.0, seed=s) for s in (5, 5, 6))
    assert a == b != c
    assert len(a) == 30 and all(0 <= token < 256 for token in a), "longer than the 16 tokens it sees"


def test_what_cannot_be_generated_from_is_refused() -> None:
    weights = Chain(RUN).named_weights()
    with pytest.raises(SetupError, match=r"a prompt is one token or more, each from 0 to 255"):
        generate(RUN, weights, [], 1)
    with pytest.raises(SetupError, match=r"each from 0 to 255"):
        generate(RUN, weights, [256], 1)
    with pytest.raises(SetupError, match=r"no weights for head.weight: take those of all stages"):
        generate(RUN, {n: w for n, w in weights.items() if n != "head.weight"}, [1], 1)
    with pytest.raises(SetupError, match=r"weights head.weight have shape \[2\]; expected \[256, 32\]"):
        generate(RUN, {**weights, "head.weight": torch.zeros(2)}, [1], 1)
    with pytest.raises(SetupError, match=r'model.kind = "counting" does not generate'):
        generate(audit_run(), weights, [1], 1)


def test_a_model_of_transformers_is_generated_from_by_transformers() -> None:
    model = CustomModelSpec(kind="hf", config='{"model_type": "gpt2"}', stages=3)
    with pytest.raises(SetupError, match=r"swarm export --hf DIR, and let transformers generate: AutoModel"):
        generate(replace(RUN, model=model), {}, [1], 5)


@pytest.mark.parametrize(("limit", "expected"), [(1 << 30, 1), (0, 2)])
def test_a_small_model_writes_with_one_thread(
    monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
) -> None:
    used: list[int] = []

    def module(tokens: torch.Tensor) -> torch.Tensor:
        used.append(torch.get_num_threads())
        return torch.zeros(1, tokens.shape[1], 256)

    monkeypatch.setattr("swarm.model.evaluate.given_decoder", lambda *_: module)
    with threads_as_before():
        torch.set_num_threads(2)
        generate(RUN, {"a": torch.zeros(1)}, [1], 3, one_thread_below=limit)
        assert (used, torch.get_num_threads()) == ([expected] * 3, 2)
