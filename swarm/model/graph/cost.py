"""How long each operator takes: it is called, forward and backward, with made-up tensors.

With tensors that have no memory (torch's fake tensors) the kernels that it comes to are reckoned, by what
torch counts of them: seconds = overhead + operations / rate + bytes / bandwidth; a view costs nothing. With
real ones it can be timed (`swarm graph --calibrate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from swarm.ids import Microbatch
from swarm.model.graph.ir import DEVICE, RANDOM, Call, Ref, Value
from swarm.model.graph.kernels import SeededRandom
from swarm.model.graph.trace import Traced

aten = torch.ops.aten

CALL_S, OPERATION_S, BYTE_S = 5e-6, 1e-11, 5e-11
"""Some device: 1e11 operations and 2e10 bytes a second, 5 µs a call. If all devices are alike, only how these
relate has a say in where to cut."""

_LIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Kernels of the CPU that do what torch counts of another."""
_LOOKUPS = frozenset((aten.embedding, aten.index, aten.index_select, aten.gather))
"""Kernels that read no more than they give."""


def reckoned_s(traced: Traced) -> list[float]:
    """Seconds of each operator for a microbatch on some device, forward and backward."""
    return [kernels.seconds for kernels in _counted(traced)]


def operations(traced: Traced) -> list[float]:
    """Floating point operations of each operator, forward and backward, as torch counts them."""
    return [kernels.operations for kernels in _counted(traced)]


def _counted(traced: Traced) -> Iterator[_Kernels]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        for compute in made_up_calls(traced):
            # The gradient of what is written at a mask has as many numbers as the mask: it counts nothing.
            with _Kernels() as kernels, suppress(DynamicOutputShapeException):
                compute()
            yield kernels


def made_up_calls(traced: Traced) -> Iterator[Callable[[], None]]:
    """For each operator a function that computes it forward and backward, on the CPU."""
    return (_made_up(call, traced) for call in traced.calls)


def _made_up(call: Call, traced: Traced) -> Callable[[], None]:
    env: dict[str, Any] = {DEVICE.name: torch.device("cpu"), RANDOM.name: SeededRandom(0, Microbatch(0, 0))}

    def fill(part: Any) -> Any:
        if not isinstance(part, Ref):
            return part
        if part.name not in env:
            env[part.name] = _numbers(traced.graph.values[part.name])
        return env[part.name]

    args, kwargs = map_aggregate(call.args, fill), map_aggregate(call.kwargs, fill)
    leaves = [leaf for leaf in env.values() if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

    def compute() -> None:
        made = pytree.tree_leaves(call.function(*args, **kwargs))
        roots = [root for root in made if isinstance(root, torch.Tensor) and root.requires_grad]
        if roots:
            torch.autograd.grad(roots, leaves, list(map(torch.empty_like, roots)), allow_unused=True)

    return compute


def _numbers(value: Value) -> torch.Tensor:
    dtype = getattr(torch, value.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(value.shape, dtype=dtype)  # a row of any table
    return torch.randn(value.shape, dtype=dtype).requires_grad_(value.differentiable)


class _Kernels(TorchDispatchMode):
    """Adds up the operations and seconds of the kernels that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.seconds = 0.0

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kernel = func.overloadpacket
        made = _bytes(out)
        if made and not func.is_view and not func._schema.name.startswith("aten::empty"):
            count = flop_registry.get(_LIKE.get(kernel, kernel))
            operations = count(*args, **kwargs, out_val=out) if count else 0
            read = made if kernel in _LOOKUPS else _bytes((args, kwargs))
            self.operations += operations
            self.seconds += CALL_S + OPERATION_S * operations + BYTE_S * (made + read)
        return out


def _bytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
