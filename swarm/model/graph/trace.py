"""Any PyTorch model as a graph of operators: `trace`.

An operator is an ATen call as the model made it in training (FusionLLM, Tang et al., 2024, section 3). What a
stage must not do is replaced by what may be done in any order and any number of times, or refused by name.
The graph is made for the sizes of the sample.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from swarm.errors import SetupError
from swarm.model.graph import operators
from swarm.model.graph.capture import Captured, WithLoss, capture
from swarm.model.graph.functionalize import lower
from swarm.model.graph.ir import DEVICE, Call, NormStatistic, Operator, OpGraph, Ref, Value, refs
from swarm.model.graph.kernels import draw_through, write_through
from swarm.model.graph.untraceable import Untraceable, where

aten = torch.ops.aten
CONSTANT = "constant:"
"""What the names of tensors begin with that the model reads and has no name for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Traced:
    """A model's graph with how to compute it, for the sample's size of microbatch."""

    graph: OpGraph
    calls: tuple[Call, ...]
    """One for each operator of the graph."""
    parameters: Mapping[str, nn.Parameter]
    """The model's own, by full name, with the values it has. Those not in the graph never change."""
    buffers: Mapping[str, torch.Tensor]
    """Buffers, frozen parameters and constants that the graph reads."""
    statistics: Mapping[int, tuple[NormStatistic, ...]]
    """Operator (a batch norm's) -> what it tells."""


def trace(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
    loss: Callable[..., torch.Tensor] | None = None, loss_args: Sequence[Any] = (),
) -> Traced:  # fmt: skip
    """Trace `model(*args, **kwargs)` in the mode (training or not) and dtype it is in.

    The loss is what the model returns (a scalar, `.loss`, or the first of a tuple), or
    `loss(output, *loss_args)`, traced with it; weights that `loss` has of its own are called `loss.…`, and
    trained. The tensors in `args`, `kwargs` and `loss_args` are the
    graph's inputs, called as in the model's `forward`, those in `loss_args` `target` (or `target_0`, ...).

    Raises:
        SetupError: the model cannot be traced, or does what a stage may not do; the text names the operator
            or the line, and what to change.
    """
    with captured(model, loss, (tuple(args), dict(kwargs or {}), tuple(loss_args))) as found:
        return Builder(found).build(*lower(found))


@contextlib.contextmanager
def captured(
    model: nn.Module, loss: Callable[..., torch.Tensor] | None, example: tuple[Any, Any, Any],
    taken: Collection[str] = (),
) -> Iterator[Captured]:  # fmt: skip
    """A model with its loss, captured with a sample: arguments, those by name, those of the loss. No input is
    called as one `taken`. Raises SetupError: it cannot be captured; or the block says so (`Untraceable`)."""
    whole = WithLoss(model, loss)
    check_traceable(whole)
    names = input_names(model, example, {*taken, *whole.weights(), *whole.tensors()})
    try:
        yield capture(whole, example, names)
    except Untraceable as error:
        name = type(model).__name__
        raise SetupError(f"{name} cannot be traced as one graph of operators: {error}") from error


def check_traceable(whole: WithLoss) -> None:
    """Raises SetupError: a part of the model can be in no graph."""
    places: dict[int, tuple[str, torch.Tensor]] = {}
    for path, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        name = path.removeprefix("model.")
        if nn.parameter.is_lazy(tensor):
            raise SetupError(f"{name} has no shape yet: compute one sample with the model before")
        if tensor.layout != torch.strided:
            raise SetupError(f"{name} is sparse, which cannot be traced: hold it .to_dense()")
        other, first = places.setdefault(tensor.data_ptr(), (name, tensor))
        if other != name and tensor.data_ptr() and (tensor.requires_grad or first.requires_grad):
            raise SetupError(
                f"{name} lies in the memory of {other}, and would be trained apart from it here: to tie "
                "weights have one nn.Parameter under both names; for a copy .clone() it"
            )
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


def input_names(model: nn.Module, example: tuple[Any, Any, Any], taken: set[str]) -> list[str]:
    """A name for every tensor in the sample, in the order of its leaves; none is `taken` by another tensor,
    such as a weight that is called as an argument of `forward`."""
    args, kwargs, loss_args = example
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        hint = (
            "" if loss_args else ". If it does not give its loss itself, give a loss, which takes the target"
        )
        raise SetupError(f"the sample does not fit {type(model).__name__}.forward: {error}{hint}") from error
    heads = [name for name in bound if name not in kwargs]
    heads += heads[-1:] * (len(args) - len(heads))
    parts = (*zip(heads, args, strict=False), *kwargs.items(), *(("target", arg) for arg in loss_args))
    found = [head for head, part in parts for one in pytree.tree_leaves(part) if torch.is_tensor(one)]
    count, numbers = Counter(found), defaultdict[str, Iterator[int]](itertools.count)
    names = [name if count[name] == 1 else f"{name}_{next(numbers[name])}" for name in found]
    for i in range(len(names)):
        while names[i] in taken.union(names[:i]):
            names[i] += "_"
    return names


# --- calls and their graph ----------------------------------------------------------------------------------


class Builder:
    """Builder of calls and their graph from a functional fx graph."""

    def __init__(self, captured: Captured) -> None:
        self._held, self._inputs = captured.held, captured.inputs
        self._env: dict[fx.Node, Any] = {}
        self._values: dict[str, Value] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._trained: set[str] = set()
        self._calls: dict[str, tuple[fx.Node, str, str, Call]] = {}
        """Node's name -> (node, target, module, call)."""
        self._sites: Counter[str] = Counter()
        self._told: dict[str, list[tuple[str, str, float]]] = {}
        """Node's name -> [(buffer, output, momentum)]."""
        self._all, self._names = captured.whole.weights(), captured.whole.first_names()
        self._taken = {*self._inputs.values(), *self._all, *captured.whole.tensors()}
        """Names that no operator's output may have."""

    def build(self, lowered: fx.Graph, loss_node: fx.Node) -> Traced:
        """
        Raises:
            SetupError: the model does what no stage may do.
            Untraceable: a size depends on data.
        """
        for node in lowered.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            else:
                self._call(node)
        loss = self._values[self._env[loss_node].name]
        if not loss.differentiable:
            raise SetupError("the loss depends on no parameter that is trained")
        graph = self._graph(self._needed(loss.name), loss.name)
        return Traced(
            graph=graph,
            calls=tuple(self._calls[op.name][3] for op in graph.operators),
            parameters={name: self._all[name] for name in self._names.values()},
            buffers={name: self._buffers[name] for name in graph.buffers},
            statistics=self._statistics(graph),
        )

    # --- nodes ------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        if node.name in self._inputs:
            name, differentiable = self._inputs[node.name], False
        elif node.name in self._held:
            kind, name, tensor = self._held[node.name]
            name = f"{CONSTANT}{name}" if kind == "tensor" else name
            differentiable = kind == "parameter" and tensor.requires_grad
            if differentiable and tensor.is_complex():
                raise SetupError(f"{name} is complex: train its parts as floats, see torch.view_as_complex")
            if differentiable:
                self._trained.add(name)
            else:
                self._buffers[name] = tensor.detach()
        else:
            return  # a number of the sample: it is in the trace
        if name not in self._values:
            self._values[name] = _value(name, node.meta["val"], node, differentiable)
        self._env[node] = Ref(name)

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            self._env[node] = _number(value, node)
            return
        if node.target is operator.getitem:
            self._env[node] = self._env[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        args, kwargs = self._filled(node.args), dict(self._filled(node.kwargs))
        several = isinstance(value, (list, tuple))
        results: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        ends = [f".{i}" if several else "" for i in range(len(results))]
        stem = node.name
        while not self._taken.isdisjoint([stem, *(outputs := tuple(stem + end for end in ends))]):
            stem += "_"
        self._taken.update(outputs)
        plain, function = node.meta.get("plain", False), cast(Callable[..., Any], node.target)
        call = Call(
            function=function, args=args, kwargs=kwargs, outputs=outputs, several=several, plain=plain
        )
        module, target = self._module(node), getattr(node.target, "__name__", "")
        if isinstance(node.target, OpOverload):
            target = str(node.target)
            name, given = operators.name_of(node.target), operators.arguments(node.target, args, kwargs)
            if operators.does_nothing(name, given):
                self._env[node] = given["input"]
                return
            if operators.is_batch_norm(name, given):
                told = zip(("running_mean", "running_var"), operators.told_by(node), strict=True)
                self._told[node.name] = [(given[key].name, out, given["momentum"]) for key, out in told]
            call = operators.ruled(
                node, call, given, module=module, shape=() if several else _shape(results[0], node),
                site=lambda: self._site(module),
            )  # fmt: skip
        elif node.target is write_through:
            # It is named by what writes.
            target, call = operators.ruled_write(node, call, module=module, site=lambda: self._site(module))
        read = [self._values[ref.name] for ref in refs((call.args, call.kwargs)) if ref.name in self._values]
        depends = any(value.differentiable for value in read) and node.target is not aten.detach.default
        for name, result in zip(outputs, results, strict=True):
            if isinstance(result, torch.Tensor):
                floating = result.is_floating_point() or result.is_complex()
                self._values[name] = _value(name, result, node, depends and floating)
        self._calls[node.name] = (node, target, module, call)
        self._env[node] = tuple(Ref(name) for name in outputs) if several else Ref(outputs[0])

    def _filled(self, arg: Any) -> Any:
        """Arguments with `Ref`s and numbers in place of nodes, and `DEVICE` in place of the trace's."""

        def fill(part: Any) -> Any:
            if isinstance(part, torch.device):
                return DEVICE
            return self._env[part] if isinstance(part, fx.Node) else part

        return map_aggregate(arg, fill)

    def _module(self, node: fx.Node) -> str:
        """Full name of the module that a node belongs to."""
        stack = node.meta.get("nn_module_stack") or {}
        path = f".{[*stack.values()][-1][0]}." if stack else ""
        _, found, inside = path.partition(".model.")
        if not found and ".loss." in path:
            inside = "loss." + path.partition(".loss.")[2]
        return inside.strip(".")

    def _site(self, module: str) -> str:
        """The name of a dropout: its module's, with a number if it has several. No cut changes it."""
        number = self._sites[module]
        self._sites[module] += 1
        return f"{module}#{number}" if number else module

    # --- the graph --------------------------------------------------------------------------------------

    def _needed(self, loss: str) -> list[str]:
        """Names of the nodes that the loss depends on, in order."""
        wanted, kept = {loss}, []
        for name in reversed(self._calls):
            call = self._calls[name][3]
            if wanted.intersection(call.outputs):
                kept.append(name)
                wanted.update(ref.name for ref in refs((call.args, call.kwargs)))
        return kept[::-1]

    def _graph(self, kept: Sequence[str], loss: str) -> OpGraph:
        operators: list[Operator] = []
        cheap: set[str] = set()
        constant = {name for name in self._buffers if name not in self._names.values()}
        inputs = tuple(self._inputs.values())
        told = {buffer for name in kept for buffer, _, _ in self._told.get(name, ())}
        for index, name in enumerate(kept):
            node, target, module, call = self._calls[name]
            read = (ref.name for ref in refs((call.args, call.kwargs)) if ref.name in self._values)
            reads = list(dict.fromkeys(read))
            if name not in self._told and (others := told.intersection(reads)):
                raise SetupError(
                    f"{where(node)}operator {target} reads {min(others)}, which a batch norm in training "
                    "changes with each step, and would read what it was at the start: compute it anew"
                )
            free = name not in self._told and all(read in cheap or read in constant for read in reads)
            outputs = tuple(output for output in call.outputs if output in self._values)
            cheap.update(outputs if free else ())
            changed = outputs[:1] if call.function in (write_through, draw_through) else ()
            if node.meta.get("hidden"):  # what the whole is then only looks like a new value
                changed = (self._env[node.all_input_nodes[0]].name,)
            if node.meta.get("no_grad") and any(self._values[name].differentiable for name in changed):
                raise SetupError(
                    f"{where(node)}operator {target} writes to a tensor that needs a gradient, under "
                    "no_grad: make a new tensor instead"
                )
            operators.append(
                Operator(
                    index=index,
                    name=name,
                    target=target,
                    module=module,
                    inputs=tuple(n for n in reads if n not in self._trained and n not in self._buffers),
                    parameters=tuple(n for n in reads if n in self._trained),
                    buffers=tuple(n for n in reads if n in self._buffers),
                    outputs=outputs,
                    cheap=free,
                )
            )
        used = {n for op in operators for n in (*op.inputs, *op.parameters, *op.buffers, *op.outputs)}
        parameters = tuple(name for name in self._names.values() if name in used and name in self._trained)
        groups: dict[str, list[str]] = {}
        for name, tensor in self._all.items():
            groups.setdefault(self._names[id(tensor)], []).append(name)
        return OpGraph(
            operators=tuple(operators),
            values={n: v for n, v in self._values.items() if n in used or n in inputs}, inputs=inputs,
            loss=loss, parameters=parameters, buffers=tuple(name for name in self._buffers if name in used),
            tied=tuple(tuple(groups[name]) for name in parameters if len(groups[name]) > 1),
        )  # fmt: skip

    def _statistics(self, graph: OpGraph) -> dict[int, tuple[NormStatistic, ...]]:
        told = {op.index: self._told[op.name] for op in graph.operators if op.name in self._told}
        calls = Counter(buffer for found in told.values() for buffer, _, _ in found)
        return {
            index: tuple(
                NormStatistic(buffer=buffer, value=value, weight=1.0 / calls[buffer], momentum=momentum)
                for buffer, value, momentum in found
            )
            for index, found in told.items()
        }


def _value(name: str, tensor: torch.Tensor, node: fx.Node, differentiable: bool) -> Value:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Value(name=name, shape=_shape(tensor, node), dtype=dtype, differentiable=differentiable)


def _shape(value: torch.Tensor, node: fx.Node) -> tuple[int, ...]:
    return tuple(_number(size, node) for size in value.shape)


def _number(value: Any, node: fx.Node) -> Any:
    """A number that tracing knows."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Untraceable(
            f"{where(node)}operator {node.target} makes a size or number ({value}) that depends on data; use "
            "torch.where or a mask, so that sizes never change"
        )
    return value
