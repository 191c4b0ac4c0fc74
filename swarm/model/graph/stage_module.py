"""The stages of a cut model as modules.

A stage has the parameters that its operators read, under their full names, and gives the same numbers however
often it is called. What of a batch norm it gives beside its outputs: docs/design.md, *Any model*.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.graph.ir import DEVICE, RANDOM, Call, Ref
from swarm.model.graph.kernels import SeededRandom, plain
from swarm.model.graph.partition import StagePlan
from swarm.model.graph.trace import Traced
from swarm.model.same_bits import aligned
from swarm.model.stage_function import Output


class StageModule(nn.Module):
    """One stage: `module(*inputs, mb=mb)`, inputs as `plan.inputs` says, on any device."""

    def __init__(self, traced: Traced, plan: StagePlan, *, seed: int) -> None:
        super().__init__()
        self.plan, self._seed = plan, seed
        self._told = [told for i in plan.operators for told in traced.statistics.get(i, ())]
        takes = [DEVICE.name, RANDOM.name, *plan.parameters, *plan.buffers, *(v.name for v in plan.inputs)]
        gives = [value.name for value in plan.outputs] + [told.value for told in self._told]
        self._compute = _compiled([traced.calls[i] for i in plan.operators], takes, gives)
        self._held: list[tuple[nn.Module, str]] = []
        # Last, so that no tensor takes the place of one of our own attributes unseen.
        for name in plan.parameters:
            owner, leaf = self._hold(name)
            owner.register_parameter(leaf, nn.Parameter(traced.parameters[name].detach()))
        for name in plan.buffers:
            owner, leaf = self._hold(name)
            owner.register_buffer(leaf, aligned(traced.buffers[name]))  # numpy puts what it makes anywhere

    def forward(self, *inputs: torch.Tensor | None, mb: Microbatch | None) -> Output:
        """`inputs` in the order of `plan.inputs`, all on the device of the parameters. What none of its
        operators reads, and only passes, may be None. Without `mb` nothing is dropped."""
        held = [getattr(owner, leaf) for owner, leaf in self._held]
        device = next(tensor.device for tensor in (*held, *inputs) if tensor is not None)
        made = self._compute(device, SeededRandom(self._seed, mb), *held, *inputs)
        count = len(self.plan.outputs)
        statistics: dict[str, torch.Tensor] = {}
        for told, value in zip(self._told, made[count:], strict=True):
            share = value.detach() * told.weight
            seen = statistics.get(told.buffer)
            statistics[told.buffer] = share if seen is None else seen + share
        return Output(tuple(made[:count]), statistics)

    def _hold(self, name: str) -> tuple[nn.Module, str]:
        self._held.append(holder_of(self, name))
        return self._held[-1]


def holder_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The part of a module that is to hold the tensor with this full name, made if need be, and what it calls
    it. Raises SetupError: it has something else that is called so.
    """
    *parts, leaf = name.split(".")
    for part in parts:
        if part not in module._modules:
            _check_free(module, part)
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if leaf not in module._buffers:
        _check_free(module, leaf)
    return module, leaf


def _check_free(owner: nn.Module, part: str) -> None:
    if hasattr(owner, part):
        raise SetupError(f"the model has a part called {part!r}, as a stage has: rename it")


def _compiled(
    calls: Sequence[Call], takes: Sequence[str], gives: Sequence[str]
) -> Callable[..., Sequence[torch.Tensor]]:
    """The calls as a function of the values `takes`, in order, that returns the values `gives`.

    It lets go of a value after its last use: the memory is autograd's to keep or free.
    """
    graph = fx.Graph()
    env: dict[str, fx.Node] = {name: graph.placeholder(f"value_{n}") for n, name in enumerate(takes)}

    def fill(part: Any) -> Any:
        return env[part.name] if isinstance(part, Ref) else part

    for call in calls:
        args, kwargs = map_aggregate(call.args, fill), map_aggregate(call.kwargs, fill)
        if call.plain:
            made = graph.call_function(plain(call.function), (env[DEVICE.name], *args), kwargs)
        else:
            made = graph.call_function(call.function, args, kwargs)
        for number, name in enumerate(call.outputs):
            env[name] = graph.call_function(operator.getitem, (made, number)) if call.several else made
    graph.output([env[name] for name in gives])
    graph.eliminate_dead_code()
    return fx.GraphModule(nn.Module(), graph).forward
