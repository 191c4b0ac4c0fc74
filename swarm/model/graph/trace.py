"""Any PyTorch model as a graph of operators: `trace`.

An operator is an ATen call as the model made it in training (FusionLLM, Tang et al., 2024, section 3). What a
stage must not do is replaced by what may be done in any order and any number of times, or refused by name.
The graph is made for the sizes of the sample.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from swarm.errors import SetupError
from swarm.model.graph.builder import Builder, Traced
from swarm.model.graph.capture import WithLoss, capture
from swarm.model.graph.functionalize import lower
from swarm.model.graph.untraceable import Untraceable


def trace(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    loss_args: Sequence[Any] = (),
) -> Traced:
    """Trace `model(*args, **kwargs)` in the mode (training or not) and dtype it is in.

    The loss is what the model returns (a scalar, `.loss`, or the first of a tuple), or
    `loss(output, *loss_args)`, traced with it; weights that `loss` has of its own are called `loss.…`, and
    trained. The tensors in `args`, `kwargs` and `loss_args` are the
    graph's inputs, called as in the model's `forward`, those in `loss_args` `target` (or `target_0`, ...).

    Raises:
        SetupError: the model cannot be traced, or does what a stage may not do; the text names the operator
            or the line, and what to change.
    """
    whole = WithLoss(model, loss)
    check_traceable(whole)
    example = (tuple(args), dict(kwargs or {}), tuple(loss_args))
    names = input_names(model, example)
    tensors = [isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(example)]
    try:
        captured = capture(whole, example)
        graph, end = lower(captured)
        inputs = dict(zip(itertools.compress(captured.inputs, tensors), names, strict=True))
        return Builder(whole, captured, inputs).build(graph, end)
    except Untraceable as error:
        name = type(model).__name__
        raise SetupError(f"{name} cannot be traced as one graph of operators: {error}") from error


def check_traceable(whole: WithLoss) -> None:
    """Raises SetupError: a part of the model can be in no graph."""
    for path, module in whole.named_modules():
        name = path.removeprefix("model.")
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if norm and module.training and module.momentum is None:
            raise SetupError(
                f"batch norm {name} has momentum None, the mean of all that it ever saw; give it a number"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise SetupError(
                f"{name} is compiled by torch.jit, which cannot be traced: take the module itself"
            )
    for name, parameter in whole.weights().items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise SetupError(
                f"weights {name} have a hook on their gradient, which no stage would call: take it away, and "
                "write what it does into the model or its loss"
            )


def input_names(model: nn.Module, example: tuple[Any, Any, Any]) -> list[str]:
    """A name for every tensor in the sample, in the order of its leaves."""
    args, kwargs, loss_args = example
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        hint = (
            "" if loss_args else ". If it does not give its loss itself, give a loss, which takes the target"
        )
        raise SetupError(f"the sample does not fit {type(model).__name__}.forward: {error}{hint}") from error
    by_place = [name for name in bound if name not in kwargs]
    heads = {i: by_place[min(i, len(by_place) - 1)] for i in range(len(args))}
    found: list[str] = []
    parts = [(heads[i], arg) for i, arg in enumerate(args)] + list(kwargs.items())
    for head, part in (*parts, *(("target", arg) for arg in loss_args)):
        found.extend(head for leaf in pytree.tree_leaves(part) if isinstance(leaf, torch.Tensor))
    count, numbers = Counter(found), defaultdict[str, Iterator[int]](itertools.count)
    return [name if count[name] == 1 else f"{name}_{next(numbers[name])}" for name in found]
