"""A module as an fx graph of ATen calls: by torch.export without strict mode.

It sees tensors without numbers, so that it cannot follow one branch of a decision that depends on data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from swarm.errors import SetupError
from swarm.model.graph.functions import Functions, TracedFunction
from swarm.model.graph.untraceable import Untraceable, reason
from swarm.model.same_bits import storage_of


class Held(NamedTuple):
    """A tensor that the model has."""

    kind: Literal["parameter", "buffer", "tensor"]
    """The last: one without a name, which is called as its placeholder."""
    name: str
    """Full; of a tied parameter the first."""
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The result of tracing."""

    whole: WithLoss
    module: torch.fx.GraphModule
    held: Mapping[str, Held]
    """By the names of their placeholders."""
    functions: Mapping[str, TracedFunction]
    """By the first argument of a `functions.OPERATOR`."""
    inputs: Mapping[str, str]
    """Placeholder -> the name of a tensor of the sample; its numbers are in the trace."""
    output: torch.fx.Node
    """The loss."""


class WithLoss(nn.Module):
    """Calls a model and gives its scalar loss: what the model returns, or `loss(output, *loss_args)`.

    A loss that is a module may have weights of its own: their names begin with `loss.`, those of the model's
    are as the model has them.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor] | None) -> None:
        """Raises SetupError: both have weights called `loss.…`."""
        super().__init__()
        self.model, self.loss = model, loss
        self.changed: set[tuple[nn.Module, str]] = set()
        """Buffers that were given other values while it was computed, which a trace silently loses."""
        there = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if name.startswith("loss.") and there.get(name, tensor) is not tensor:
                raise SetupError(
                    f"the model has a {name}, and so has its loss, which is called `loss` here: rename that "
                    "part of the model"
                )

    def forward(self, args: Any, kwargs: Any, loss_args: Any) -> torch.Tensor:
        held = [(part, name, one) for part in self.modules() for name, one in part._buffers.items()]
        with _NoOtherWeights():
            out = self.model(*args, **kwargs)
            loss = find_loss(out if self.loss is None else self.loss(out, *loss_args))
        for part, name, old in held:
            new = part._buffers.get(name)
            if old is None or (new is not None and new.dtype != old.dtype):
                continue  # there was none, or it is cast
            if new is None or storage_of(new) != storage_of(old):
                self.changed.add((part, name))
        return loss

    def weights(self) -> dict[str, nn.Parameter]:
        """All parameters by full name, a tied one under each of its names."""
        named = self.named_parameters(remove_duplicate=False)
        return {name.removeprefix("model."): parameter for name, parameter in named}

    def first_names(self) -> dict[int, str]:
        """By the identity of a parameter the first of its names."""
        return {id(one): name.removeprefix("model.") for name, one in self.named_parameters()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All buffers, likewise."""
        named = self.named_buffers(remove_duplicate=False)
        return {name.removeprefix("model."): tensor for name, tensor in named}


def find_loss(out: Any) -> torch.Tensor:
    """The scalar loss in what a model returns: itself, its `loss`, or the first of a tuple.

    Raises:
        SetupError: there is none.
    """
    if isinstance(out, Mapping):
        out = out.get("loss")
    elif not isinstance(out, torch.Tensor):
        out = getattr(out, "loss", out[0] if isinstance(out, (tuple, list)) and out else None)
    if isinstance(out, torch.Tensor) and out.ndim == 0 and out.is_floating_point():
        return out
    found = (
        f"a {out.dtype} of {out.ndim} dimensions" if isinstance(out, torch.Tensor) else "nothing of the kind"
    )
    raise SetupError(
        f"the model, or the loss that is given, has to return a scalar loss (itself, as `.loss`, or first in "
        f"a tuple), not {found}; change that, or give a loss function apart"
    )


def capture(model: WithLoss, example: tuple[Any, Any, Any], names: Sequence[str]) -> Captured:
    """`names`: of the tensors in the sample, in the order of its leaves.

    Raises:
        Untraceable: says why.
        SetupError: the model does what no tracing keeps.
    """
    # One tensor that is given twice would be one input to the tracer.
    example = pytree.tree_map_only(torch.Tensor, torch.clone, example)
    functions, before = Functions(), str(np.random.get_state())
    try:
        with warnings.catch_warnings(), functions.traced():
            warnings.simplefilter("ignore")  # about torch's own code
            program = torch.export.export(model, example, strict=False)
    except (SetupError, Untraceable):
        raise
    except Exception as error:  # a tracer raises anything, and so does a model
        raise Untraceable(reason(error)) from error
    if before != str(np.random.get_state()):
        raise Untraceable(
            "it draws random numbers by numpy, and each microbatch would have the same: draw them by "
            "torch, or do without (apply_spec_augment = false in a config for speech)"
        )
    signature = program.graph_signature
    if strange := sorted((*signature.lifted_custom_objs, *signature.input_tokens)):
        raise Untraceable(f"it reads {strange[0]}, which is no tensor")
    (output,) = program.graph_module.graph.find_nodes(op="output")
    weights, buffers, first = model.weights(), model.tensors(), model.first_names()
    held = dict[str, Held]()
    for holder, name in signature.inputs_to_parameters.items():
        parameter = weights[name.removeprefix("model.")]
        held[holder] = Held("parameter", first[id(parameter)], parameter)
    read = {node.name for node in program.graph_module.graph.find_nodes(op="placeholder") if node.users}
    for holder, name in signature.inputs_to_buffers.items():
        of, _, leaf = name.rpartition(".")
        if ((owner := model.get_submodule(of)), leaf) in model.changed and holder in read:
            raise SetupError(
                f"a {type(owner).__name__} gives its buffer {leaf} another value while it computes, and "
                "reads what it was, which would depend on which peer computed what: only the statistics of "
                "batch norm may change"
            )
        held[holder] = Held("buffer", own := name.removeprefix("model."), buffers[own])
    for holder, name in signature.inputs_to_lifted_tensor_constants.items():
        held[holder] = Held("tensor", holder, cast(torch.Tensor, program.constants[name]))
    tensors = [isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(example)]
    return Captured(
        whole=model, module=program.graph_module, held=held, functions=functions.found,
        inputs=dict(zip(compress(map(str, signature.user_inputs), tensors), names, strict=True)),
        output=output.args[0][-1],
    )  # fmt: skip


_BASE: Any = vars(torch._C.TensorBase)
_SWITCHES = (torch.Tensor.requires_grad_, _BASE["requires_grad"].__set__)
_LOST: Any = {
    torch.Tensor.register_hook: "hangs a hook on the gradient of a tensor (register_hook), which cannot be "
    "traced; write what it does with torch's own operators",
    _BASE["grad_fn"].__get__: "reads the grad_fn of a tensor, as a module's backward hook does: a hook there "
    "would be lost; write what it does with torch's own operators",
    _BASE["data"].__set__: "sets the .data of a tensor, which no trace keeps: make a new tensor",
}


class _NoOtherWeights(TorchFunctionMode):
    """Refuse what a trace silently loses, and weights that are part of no module: a trace takes them for
    constants, so none would be trained.

    Weights of modules have no numbers while they are traced. Reading a shape, or giving up the gradient, is
    allowed for any.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():
            raise SetupError("the model computes under inference_mode, which no trace keeps: take no_grad")
        if func in _LOST:
            raise SetupError(f"the model {_LOST[func]}")
        if func in _SWITCHES and isinstance(args[0], nn.Parameter):
            wanted = [*args[1:], *(kwargs or {}).values(), True][0]
            if wanted != args[0].requires_grad:
                raise SetupError(
                    f"the model switches requires_grad of a weight {list(args[0].shape)} while it computes, "
                    "which no trace keeps: read its .detach() where it is to get no gradient"
                )
        harmless = getattr(func, "__name__", "") in ("__get__", "detach") or not torch.is_grad_enabled()
        for tensor in () if harmless else pytree.tree_leaves((args, kwargs)):
            weights = isinstance(tensor, torch.Tensor) and tensor.requires_grad
            if weights and not isinstance(tensor, FakeTensor):
                raise SetupError(
                    f"the model or its loss reads a tensor {list(tensor.shape)} that needs a gradient and is "
                    "no parameter of either, so it would not be trained: hold tensors as nn.Parameter, and "
                    "several modules in nn.ModuleList; return what a loss reads of the model from the model"
                )
        return func(*args, **(kwargs or {}))
