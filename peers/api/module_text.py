"""A module as Python text: the operators that it was traced to, one a line.

So a model that was made in a notebook, from classes and functions that are in no file, becomes a file that
every peer can have: without its classes, and with nothing in it but torch's operators (an autograd.Function
of its own is written as one of these). What is to be
different outside of training (dropout, batch norm) still is.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from peers.events import unlogged
from swarm.model.graph.capture import Captured, Held
from swarm.model.graph.functionalize import is_check
from swarm.model.graph.functions import OPERATOR, TracedFunction, constants
from swarm.model.graph.model_source import CustomModel
from swarm.model.graph.trace import captured
from swarm.model.graph.untraceable import Untraceable

INDENT = "    "
SAID = ("self", "torch", "float")
"""What the text of a forward means something else by than an input."""


@unlogged()
def module_text(sample: CustomModel) -> tuple[list[str], dict[str, torch.Tensor]]:
    """A module traced in training, with its loss: lines with a class `Model` and a function `build`, and the
    tensors that they read, by full name. Raises SetupError: it cannot be traced, or does not take the sample;
    names the user's line."""
    sample.train()
    example = (tuple(sample.args), dict(sample.kwargs), tuple(sample.targets))
    sizes = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    before = random.getstate()
    with captured(sample.module, sample.loss, example, SAID) as found:
        if random.getstate() != before:
            raise Untraceable("it draws random numbers by Python's random, once for all: draw them by torch")
        return _Writer(found, sizes).written()


class _Writer:
    def __init__(self, captured: Captured, sizes: Sequence[torch.Tensor]) -> None:
        """`sizes`: the tensors of the sample."""
        self._captured, self._sizes, self._inputs = captured, sizes, captured.inputs.values()
        self._read: dict[str, tuple[str, torch.Tensor]] = {}
        """Full name -> (its kind, the tensor), of what the text reads."""

    def written(self) -> tuple[list[str], dict[str, torch.Tensor]]:
        module = self._captured.module
        body = [f"{', '.join(self._captured.inputs)} = {', '.join(self._inputs)}"]
        for node in module.graph.find_nodes(op="placeholder"):
            if node.users and (held := self._captured.held.get(node.name)):  # else its number is in the trace
                body.append(f"{node.name} = {self._reading(held)}")
        body += [*self._body(module), f"return {self._captured.output.name}"]
        kinds = {
            kind: tuple(name for name, (its, _) in self._read.items() if its == kind)
            for kind in ("TRAINED", "FROZEN", "BUFFERS")
        }
        zeros = [f"torch.zeros({list(leaf.shape)}, dtype={leaf.dtype})" for leaf in self._sizes]
        lines = [
            *(line for name, found in self._captured.functions.items() for line in _function(name, found)),
            "class Model(WrittenModule):",
            *(f"{INDENT}{kind} = {names!r}" for kind, names in kinds.items()),
            "",
            f"{INDENT}def forward(self, {', '.join(self._inputs)}):",
            *(f"{INDENT}{INDENT}{line}" for line in body),
            "",
            "",
            "def build():",
            f"{INDENT}return Model(__file__), ({', '.join(zeros)},)",
        ]
        return lines, {name: one.detach().clone().contiguous() for name, (_, one) in self._read.items()}

    def _reading(self, held: Held) -> str:
        is_parameter = held.kind == "parameter"
        kind = "BUFFERS" if not is_parameter else "TRAINED" if held.tensor.requires_grad else "FROZEN"
        self._read[held.name] = kind, held.tensor
        return f"self.get_{'parameter' if is_parameter else 'buffer'}({held.name!r})"

    def _body(self, module: fx.GraphModule) -> Iterator[str]:
        for node in module.graph.nodes:
            if node.op == "call_function" and not is_check(node):
                if isinstance(node.target, HigherOrderOperator):
                    yield from self._region(module, node)
                else:
                    yield f"{node.name} = {_called(node)}"

    def _region(self, module: fx.GraphModule, node: fx.Node) -> Iterator[str]:
        """The body of a region (no_grad, autocast off) under a `with`."""
        name, args = str(node.target), node.args
        if name == "wrap_with_set_grad_enabled":
            head, (inner, *given) = f"torch.set_grad_enabled({args[0]})", args[1:]
        elif name == "wrap_with_autocast":
            words = ", ".join(map(_word, args[:3]))
            head, (inner, *given) = f"torch.autocast({words}, cache_enabled={args[3]})", args[4:]
        else:
            raise Untraceable(f"it has a region of kind {name}")
        assert isinstance(inner, fx.Node)
        body = module.get_submodule(str(inner.target))
        assert isinstance(body, fx.GraphModule)
        holders = [holder.name for holder in body.graph.find_nodes(op="placeholder")]
        (output,) = body.graph.find_nodes(op="output")
        yield f"def {inner.name}({', '.join(holders)}):"
        yield f"{INDENT}with {head}:"
        for line in self._body(body):
            yield f"{INDENT}{INDENT}{line}"
        yield f"{INDENT}{INDENT}return {_word(output.args[0])}"
        yield f"{node.name} = {inner.name}({', '.join(map(_word, given))})"


def _function(name: str, found: TracedFunction) -> Iterator[str]:
    """A Function of the model's own, and two empty lines."""
    yield f"class Function{name}(torch.autograd.Function):"
    count = len(found.outputs)
    for part, graph in (("forward", found.forward), ("backward", found.backward)):
        holders = [holder.name for holder in graph.graph.find_nodes(op="placeholder")]
        (output,) = graph.graph.find_nodes(op="output")
        made = output.args[0]
        given = holders if part == "forward" else holders[-count:]
        body = []
        if part == "backward" and len(holders) > count:
            body.append(f"{', '.join(holders[:-count])}, = ctx.saved_tensors")
        for node, value in constants(graph).items():
            body.append(f"{node} = torch.tensor({_word(value.tolist())}, dtype={value.dtype})")
        body += [f"{node.name} = {_called(node)}" for node in graph.graph.nodes if node.op == "call_function"]
        if part == "forward":
            body.append(f"ctx.save_for_backward({', '.join(map(_word, made[count:]))})")
            made = made[:count]
        yield f"{INDENT}@staticmethod"
        yield f"{INDENT}def {part}({', '.join(['ctx', *given])}):"
        yield from (f"{INDENT}{INDENT}{line}" for line in (*body, f"return {_word(tuple(made))}"))
        yield ""
    yield ""


def _called(node: fx.Node) -> str:
    target = node.target
    if target is operator.getitem:
        return f"{_word(node.args[0])}[{_word(node.args[1])}]"
    if target is OPERATOR:
        name, tensors = node.args
        assert isinstance(tensors, (list, tuple))
        return f"Function{name}.apply({', '.join(map(_word, tensors))})"
    if target is getattr:
        return f"{_word(node.args[0])}.{node.args[1]}"
    if not isinstance(target, OpOverload):
        raise Untraceable(f"it calls {target}, which is no operator")
    if target.namespace not in ("aten", "prims"):
        raise Untraceable(
            f"it calls {target}, an operator of a library that peers may not have; name the code in a "
            'manifest (kind = "code"), and have it installed there'
        )
    words = [
        _in_training(argument.name, value)
        for argument, value in zip(target._schema.arguments, node.args, strict=False)
    ]
    words += [f"{name}={_in_training(name, value)}" for name, value in node.kwargs.items()]
    return f"torch.ops.{target}({', '.join(words)})"


def _in_training(name: str, value: Any) -> str:
    """An argument; one that says that this is training says so only then."""
    if name in ("train", "training") and value is True:
        return "self.training"
    if name == "dropout_p" and value:
        return f"{_word(value)} if self.training else 0.0"
    return _word(value)


def _word(part: Any) -> str:
    """A constant or a node as Python has it."""
    if isinstance(part, fx.Node):
        return part.name
    if isinstance(part, float) and not math.isfinite(part):
        return f'float("{part}")'
    if isinstance(part, (bool, int, float, str, type(None))):
        return repr(part)
    if isinstance(part, (torch.dtype, torch.memory_format, torch.layout)):
        return str(part)
    if isinstance(part, torch.device):
        return f"torch.device({str(part)!r})"
    if isinstance(part, tuple):
        return f"({''.join(f'{_word(item)}, ' for item in part)})"
    if isinstance(part, list):
        return f"[{', '.join(map(_word, part))}]"
    raise Untraceable(f"a size or a number ({part}) depends on data")
