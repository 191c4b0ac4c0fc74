"""Given weights in their modules: their loss of given samples, and text from them. Nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from swarm.errors import SetupError
from swarm.manifest import Run
from swarm.model.gpt import GptStage, replace_parameters, weights_dtype
from swarm.model.graph.capture import WithLoss
from swarm.model.graph.custom_model import build, frozen_weights, model_inputs
from swarm.model.same_bits import aligned, threads_as_before, use_threads_of
from swarm.model.stage_function import stage_function
from swarm.wire.codec import round_trip


def given_decoder(run: Run, weights: Mapping[str, torch.Tensor], device: torch.device) -> nn.Module:
    """All layers as one module, no codecs: tokens [B, T] -> logits [B, T, V]; raises as `with_weights`."""
    with torch.device("meta"):
        module = GptStage(run, range(run.built_in.layers))
    return with_weights(run, module, weights, device)


def with_weights(
    run: Run, module: nn.Module, weights: Mapping[str, torch.Tensor], device: torch.device
) -> nn.Module:
    """The built-in decoder, or a stage of it, with these weights, by full name, in evaluation mode; not
    copied needlessly.

    Raises:
        SetupError: weights are missing or have another shape.
    """

    def found(name: str, empty: nn.Parameter) -> torch.Tensor:
        tensor = weights.get(name)
        if tensor is None:
            raise SetupError(f"no weights for {name}: take those of all stages")
        if tensor.shape != empty.shape:
            raise SetupError(f"weights {name} have shape {list(tensor.shape)}; expected {list(empty.shape)}")
        return aligned(tensor.to(device=device, dtype=weights_dtype(run)))

    replace_parameters(module, found)
    return module.to(device).eval()


def loss_of(
    run: Run, weights: Mapping[str, torch.Tensor], device: str | torch.device = "cpu"
) -> Callable[[Any], float]:
    """A function that gives the mean loss of samples (any number, as the run's dataset has them) with these
    weights.

    A custom model is evaluated as it leaves the swarm (`FullModel`), the decoder as the
    run computes it: all stages in a row without dropout, with the codecs of the boundaries between them, so
    that the loss includes what codecs do to the activations. It is in nats a token, of rows [B, T + 1] of
    tokens.

    Weights, those of all stages by full name, are not copied where they need not be.

    Raises:
        SetupError: weights are missing, have another shape, or are not of a model of this run.
    """
    if run.brings_model:
        whole = FullModel(run, weights, device=device)
        # Of tokens it is the run that knows which input gets which.
        return lambda rows: whole.loss(model_inputs(run, rows) if isinstance(rows, np.ndarray) else rows)
    if run.model.kind != "gpt":
        raise SetupError(f'model.kind = "{run.model.kind}" has no loss of its own')
    device = torch.device(device)
    functions = [stage_function(run, stage) for stage in range(run.S)]
    modules = [with_weights(run, function.module(), weights, device) for function in functions]
    used = {name for module in modules for name, _ in module.named_parameters()}
    if strange := sorted(weights.keys() - used):
        raise SetupError(f"weights that run {run.id} does not have: {', '.join(strange[:5])}")

    @torch.no_grad()
    def loss(rows: np.ndarray) -> float:
        use_threads_of(run)
        tokens = torch.from_numpy(rows.astype(np.int64)).to(device)
        came: list[torch.Tensor] = []
        for boundary, (function, module) in enumerate(zip(functions, modules, strict=True)):
            _, made = function.apply(module, [*came, tokens], None, device)
            came = function.graded(made.values)
            if function.gives:
                came = [round_trip(came[0], run.codec.forward_at(boundary))]
        return float(came[0].item())

    return loss


FOR_ONE_THREAD = 20_000_000
"""With fewer weights one thread is as fast as several, which wait for one another at each of a token's many
small products. On a busy machine they wait long: 100 tokens of the demo's model took 3 s with one thread, and
with two on two cores at a load of 11 more than 100 s (2026-11-24)."""


@torch.no_grad()
def generate(
    run: Run, weights: Mapping[str, torch.Tensor], prompt_tokens: Sequence[int], n: int,
    temperature: float = 1.0, seed: int = 0, device: str | torch.device = "cpu", *,
    one_thread_below: int = FOR_ONE_THREAD, progress: Callable[[int], object] = lambda tokens: None,
) -> list[int]:  # fmt: skip
    """`n` tokens that continue the prompt, drawn at `temperature` (0: always the likeliest).

    `weights`: those of all stages by full name; with fewer numbers than `one_thread_below` one thread
    computes. The model sees the last `data.sequence_length` tokens. `progress`: told of each token.

    Raises:
        SetupError: weights are missing or have another shape, an empty prompt, or tokens that the model
            does not know.
    """
    if run.model.kind == "hf":
        raise SetupError(
            "swarm generate knows the built-in decoder only: make a folder with swarm export --hf DIR, and "
            'let transformers generate: AutoModelForCausalLM.from_pretrained("DIR").generate(...)'
        )
    if run.model.kind != "gpt":
        raise SetupError(f'model.kind = "{run.model.kind}" does not generate text')
    if not prompt_tokens or not all(0 <= token < run.model.vocab_size for token in prompt_tokens):
        raise SetupError(f"a prompt is one token or more, each from 0 to {run.model.vocab_size - 1}")
    module = given_decoder(run, weights, torch.device(device))
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt_tokens)
    with threads_as_before():
        if sum(tensor.numel() for tensor in weights.values()) < one_thread_below:
            torch.set_num_threads(1)
        for _ in range(n):
            seen = torch.tensor([tokens[-run.data.sequence_length :]], device=device)
            logits = module(seen)[0, -1].float().cpu()
            if temperature > 1e-30:  # less divides by nothing: it is the likeliest too
                chances = torch.softmax(logits / temperature, 0)
                tokens.append(int(torch.multinomial(chances, 1, generator=generator).item()))
            else:
                tokens.append(int(logits.argmax().item()))
            progress(1)
    return tokens[len(prompt_tokens) :]


# --- custom models ------------------------------------------------------------------------------------------

COUNTER = "num_batches_tracked"


class FullModel:
    """A custom model as one module, in evaluation mode, that gives its loss; `module` is the model alone.

    No dropout, running statistics, no codec: it is the model that leaves the swarm.
    """

    def __init__(
        self, run: Run, weights: Mapping[str, torch.Tensor], *, steps: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        """`weights`: trained parameters and batch norms' statistics, by full name, after so many `steps`.

        What no stage trains is as the run started with it, or as the model's code initialises it.

        Raises:
            SetupError: the model, or what it started with, cannot be had here; weights are not of it.
        """
        made = build(run)
        self.module: nn.Module = made.module
        self._with_loss = WithLoss(self.module, made.loss)
        if run.start.weights:
            for stage in range(run.S):
                fill(self._with_loss, frozen_weights(run, stage), 0)
        fill(self._with_loss, weights, steps)
        self._run, self._device = run, torch.device(device)
        self._with_loss.eval().to(self._device)
        example = (tuple(made.args), dict(made.kwargs), tuple(made.targets))
        self._example, self._form = pytree.tree_flatten(example)

    @torch.no_grad()
    def loss(self, inputs: Sequence[torch.Tensor | np.ndarray]) -> float:
        """The loss of a batch; `inputs`: the model's, in their order, with any number of samples."""
        use_threads_of(self._run)
        rest = iter(inputs)
        leaves: list[Any] = [
            aligned(torch.as_tensor(next(rest))).to(self._device, leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in self._example
        ]
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._run.dtype == "bfloat16"):
            return float(self._with_loss(*pytree.tree_unflatten(leaves, self._form)).item())


@torch.no_grad()
def fill(whole: WithLoss, weights: Mapping[str, torch.Tensor], steps: int) -> None:
    """Give a model and its loss the trained weights and statistics, by full name, of so many steps. Raises
    SetupError: they are not of it."""
    own = {**whole.weights(), **whole.tensors()}
    if strange := sorted(weights.keys() - own.keys()):
        raise SetupError(f"weights that this model does not have: {', '.join(strange[:5])}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise SetupError(
                f"weights {name} have shape {list(tensor.shape)}; expected {list(own[name].shape)}"
            )
        own[name].copy_(tensor)
        counter = own.get(f"{name.removesuffix('running_mean')}{COUNTER}")
        if counter is not None:
            counter.fill_(steps)
