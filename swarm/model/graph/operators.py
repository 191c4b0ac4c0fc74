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
from swarm.model.graph.ir import DEVICE, RANDOM, Call, Ref
from swarm.model.graph.untraceable import where

DROPOUTS = {"dropout": kernels.dropout, "feature_dropout": kernels.feature_dropout}
DRAWN: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("rand", "rand_like"), ("uniform", ())),
    **dict.fromkeys(("randn", "randn_like"), ("normal", ())),
    "normal": ("normal", ("mean", "std")),
    "bernoulli": ("bernoulli", ("p",)),
    **dict.fromkeys(("randint", "randint_like"), ("integers", ("low", "high"))),
    "uniform_": ("uniform", ("from", "to")),
    "normal_": ("normal", ("mean", "std")),
    "bernoulli_": ("bernoulli", ("p",)),
    "exponential_": ("exponential", ("lambd",)),
    "dropout_": ("dropout", ("p",)),
    "feature_dropout_": ("feature_dropout", ("p",)),
}
"""Operators that draw numbers: the kind (`kernels.KINDS`), and which of their arguments it takes."""


def arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an operator by name, the left out ones with their defaults."""
    schema = op._schema.arguments
    given = {arg.name: arg.default_value for arg in schema if arg.has_default_value()}
    given.update((arg.name, value) for arg, value in zip(schema, args, strict=False))
    given.update(kwargs)
    return given


UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
"""Operators whose tensors hold what the memory did."""


def does_nothing(name: str, given: Mapping[str, Any]) -> bool:
    """Whether an operator is a dropout that is switched off, which gives its input."""
    return name in DROPOUTS and not (given["train"] and given["p"])


def ruled(
    node: fx.Node, call: Call, given: Mapping[str, Any], *, module: str, shape: Sequence[int],
    site: Callable[[], str],
) -> Call:  # fmt: skip
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
            call, function=kernels.batch_norm, args=tuple(given[key] for key in keys), kwargs={},
            outputs=(*call.outputs, *told_by(node)), several=True,
        )  # fmt: skip
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
    if (drawn := _drawn(op, given)) is not None:
        kind, others = drawn
        args = (RANDOM, list(shape), node.meta["val"].dtype, DEVICE, kind, *others)
        return replace(call, function=kernels.draw, args=args, kwargs={"site": site()})
    _refuse_random(op, given, place)
    return call


def ruled_write(node: fx.Node, call: Call, *, module: str, site: Callable[[], str]) -> tuple[str, Call]:
    """The operator that writes to a part of a tensor, and the call of `write_through` as a stage may make it.

    Raises:
        SetupError: no stage may make it.
    """
    whole, views, op, rest, named = call.args
    given = arguments(op, (whole, *rest), named)
    if (drawn := _drawn(op, given)) is not None:
        kind, others = drawn
        args = (RANDOM, whole, views, kind, *others)
        return str(op), replace(call, function=kernels.draw_through, args=args, kwargs={"site": site()})
    _refuse_random(op, given, f"{where(node)}operator {op} of {module or 'the model'}")
    return str(op), call


def _drawn(op: OpOverload, given: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]] | None:
    """The kind of the numbers that an operator draws, and what else decides them; None: it draws none, or
    such as cannot be drawn by name.
    """
    kind, names = DRAWN.get(name_of(op), ("", ()))
    if not kind or given.get("generator") is not None or not _is_random(op, name_of(op), given):
        return None
    if kind == "bernoulli":
        # `torch.bernoulli(x)` has the probabilities in x.
        p = given["p"] if "p" in given else given["input" if "input" in given else "self"]
        return kind, (p if isinstance(p, Ref) else float(p),)
    others = tuple(given.get(name, 0) for name in names)  # randint without `low`
    if any(isinstance(other, Ref) for other in others):
        return None
    if kind == "integers" and others[1] - others[0] > 1 << 32:
        return None  # a word has no more bits
    return kind, others


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
    """The number that fills a tensor which takes its form from another. What is to be written yet is filled
    too: a cut may come before it is, and then memory as it was would travel.
    """
    if name in ("zeros_like", "new_zeros") or name in UNWRITTEN:
        return 0
    if name in ("ones_like", "new_ones"):
        return 1
    if name in ("full_like", "new_full") and not isinstance(given["fill_value"], Ref):
        return given["fill_value"]
    return None


def _refuse_random(op: OpOverload, given: Mapping[str, Any], place: str) -> None:
    """Raise SetupError if the operator draws random numbers; `place` says where it is."""
    if _is_random(op, name_of(op), given):
        raise SetupError(
            f"{place} draws random numbers, and each peer would draw others; "
            "use dropout, torch.rand, randn, randint or bernoulli without a generator of their own, or make "
            "the numbers part of the input"
        )


def _is_random(op: OpOverload, name: str, given: Mapping[str, Any]) -> bool:
    if name == "scaled_dot_product_attention":
        return False  # without dropout, here
    if "dropout" in given:  # recurrent layers
        return bool(given["train"] and given["dropout"])
    switched_off = given.get("train") is False or given.get("training") is False
    return not switched_off and (torch.Tag.nondeterministic_seeded in op.tags or "generator" in given)
