"""Given weights in their modules, and the loss of them on given samples, without training anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from swarm.errors import SetupError
from swarm.manifest import Run
from swarm.model.gpt import GptStage, replace_parameters, weights_dtype
from swarm.model.graph.custom_model import model_inputs
from swarm.model.graph.full_model import FullModel
from swarm.model.same_bits import aligned, use_threads_of
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

    A custom model is evaluated as it leaves the swarm (`swarm.model.graph.full_model`), the decoder as the
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
