"""A model's own autograd.Functions as operators of the graph: the author's forward and the author's backward.

torch.export takes the forward alone, so each call is traced apart, as two graphs of ATen calls that a stage
computes as a Function: docs/design.md, *Any model*.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from swarm.errors import SetupError
from swarm.model.graph import operators
from swarm.model.graph.ir import Call
from swarm.model.graph.untraceable import Untraceable, reason
from swarm.model.reductions import add_tensor
from swarm.model.same_bits import storage_of

_LIBRARY = torch.library.Library("swarm", "DEF")
_LIBRARY.define("function(str name, Tensor[] tensors) -> Tensor[]")
OPERATOR: OpOverload = torch.ops.swarm.function.default
"""Stands for a call in the graph that torch.export makes; `name` is that of one of `Functions.found`."""
_FROM_TORCH = "torch._library.autograd"
"""Where torch makes Functions of operators that a library registers: a graph has these operators."""


class Form(NamedTuple):
    """What a tensor is apart from its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs: bool
    """A gradient of it is wanted: authors' code looks at that."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return cls(shape, stride, tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers in this order in memory: a `contiguous` that had nothing to do was not traced."""
        if tensor.stride() == self.stride or 0 in self.stride:
            return tensor
        return self._replace(dtype=tensor.dtype).empty(tensor.device).copy_(tensor)


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedFunction:
    """One call of a Function, for tensors of some form."""

    name: str
    """Of the class, with its module."""
    forward: fx.GraphModule
    """Tensors of the call -> the outputs, then what is saved."""
    backward: fx.GraphModule
    """What was saved, then the gradients of the outputs -> those of the tensors of the call, or None."""
    given: tuple[Form, ...]
    outputs: tuple[Form, ...]
    shares: bool
    """An output lies in the memory of an argument."""

    def compute(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """A function of the tensors of the call, called as the class; by its full name with a digest."""
        forward, backward = self.forward.forward, self.backward.forward
        given, outputs = self.given, self.outputs

        class Traced(Function):
            @staticmethod
            def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                made = forward(*map(Form.laid_out, given, tensors))
                ctx.save_for_backward(*made[len(outputs) :])
                return tuple(made[: len(outputs)])

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
                return tuple(backward(*ctx.saved_tensors, *map(Form.laid_out, outputs, gradients)))

        def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return Traced.apply(*tensors)

        digest = hashlib.sha256()
        for part in (self.forward, self.backward):
            digest.update(f"{part.graph}\n".encode())
            for name, constant in constants(part).items():
                add_tensor(digest, name, constant)
        function.__name__ = self.name
        function.__qualname__ = f"{self.name} {digest.hexdigest()}"
        return function


def constants(part: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that a forward or backward has written out in numbers, by the names of their nodes."""
    return {node.name: getattr(part, str(node.target)) for node in part.graph.find_nodes(op="get_attr")}


class Functions:
    def __init__(self) -> None:
        self.found: dict[str, TracedFunction] = {}
        """By a name that is an argument of `OPERATOR`."""

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Inside, a call of a Function is one of `OPERATOR`."""
        global _open
        original, before = Function.__dict__["apply"], _open

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls.__module__ == _FROM_TORCH:
                return original.__get__(None, cls)(*args, **kwargs)
            return self._call(cls, args, kwargs)

        Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        _open = self.found
        try:
            yield
        finally:
            Function.apply, _open = original, before

    def _call(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cls.setup_context is not Function.setup_context:  # torch gives it all arguments then
            bound = inspect.signature(cls.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        if _Tracer.inside:
            # No gradient passes a Function's own code, so it is what its forward computes.
            return _forward(cls, _Context(_needs(args)), args, kwargs)
        tracer = _Tracer(cls, args, kwargs)
        # A thread of its own has none of the modes in which the model is traced, nor what they note.
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(tracer.trace).result()
        name = str(len(self.found))
        self.found[name] = found
        made = OPERATOR(name, tracer.tensors)
        return tuple(made) if tracer.gives_tuple else made[0]


_open: Mapping[str, TracedFunction] = {}


def _forms(name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [form.empty(tensors[0].device) for form in _open[name].outputs]


_LIBRARY.impl("function", _forms, "CompositeExplicitAutograd")


# --- one call -----------------------------------------------------------------------------------------------


class _Context:
    """What a Function calls `ctx`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: torch.Tensor | None) -> None:
        """For derivatives along a direction, which no stage takes."""

    def mark_dirty(self, *_: torch.Tensor) -> None:
        raise Untraceable("it writes to its arguments (mark_dirty); make new tensors")

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        if any(tensor.is_floating_point() for tensor in tensors):
            raise Untraceable(
                "it gives numbers without a gradient (mark_non_differentiable); make them outside of it, "
                "under torch.no_grad()"
            )

    def set_materialize_grads(self, value: bool) -> None:
        if not value:
            raise Untraceable(
                "it asks for gradients that may be None (set_materialize_grads); take zeros instead"
            )


def _needs(args: Sequence[Any]) -> tuple[bool, ...]:
    """As torch says it to a Function, whether or not gradients are switched on."""
    return tuple(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


class _Tracer:
    """Traces the forward and the backward of one call."""

    inside = False
    """Whether one is at work: the model's code waits for it."""

    def __init__(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._cls, self._args, self._kwargs = cls, args, kwargs
        self._name = f"{cls.__module__}.{cls.__qualname__}"
        self.tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.gives_tuple = False
        self._needs = _needs(args)
        self._given = [Form.of(tensor) for tensor in self.tensors]
        self._outputs: list[Form] = []
        self._saved: list[Form] = []
        self._state: tuple[list[Any], Any] = ([], None)
        """What the forward left in `ctx`: leaves, of which tensors count only as places, and their form."""

    def trace(self) -> TracedFunction:
        """Raises SetupError: a stage could not do what it does; says which Function and why."""
        _Tracer.inside = True
        try:
            forward = self._graph(self._forward, self._given, "forward")
            backward = self._graph(self._backward, [*self._saved, *self._outputs], "backward")
        except (Untraceable, SetupError) as error:
            raise self._refused(str(error)) from error
        except Exception as error:  # a model's code raises anything
            raise self._refused(reason(error)) from error
        finally:
            _Tracer.inside = False
        return TracedFunction(
            name=self._name, forward=forward, backward=backward, given=tuple(self._given),
            outputs=tuple(self._outputs), shares=_shares(forward, len(self._outputs)),
        )  # fmt: skip

    def _refused(self, why: str) -> SetupError:
        return SetupError(
            f"the model uses {self._name}, an autograd.Function that cannot be traced: {why}; or write it "
            "with torch's own operators"
        )

    def _graph(self, compute: Callable[..., list[Any]], forms: Sequence[Form], part: str) -> fx.GraphModule:
        with FakeTensorMode() as fake, torch.no_grad():
            given = [form.empty().requires_grad_(form.needs) for form in forms]

            def watched(*tensors: torch.Tensor) -> list[Any]:
                with _NothingElse(fake, part):
                    return compute(*tensors)

            found = make_fx(watched, pre_dispatch=True)(*given)
        _check(found, given, part, self._name)
        return found

    def _forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(tensors)
        args = [next(rest) if isinstance(arg, torch.Tensor) else arg for arg in self._args]
        others = [arg for arg in (*self._args, self._kwargs) if not isinstance(arg, torch.Tensor)]
        if not tensors or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(others)):
            raise Untraceable("it has to be given tensors, each as an argument of its own")
        ctx = _Context(self._needs)
        made = _forward(self._cls, ctx, args, self._kwargs)
        self.gives_tuple = isinstance(made, tuple)
        outputs = list(made) if isinstance(made, tuple) else [made]
        if not outputs or not all(isinstance(output, torch.Tensor) for output in outputs):
            raise Untraceable("its forward has to return a tensor, or a tuple of tensors")
        if getattr(ctx, "_fwd_used_autocast", None) is not None:
            raise Untraceable("it looks at whether autocast is on (custom_fwd)")
        leaves, spec = pytree.tree_flatten(vars(ctx))
        saved = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._state = leaves, spec
        self._outputs, self._saved = list(map(Form.of, outputs)), list(map(Form.of, saved))
        return [*outputs, *saved]

    def _backward(self, *tensors: torch.Tensor) -> list[torch.Tensor | None]:
        rest = iter(tensors)
        leaves, spec = self._state
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx = _Context(())
        vars(ctx).update(pytree.tree_unflatten(leaves, spec))
        backward = self._cls.backward if self._cls.vjp is Function.vjp else self._cls.vjp
        made = backward(ctx, *rest)
        made = list(made) if isinstance(made, tuple) else [made]
        if len(made) < len(self._args) or any(gradient is not None for gradient in made[len(self._args) :]):
            raise Untraceable(
                f"its backward gives {len(made)} gradients, but it has {len(self._args)} arguments"
            )
        forms, kept = iter(self._given), []
        for number, (arg, gradient) in enumerate(zip(self._args, made, strict=False)):
            form = next(forms) if isinstance(arg, torch.Tensor) else None
            if gradient is not None and not (form and _fits(gradient, form)):
                raise Untraceable(
                    f"its backward gives as gradient of argument {number} what has not its shape"
                )
            kept += [gradient] if form else []
        return kept


def _fits(gradient: Any, form: Form) -> bool:
    """Whether torch takes it as the gradient of such a tensor; it adds up along what was expanded."""
    with contextlib.suppress(RuntimeError):
        return torch.broadcast_shapes(form.shape, gradient.shape) == gradient.shape
    return False


def _forward(cls: Any, ctx: _Context, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `forward` returns; `ctx` is as it and `setup_context` leave it."""
    if cls.setup_context is Function.setup_context:
        return cls.forward(ctx, *args, **kwargs)
    made = cls.forward(*args, **kwargs)
    cls.setup_context(ctx, tuple(args), made)
    return made


_MEMORY = frozenset(("data_ptr", "untyped_storage", "storage", "numpy", "__array__", "__dlpack__"))
"""How code gets at a tensor's memory, where there is none yet."""


def _shares(forward: fx.GraphModule, count: int) -> bool:
    """Whether one of the first so many that it returns lies in the memory of what it is given."""
    made: Any = forward.graph.output_node().args[0]
    given = forward.graph.find_nodes(op="placeholder")
    memory = {storage_of(holder.meta["val"]) for holder in given}
    return any(storage_of(node.meta["val"]) in memory for node in made[:count])


class _NothingElse(TorchFunctionMode):
    """Refuse what no graph of operators can have: tensors that were not given nor made of these (their
    numbers would be in the trace for good), and numbers that are read past torch.
    """

    def __init__(self, fake: FakeTensorMode, part: str) -> None:
        super().__init__()
        self._fake, self._part = fake, part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (called := getattr(func, "__name__", "")) in _MEMORY:
            raise Untraceable(f"its {self._part} reads a tensor's memory ({called}), as numpy and C do")
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and getattr(leaf, "fake_mode", None) is not self._fake:
                raise Untraceable(
                    f"its {self._part} reads a tensor {list(leaf.shape)} that is not among its arguments; "
                    "give it as one"
                )
        return func(*args, **(kwargs or {}))


def _check(found: fx.GraphModule, given: Sequence[torch.Tensor], part: str, name: str) -> None:
    """Refuse what no stage may do, and have the graph compute on the device of what it is given."""
    graph, whose = found.graph, set(map(storage_of, given))
    device: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if node.target is torch._C._set_grad_enabled:
            if node.args[0]:
                raise Untraceable(f"its {part} switches gradients on")
            graph.erase_node(node)
            continue
        if not isinstance(node.target, OpOverload):
            raise Untraceable(
                f"its {part} calls {getattr(node.target, '__name__', node.target)}, which is no operator"
            )
        _check_operator(node, whose, part, name)
        if pytree.tree_any(lambda leaf: isinstance(leaf, torch.device), (node.args, node.kwargs)):
            if device is None:
                first = graph.find_nodes(op="placeholder")[0]
                with graph.inserting_before(node):
                    device = graph.call_function(getattr, (first, "device"))
            node.args, node.kwargs = pytree.tree_map_only(
                torch.device, lambda _, here=device: here, (node.args, node.kwargs)
            )
    found.recompile()


def _check_operator(node: fx.Node, given: set[int], part: str, name: str) -> None:
    op = node.target
    assert isinstance(op, OpOverload)
    inside = f"operator {op} in its {part}"
    named = operators.arguments(op, node.args, node.kwargs)
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Untraceable(f"{inside} makes a number that depends on data")
    for argument in op._schema.arguments:
        written = named.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and isinstance(written, fx.Node) and storage_of(written.meta["val"]) in given:
            what = "its arguments" if part == "forward" else "what it is given"
            raise Untraceable(f"{inside} writes to {what}; make a new tensor")
    if operators.does_nothing(operators.name_of(op), named):
        return
    call = Call(function=op, args=node.args, kwargs=dict(node.kwargs), outputs=(), several=False, plain=False)
    ruled = operators.ruled(node, call, named, module=f"{name}.{part}", shape=(), site=str)
    if ruled.function not in (op, torch.ops.aten.full.default):
        raise Untraceable(f"{inside} draws random numbers or keeps statistics; do that outside of it")
