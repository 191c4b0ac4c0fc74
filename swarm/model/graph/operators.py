"""Operators that a stage computes in another way than the model wrote them, and those that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from swarm.errors import SetupError
from swarm.model.graph import kernels
from swarm.model.graph.calls import DEVICE, RANDOM, Call, Ref
from swarm.model.graph.functionalize import where

DROPOUTS = {"dropout": kernels.dropout, "feature_dropout": kernels.feature_dropout}


def arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an operator by name, the left out ones with their defaults."""
    schema = op._schema.arguments
    given = {arg.name: arg.default_value for arg in schema if arg.has_default_value()}
    given.update((arg.name, value) for arg, value in zip(schema, args, strict=False))
    given.update(kwargs)
    return given


def does_nothing(name: str, given: Mapping[str, Any]) -> bool:
    """Whether an operator is a dropout that is switched off, which gives its input."""
    return name in DROPOUTS and not (given["train"] and given["p"])


def ruled(
    node: fx.Node,
    call: Call,
    given: Mapping[str, Any],
    *,
    module: str,
    shape: Sequence[int],
    site: Callable[[], str],
) -> Call:
    """The call as a stage may make it. `site()` names a place of dropout.

    Raises:
        SetupError: no stage may make it.
    """
    op = node.target
    assert isinstance(op, OpOverload)
    name = name_of(op)
    if name in DROPOUTS:
        args = (RANDOM, given["input"], given["p"])
        return replace(call, function=DROPOUTS[name], args=args, kwargs={"site": site()})
    if name == "scaled_dot_product_attention" and given["dropout_p"]:
        keys = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        extra = {"scale": given["scale"], "enable_gqa": given["enable_gqa"], "site": site()}
        args = (RANDOM, *(given[key] for key in keys))
        return replace(call, function=kernels.attention, args=args, kwargs=extra)
    if is_batch_norm(name, given):
        keys = ("input", "weight", "bias", "running_mean", "running_var", "eps", "cudnn_enabled")
        return replace(
            call,
            function=kernels.batch_norm,
            args=tuple(given[key] for key in keys),
            kwargs={},
            outputs=(*call.outputs, *told_by(node)),
            several=True,
        )
    if (constant := _constant(name, given)) is not None:
        # What takes only its form from another tensor needs no tensor.
        extra = {"dtype": node.meta["val"].dtype, "device": DEVICE}
        full = torch.ops.aten.full.default
        return replace(call, function=full, args=(list(shape), constant), kwargs=extra)
    place = f"{where(node)}operator {op} of {module or 'the model'}"
    if name == "instance_norm" and given["use_input_stats"] and given["running_mean"] is not None:
        raise SetupError(
            f"{place} changes running statistics; use track_running_stats=False (only batch norm's are kept)"
        )
    if given.get("sparse"):
        raise SetupError(f"{place} gives sparse gradients, which are not added up here; use sparse=False")
    if name == "as_strided":
        raise SetupError(f"{place} depends on how memory is laid out; use views, slices or torch.gather")
    refuse_random(op, given, place)
    return call


def is_batch_norm(name: str, given: Mapping[str, Any]) -> bool:
    """A batch norm in training that keeps running statistics."""
    return name == "batch_norm" and given["training"] and given["running_mean"] is not None


def told_by(node: fx.Node) -> tuple[str, str]:
    """The outputs of a batch norm that hold mean and variance."""
    return f"{node.name}:mean", f"{node.name}:var"


def name_of(op: OpOverload) -> str:
    """The name of an operator without namespace and overload."""
    return op._schema.name.partition("::")[2]


def _constant(name: str, given: Mapping[str, Any]) -> float | None:
    """The number that fills a tensor which takes its form from another."""
    if name in ("zeros_like", "new_zeros"):
        return 0
    if name in ("ones_like", "new_ones"):
        return 1
    if name in ("full_like", "new_full") and not isinstance(given["fill_value"], Ref):
        return given["fill_value"]
    return None


def refuse_random(op: OpOverload, given: Mapping[str, Any], place: str) -> None:
    """Raise SetupError if the operator draws random numbers; `place` says where it is."""
    if _is_random(op, name_of(op), given):
        raise SetupError(
            f"{place} draws random numbers, and each peer would draw others; "
            "use dropout, or make the numbers part of the input"
        )


def _is_random(op: OpOverload, name: str, given: Mapping[str, Any]) -> bool:
    if name == "scaled_dot_product_attention":
        return False  # without dropout, here
    if "dropout" in given:  # recurrent layers
        return bool(given["train"] and given["dropout"])
    switched_off = given.get("train") is False or given.get("training") is False
    return not switched_off and (torch.Tag.nondeterministic_seeded in op.tags or "generator" in given)
