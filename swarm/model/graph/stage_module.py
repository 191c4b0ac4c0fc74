"""The stages of a cut model as modules: `cut`.

A stage has the parameters that its operators read, under their full names, and gives the same numbers
however often it is called. A parameter that several stages read is in each of them: its gradient is the sum
of theirs (`partition.shared_parameters`), and so each of them steps alike.

Batch norm, in training: a stage normalises by the microbatch's own statistics, as torch does, and gives them
(mean and unbiased variance) beside its outputs, under the names of the buffers that they are for. Added up
over the microbatches of a step like gradients, they enter the state when the step is taken (`StageState`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.graph.calls import DEVICE, RANDOM, Call, Template, refs
from swarm.model.graph.kernels import SeededRandom, plain
from swarm.model.graph.partition import StagePlan, plan_stages
from swarm.model.graph.specialize import Traced
from swarm.model.stage_function import Output


class StageModule(nn.Module):
    """One stage: `module(*inputs, mb=mb)`, inputs as `plan.inputs` says, on any device."""

    def __init__(self, traced: Traced, plan: StagePlan, *, seed: int) -> None:
        super().__init__()
        self.plan, self._seed = plan, seed
        self._told = {told.value: told for i in plan.operators for told in traced.statistics.get(i, ())}
        calls = [traced.calls[i] for i in plan.operators]
        done = _last_uses(calls, keep={value.name for value in plan.outputs})
        self._work = [
            (call, Template.of(call.args), Template.of([*call.kwargs.values()]), names)
            for call, names in zip(calls, done, strict=True)
        ]
        self._held: list[tuple[str, nn.Module, str]] = []
        # Last, so that no tensor takes the place of one of our own attributes unseen.
        for name in plan.parameters:
            self._adopt(name).register_parameter(_leaf(name), nn.Parameter(traced.parameters[name].detach()))
        for name in plan.buffers:
            self._adopt(name).register_buffer(_leaf(name), traced.buffers[name])
        read = (*plan.parameters, *plan.buffers)
        self._held = [(name, self.get_submodule(name.rpartition(".")[0]), _leaf(name)) for name in read]

    def forward(self, *inputs: torch.Tensor | None, mb: Microbatch) -> Output:
        """`inputs` in the order of `plan.inputs`, all on the device of the parameters. What none of its
        operators reads, and only passes, may be None."""
        env: dict[str, Any] = {name: getattr(owner, leaf) for name, owner, leaf in self._held}
        env.update(zip((value.name for value in self.plan.inputs), inputs, strict=True))
        device = next(value.device for value in env.values() if value is not None)
        env[DEVICE.name], env[RANDOM.name] = device, SeededRandom(self._seed, mb)
        statistics: dict[str, torch.Tensor] = {}
        for call, positional, named, finished in self._work:
            args, run = positional.filled(env), call.function
            kwargs = dict(zip(call.kwargs, named.filled(env), strict=True))
            result = plain(device, run, args, kwargs) if call.plain else run(*args, **kwargs)
            for name, made in zip(call.outputs, result if call.several else (result,), strict=True):
                told = self._told.get(name)
                if told is None:
                    env[name] = made
                else:
                    share = made.detach() * told.weight
                    seen = statistics.get(told.buffer)
                    statistics[told.buffer] = share if seen is None else seen + share
            for name in finished:
                del env[name]
        return Output(tuple(env[value.name] for value in self.plan.outputs), statistics)

    def _adopt(self, name: str) -> nn.Module:
        """The module that is to own `name`, made if need be."""
        owner: nn.Module = self
        *parts, leaf = name.split(".")
        for part in parts:
            if part not in owner._modules:
                _check_free(owner, part)
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if leaf not in owner._buffers:
            _check_free(owner, leaf)
        return owner


def cut(traced: Traced, assignment: Sequence[int], *, seed: int) -> list[StageModule]:
    """The stage modules of a cut, with the values that the model has. `seed`: the run's, for dropout.

    Raises:
        SetupError: the cut is no cut of this graph.
    """
    return [StageModule(traced, plan, seed=seed) for plan in plan_stages(traced.graph, assignment)]


def _check_free(owner: nn.Module, part: str) -> None:
    if hasattr(owner, part):
        raise SetupError(f"the model has a part called {part!r}, as a stage has: rename it")


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _last_uses(calls: Sequence[Call], *, keep: set[str]) -> list[list[str]]:
    """For each call, the values that no later call needs: their memory is autograd's to keep or free."""
    seen = {DEVICE.name, RANDOM.name, *keep}
    found: list[list[str]] = []
    for call in reversed(calls):
        names = dict.fromkeys((*(ref.name for ref in refs((call.args, call.kwargs))), *call.outputs))
        found.append([name for name in names if name not in seen and ":" not in name])
        seen.update(names)
    return found[::-1]
