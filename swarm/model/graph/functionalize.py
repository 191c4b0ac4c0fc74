"""A captured graph made flat and functional: no regions, no operator that writes to what another one reads.

A stage can then compute any part of it: a value is the same for every reader, at any time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg

from swarm.errors import SetupError
from swarm.model.graph.capture import Captured
from swarm.model.graph.functions import OPERATOR
from swarm.model.graph.kernels import write_through
from swarm.model.graph.operators import name_of
from swarm.model.graph.untraceable import Untraceable, where
from swarm.model.same_bits import storage_of

aten = torch.ops.aten

CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
"""How operators begin that only check what tracing assumed."""

OUT_OF_PLACE = frozenset(
    (
        *("add", "sub", "mul", "div", "pow", "neg", "exp", "sqrt", "clamp", "clamp_min", "clamp_max"),
        *("relu", "relu6", "silu", "elu", "leaky_relu", "hardtanh", "hardswish", "sigmoid", "tanh"),
        *("masked_fill", "detach", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
    )
)
"""Operators whose version with `_` does the same in place. Others write to a copy."""
TURNED = frozenset(("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"))
"""Operators that write nothing: their tensor is another view of its memory from then on."""


def lower(captured: Captured) -> tuple[fx.Graph, fx.Node]:
    """(flat functional graph, its loss).

    Raises:
        Untraceable: something in the graph is not understood.
        SetupError: the model does what no stage may do.
    """
    flat = _Flat(captured)
    functional = _Functional(captured)
    return functional.graph, functional.run(flat.graph, flat.loss)


class _Flat:
    """Copies a graph with the bodies of its regions (no_grad, autocast off) in place of the regions."""

    def __init__(self, captured: Captured) -> None:
        self.graph = fx.Graph()
        self._grad, self._plain, self._functions = True, False, captured.functions
        holders = captured.module.graph.find_nodes(op="placeholder")
        env: dict[fx.Node, Any] = {holder: self.graph.node_copy(holder) for holder in holders}
        self._copy(captured.module, env)
        self.loss: fx.Node = env[captured.output]

    def _copy(self, module: fx.GraphModule, env: dict[fx.Node, Any]) -> Any:
        """Copy the body; what it returns, as nodes of the new graph."""
        for node in module.graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], lambda n: env[n])
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":  # the body of a region
                env[node] = module.get_submodule(str(node.target))
            elif node.op != "call_function":
                raise Untraceable(f"{where(node)}it calls {_called(node)}, which is no operator")
            elif isinstance(node.target, HigherOrderOperator):
                env[node] = self._region(node, env)
            elif node.target is operator.getitem and isinstance(env[node.args[0]], tuple):
                env[node] = env[node.args[0]][node.args[1]]
            elif not is_check(node):
                env[node] = self._operator(node, env)
        raise AssertionError("a graph without an output")

    def _operator(self, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        symbolic = isinstance(
            node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
        )
        if not (isinstance(node.target, OpOverload) or node.target is operator.getitem or symbolic):
            raise Untraceable(f"{where(node)}it calls {_called(node)}, which is no operator")
        if node.target is OPERATOR:
            function = self._functions[str(node.args[0])]
            given: Any = map_arg(node.args[1], lambda n: env[n])
            copy = self.graph.create_node("call_function", function.compute(), tuple(given), name=node.name)
            copy.meta = {**node.meta, "shares": function.shares}
        else:
            copy = self.graph.node_copy(node, lambda n: env[n])
        copy.meta["plain"], copy.meta["no_grad"] = self._plain, not self._grad
        return copy

    def _region(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        name, args = str(node.target), node.args
        before = self._grad, self._plain
        if name == "wrap_with_set_grad_enabled":
            if args[0] and not self._grad:
                raise Untraceable(f"{where(node)}gradients are switched on inside of no_grad")
            self._grad = bool(args[0])
            body, operands = args[1], args[2:]
        elif name == "wrap_with_autocast":
            if args[2]:
                raise SetupError(
                    "the model switches autocast on; leave that to the run's dtype (bfloat16 is autocast)"
                )
            self._plain = True
            body, operands = args[4], args[5:]
        else:
            raise Untraceable(f"{where(node)}it has a region of kind {name}")
        assert isinstance(body, fx.Node)
        inner = env[body]
        holders = inner.graph.find_nodes(op="placeholder")
        given = map_arg(tuple(operands), lambda n: env[n])
        result = self._copy(inner, dict(zip(holders, given, strict=True)))
        left_no_grad = not self._grad and before[0]
        self._grad, self._plain = before
        if left_no_grad:
            result = map_arg(result, self._detach)
        return tuple(result) if isinstance(result, (list, tuple)) else (result,)

    def _detach(self, node: fx.Node) -> fx.Node:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return node
        detached = self.graph.call_function(aten.detach.default, (node,))
        detached.meta = {**node.meta, "val": value.detach()}
        return detached


class _Functional:
    """A copy of a flat graph in which writes in place make new values, and later readers read these.

    Which tensors share memory is what tracing saw. A view that is read after a write is taken anew from the
    new whole; a write through a view is a write to a copy of the whole (`write_through`).
    """

    def __init__(self, captured: Captured) -> None:
        self.graph = fx.Graph()
        self._held = captured.held
        self._env: dict[fx.Node, fx.Node] = {}
        self._source: dict[fx.Node, fx.Node] = {}
        """View -> what it is a view of."""
        self._same: set[fx.Node] = set()
        """Results of writes: another name of what was written to."""
        self._written: dict[int, list[fx.Node]] = {}
        """Storage -> the whole tensor after each write."""
        self._taken: dict[tuple[fx.Node, int], fx.Node] = {}
        """(view, number of writes) -> the view taken anew."""

        self._handed_on: set[int | None] = set()
        """Storages of what an autograd.Function was given or gave that may be one in torch."""

    def run(self, flat: fx.Graph, loss: fx.Node) -> fx.Node:
        """Copy all; the loss in the new graph."""
        for node in flat.nodes:
            if isinstance(node.target, OpOverload) and (name := name_of(node.target)) in TURNED:
                overload = "int" if name == "transpose_" else node.target._overloadname
                node.target = getattr(getattr(aten, name[:-1]), overload)
                node.meta["hidden"] = node.meta["no_grad"] and not node.all_input_nodes[0].meta.get("no_grad")
            if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
                self._write(node)
                continue
            if node.target is aten.lift_fresh_copy.default:
                # The copy of a constant that the code makes each time: nothing else reads the constant.
                self._source[node] = node.all_input_nodes[0]
                self._env[node] = self._env[self._source[node]]
                self._same.add(node)
                continue
            if node.meta.get("shares"):
                self._handed_on.update(map(_storage, node.all_input_nodes))
                self._handed_on.update(map(_storage, node.users))
            if (source := self._viewed(node)) is not None:
                self._source[node] = source
            self._env[node] = self.graph.node_copy(node, self._read)
        return self._read(loss)

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """What it shares memory with, if it is a view."""
        if node.op != "call_function" or (mine := _storage(node)) is None:
            return None
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            return source if source in self._source else None
        return next((arg for arg in node.all_input_nodes if _storage(arg) == mine), None)

    def _read(self, node: fx.Node) -> fx.Node:
        storage = _storage(node)
        if storage not in self._written:
            return self._env[node]
        if node not in self._source:
            return self._written[storage][-1]
        if node in self._same:
            return self._read(self._source[node])
        key = (node, len(self._written[storage]))
        if key not in self._taken:
            self._taken[key] = self.graph.node_copy(node, self._read)
        return self._taken[key]

    def _write(self, node: fx.Node) -> None:
        op = node.target
        assert isinstance(op, OpOverload)
        written = [arg.name for arg in op._schema.arguments if arg.alias_info and arg.alias_info.is_write]
        first = written == [op._schema.arguments[0].name]
        target = node.args[0] if first and node.args else node.kwargs.get("out")
        elsewhere = f"{where(node)}operator {op} writes to an argument: take what it returns, without out="
        if not isinstance(target, fx.Node):
            raise Untraceable(elsewhere)
        chain = list(self._chain(target))
        base = self._source[chain[0]] if chain else target
        while base in self._same:
            base = self._source[base]
        fresh = all(user.target is aten.lift_fresh_copy.default for user in base.users)
        if base.op == "placeholder" and base.name in self._held and not fresh:
            kind, name, _ = self._held[base.name]
            if name.rpartition(".")[2] == "num_batches_tracked":
                self._env[node] = self._env[base]
                return  # counted by steps, not by microbatches
            raise SetupError(
                f"{where(node)}operator {op} changes the {kind} {name} while the model computes; what it is "
                "would depend on which peer computed what: only the statistics of batch norm may change"
            )
        if not first:
            raise Untraceable(elsewhere)
        if _storage(base) in self._handed_on:
            raise SetupError(
                f"{where(node)}operator {op} writes to a tensor that an autograd.Function has handed on as "
                "it was: make a new tensor instead"
            )
        rest = map_arg(node.args[1:], self._read)
        kwargs = map_arg(node.kwargs, self._read)
        whole = self._read(base)
        plain = None if chain else _out_of_place(node)
        if plain is not None:
            new = self.graph.call_function(plain, (whole, *rest), kwargs)
        else:
            steps = [self._step(view) for view in chain]
            new = self.graph.call_function(write_through, (whole, steps, op, rest, kwargs))
        hidden = node.meta["no_grad"] and not whole.meta.get("no_grad")
        new.meta = {**node.meta, "val": base.meta["val"], "hidden": plain is not None and hidden}
        storage = _storage(node)
        assert storage is not None
        self._source[node] = target
        self._same.add(node)
        self._written.setdefault(storage, []).append(new)

    def _chain(self, node: fx.Node) -> Iterator[fx.Node]:
        """The views from the whole tensor to this part of it."""
        source = self._source.get(node)
        if source is not None:
            yield from self._chain(source)
            if node not in self._same:
                yield node

    def _step(self, view: fx.Node) -> tuple[Any, Any, Any]:
        if not view.args or view.args[0] is not self._source[view] or not callable(view.target):
            raise Untraceable(f"{where(view)}something is written through {view.target}")
        rest = map_arg(view.args[1:], self._read)
        op = None if view.target is operator.getitem else view.target
        return op, rest, map_arg(dict(view.kwargs), self._read)


def _called(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def is_check(node: fx.Node) -> bool:
    """Whether an operator only checks something, and gives nothing."""
    return isinstance(node.target, OpOverload) and name_of(node.target).startswith(CHECKS)


def _storage(node: fx.Node) -> int | None:
    """Which memory a node's tensor lies in; of several tensors the first's."""
    value = node.meta.get("val")
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = value[0] if value else None
    return storage_of(value) if isinstance(value, torch.Tensor) else None


def _out_of_place(node: fx.Node) -> Callable[..., Any] | None:
    """The operator that computes what this one writes, if it surely does."""
    op = node.target
    assert isinstance(op, OpOverload)
    name = name_of(op).removesuffix("_")
    dtypes = {
        arg.meta["val"].dtype for arg in node.all_input_nodes if isinstance(arg.meta["val"], torch.Tensor)
    }
    if name not in OUT_OF_PLACE or len(dtypes) > 1:
        return None
    return getattr(getattr(aten, name), op._overloadname, None)
