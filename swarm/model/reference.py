"""The same run in a single process: what every swarm must arrive at, and what `--verify` compares with.

Deliberately not built on `StageCompute`: plain modules, gradients in `.grad`, torch's own optimizer. They
share what a stage is (`swarm.model.stage_function`), the initial weights, and the codecs at the boundaries.
"""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from swarm.data import sample_offsets
from swarm.errors import DIVERGED, SetupError
from swarm.floats import total_of
from swarm.ids import Microbatch, Stage
from swarm.manifest import NO_ISLAND, Run, Terms
from swarm.model.custom import model_inputs
from swarm.model.fixed_point import Rounded, add_exact, blocks_of, dropped_after, to_float
from swarm.model.gpt import replace_parameters, weights_dtype
from swarm.model.layout import MET_MOMENTUM, MET_WEIGHTS, Layout, empty_state, initial_vectors, stage_layout
from swarm.model.optimizer import moment_seed, muon_update, to_bfloat16
from swarm.model.reductions import sqnorm
from swarm.model.same_bits import aligned, use_same_algorithms, use_threads_of
from swarm.model.stage_function import stage_function
from swarm.wire.codec import decode, encode, places_of, round_trip

_MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}
"""Of the optimizer, in a stage's state: what torch calls them."""


class SingleProcess:
    """All stages of a run in a row, with the codecs' round trips at the boundaries."""

    def __init__(
        self, run: Run, batch: Callable[[list[int]], Any], device: str | torch.device = "cpu", *,
        only: Stage | None = None,
    ) -> None:  # fmt: skip
        """`batch`: offsets -> samples, as a dataset's method of that name.

        `only`: of the stages this one, without weights until it is given a state (`swarm.audit.by_stage`).

        Raises:
            SetupError: the optimizer is adamw8bit, which has no reference, or what is sent depends on routes.
        """
        use_same_algorithms(torch.device(device))
        if run.optimizer.name == "adamw8bit":
            raise SetupError('optimizer.name = "adamw8bit" cannot be verified: there is no reference for it')
        if run.depends_on_routes:
            raise SetupError(
                "a run with codec.adaptive cannot be verified: what it arrives at depends on its routes"
            )
        others = range(1, run.islands.count if run.number == NO_ISLAND else 1)
        self._others = [SingleProcess(run.island(number), batch, device) for number in others]
        """The other islands, where the run has several: this is the first of them then."""
        run = run.island(0) if others else run
        self.run, self.version, self._batch, self._device = run, 0, batch, torch.device(device)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        """The newest weights by full name. One that several stages hold is one tensor here."""
        self._statistics: dict[str, torch.Tensor] = {}
        """Those of batch norms, likewise."""
        layouts = {s: stage_layout(run, s) for s in (range(run.S) if only is None else [only])}
        for stage, layout in layouts.items():
            weights, told = _vectors(run, stage, layout, blank=only is not None)
            for name, value in layout.views(weights):
                self.parameters[name] = torch.nn.Parameter(value.to(self._device, copy=True))
            self._statistics |= dict(layout.statistics_views(told.to(self._device)))
        # With delayed updates a step is computed with the weights before the newest.
        self._held = {
            name: weights.detach().clone() if run.delayed_updates else weights.detach()
            for name, weights in self.parameters.items()
        }
        self._dropped = {
            name: torch.zeros(blocks_of(weights.numel()), dtype=torch.uint8, device=self._device)
            for name, weights in self.parameters.items()
            if run.rounds_sums
        }
        """Of a run that rounds gradients, the bits that those of each weight drop in the next step."""
        self._met = _Met(run, {**self.parameters, **self._statistics}, self._statistics)
        self.stages = {s: _Stage(run, s, self._held, self._dropped, self._device) for s in layouts}
        self.sums: list[torch.Tensor] = []
        """What each stage alone found, when `totals` was last called: flat, not divided by M."""
        terms = {name: run.optimizer.terms_of(name, w.dim()) for name, w in self.parameters.items()}
        self._muon = {name: one for name, one in terms.items() if one.is_muon}
        others = {name: one for name, one in terms.items() if not one.is_muon}
        self._optimizer = _optimizer_of(run, self.parameters, others)

    def loss(self, mb: Microbatch, *, grad: bool = True) -> float:
        """The mean loss of a microbatch of the present step; `grad`: also add its gradient.

        Raises:
            SetupError: it is not finite.
        """
        use_threads_of(self.run)
        arriving, stages = self.samples(mb), [*self.stages.values()]
        passed: list[Passed] = []
        for stage in stages:
            passed.append(stage.forward(arriving, mb, grad=grad))
            arriving = passed[-1].arriving
        (loss,) = passed[-1].outputs
        if not math.isfinite(found := float(loss.item())):
            raise SetupError(f"the loss of microbatch {mb} is not finite: {found}{DIVERGED}")
        if grad:
            back = [torch.ones_like(loss)]
            before = [None, *passed[:-1]]
            for stage, own, sender in zip(stages[::-1], passed[::-1], before[::-1], strict=True):
                back = stage.backward(own, back, sender.places if sender else [], mb)
        return found

    def samples(self, mb: Microbatch) -> list[torch.Tensor]:
        """What enters the first stage."""
        rows = self._batch(sample_offsets(self.run, mb.t, mb.m))
        if self.run.brings_model:
            inputs = model_inputs(self.run, rows)
        else:
            inputs = [torch.from_numpy(rows.astype(np.int64))]
        return [aligned(values).to(self._device) for values in inputs]

    @torch.no_grad()
    def totals(self) -> tuple[dict[str, torch.Tensor], float]:
        """(the sums since the last call by name, not divided by M, the sum of the gradients' squares).

        A weight's total is the sum of its stages', in their order; its square counts at the first.
        """
        self.sums = [stage.totals() for stage in self.stages.values()]
        layouts = [stage.layout for stage in self.stages.values()]
        shared, squares = add_up(layouts, self.sums.__getitem__)
        named = [layout.terms_of(flat) for layout, flat in zip(layouts, self.sums, strict=True)]
        return {**ChainMap(*named), **shared}, squares

    def step(self, t: int) -> list[float]:
        """Do step `t`, the next one; return the losses of its microbatches in order."""
        assert t == self.version, "steps are done in order"
        if self.run.meets_at(t):
            meet([self, *self._others])
            return []
        losses = [self.loss(Microbatch(t, m)) for m in range(self.run.microbatches(t))]
        totals, squares = self.totals()
        self.take(totals, squares)
        return losses + [loss for other in self._others for loss in other.step(t)]

    @torch.no_grad()
    def take(self, totals: Mapping[str, torch.Tensor], squares: float) -> None:
        """Take the next step with what `totals` gave."""
        t, run, spec = self.version, self.run, self.run.optimizer
        # One factor for the mean and the clipping, as the stages have it: two would round twice.
        M = run.microbatches(t)
        scale = 1.0 / M
        if spec.clip_norm:
            scale *= min(1.0, spec.clip_norm / (math.sqrt(squares) / M + 1e-6))
        for name, (_, momentum) in {
            n: s for one in self.stages.values() for n, s in one.layout.statistics.items()
        }.items():
            mean = totals[name] * (1.0 / M)
            self._statistics[name].mul_(1.0 - momentum).add_(mean, alpha=momentum)
        for name, dropped in self._dropped.items():
            dropped.copy_(dropped_after(totals[name], dropped, run.kept_bits))
        lr = run.lr_at(t)
        for name, parameter in self.parameters.items():
            if run.delayed_updates:
                self._held[name].copy_(parameter)
            parameter.grad = totals[name] * scale
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["multiple"]
            for parameter in group["params"]:
                parameter.mul_(1.0 - group["lr"] * group.get("decay", 0.0))
        self._optimizer.step()
        for name, terms in self._muon.items():
            parameter, rate = self.parameters[name], lr * terms.lr
            state = self._optimizer.state[parameter]
            for moment in ("exp_avg", "exp_avg_sq"):
                state.setdefault(moment, torch.zeros_like(parameter))
            assert parameter.grad is not None
            parameter.mul_(1.0 - rate * terms.decay)
            parameter.add_(muon_update(state["exp_avg"], parameter.grad), alpha=-rate)
        for name, parameter in self.parameters.items():
            parameter.grad = None
            for vector, torch_name in _MOMENTS.items() if spec.moments == "bfloat16" else ():
                if (moment := self._optimizer.state[parameter].get(torch_name)) is not None:
                    seed = moment_seed(run.seed, run.step_number(t), vector, name)
                    kept = to_bfloat16(moment.view(-1), seed, 0)
                    moment.copy_(kept.view_as(moment))
        self.version = t + 1

    @torch.no_grad()
    def load(self, version: int, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Become a version: of each stage that is here, what `StageState.copy` gives."""
        age = float(self.run.islands.moments_age(version))
        given = {vector for vectors in states for vector in vectors}
        for parameter in self.parameters.values():
            moments = {name: torch.zeros_like(parameter) for v, name in _MOMENTS.items() if v in given}
            self._optimizer.state[parameter] = {"step": torch.tensor(age), **moments}
        for stage, vectors in zip(self.stages, states, strict=True):
            for vector, flat in vectors.items():
                for view, value in self._values(stage, vector, flat):
                    value.copy_(view)
        self.version = version

    @torch.no_grad()
    def state_of(self, stage: Stage, *vectors: str) -> dict[str, torch.Tensor]:
        """Of the newest state of a stage these vectors, as `StageState.copy` has them; none: all that it has.

        Once a step was taken, or a state loaded.
        """
        found: dict[str, torch.Tensor] = {}
        for vector, empty in empty_state(self.run, stage).items():
            if vector in vectors or not vectors:
                found[vector] = torch.zeros_like(empty, device=self._device)
                for view, value in self._values(stage, vector, found[vector]):
                    view.copy_(value)
        return found

    def _values(
        self, stage: Stage, vector: str, flat: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What lies in a vector of a stage's state: as a view of `flat`, and as it is held here."""
        layout = self.stages[stage].layout
        if vector == "statistics":
            yield from ((view, self._statistics[name]) for name, view in layout.statistics_views(flat))
            return
        if vector == "dropped_bits":
            for name, blocks in layout.blocks.items() if self._dropped else ():
                yield flat[blocks], self._dropped[name]
            return
        if vector in (MET_WEIGHTS, MET_MOMENTUM):
            for name, (start, end, shape) in layout.terms.items():
                if end <= flat.numel():
                    yield flat[start:end].view(shape), self._met.value(vector, name)
            return
        for name, view in layout.views(flat):
            parameter = self.parameters[name]
            if vector in _MOMENTS:
                yield view, self._optimizer.state[parameter][_MOMENTS[vector]]
            else:
                yield view, parameter.detach() if vector == "weights" else self._held[name]

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The newest weights of all stages by full name, on the CPU."""
        found = {**self.parameters, **self._statistics}
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


class _Met:
    """The weights and statistics after the last meeting of islands, and the optimizer of meetings."""

    def __init__(self, run: Run, now: Mapping[str, torch.Tensor], statistics: Mapping[str, object]) -> None:
        """`now`: those of an island, by full name, which change; `statistics`: which of them are averaged."""
        self._now, self._statistics, self._codec = now, statistics, run.islands.codec
        self._then: dict[str, torch.nn.Parameter] = {}
        if run.islands.count > 1:
            self._then = {name: torch.nn.Parameter(value.detach().clone()) for name, value in now.items()}
        spec = run.islands
        self._optimizer = torch.optim.SGD(
            [value for name, value in self._then.items() if name not in statistics]
            or [torch.nn.Parameter(torch.zeros(0))],
            lr=spec.outer_lr, momentum=spec.outer_momentum, nesterov=spec.outer_momentum > 0, foreach=False,
        )  # fmt: skip

    def changes(self) -> dict[str, torch.Tensor]:
        """What the island has changed, as others get it."""
        return {
            name: round_trip((then - self._now[name]).detach().flatten(), self._codec).view(then.shape)
            for name, then in self._then.items()
        }

    def step(self, means: Mapping[str, torch.Tensor]) -> None:
        """Have the island go on from where the meeting says."""
        for name, then in self._then.items():
            if name in self._statistics:
                then.sub_(means[name])
            else:
                then.grad = means[name]
        self._optimizer.step()
        for name, then in self._then.items():
            then.grad = None
            self._now[name].copy_(then)

    def value(self, vector: str, name: str) -> torch.Tensor:
        """What a vector of a stage's state has of a weight."""
        then = self._then[name]
        if vector == MET_WEIGHTS:
            return then.detach()
        return self._optimizer.state[then].setdefault("momentum_buffer", torch.zeros_like(then))


@torch.no_grad()
def meet(islands: Sequence[SingleProcess]) -> None:
    changes = [island._met.changes() for island in islands]
    zero, share = torch.zeros(()), 1.0 / len(islands)
    means = {name: sum((change[name] for change in changes), zero) * share for name in changes[0]}
    for island in islands:
        island._met.step(means)
        moments = [value for state in island._optimizer.state.values() for value in state.values()]
        for begun_anew in (*moments, *island._dropped.values()):
            begun_anew.zero_()
        island.version += 1


class Passed(NamedTuple):
    leaves: list[torch.Tensor]
    """The inputs that have a gradient, cut off from the stage before."""
    outputs: list[torch.Tensor]
    """Those that have a gradient; of the last stage the loss."""
    statistics: dict[str, torch.Tensor]
    arriving: list[torch.Tensor]
    """The inputs of the next stage, after their codec."""
    places: list[torch.Tensor | None]
    """Of each output with a gradient: where the numbers were that a top-k kept."""


class _Stage:
    """One stage: its module, and the sums of the present step by name, as whole numbers or as floats."""

    def __init__(
        self,
        run: Run,
        stage: Stage,
        weights: Mapping[str, torch.Tensor],
        dropped: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """`weights`, and the bits that their gradients drop: those of all stages by full name; not copied."""
        self._run, self._number, self._dropped, self._device = run, stage, dropped, device
        self.layout = stage_layout(run, stage)
        self._function = stage_function(run, stage)
        self._module = self._function.module()
        replace_parameters(self._module, lambda name, _: weights[name])
        self._module.to(device)
        self._sums: dict[str, torch.Tensor] = {}

    def forward(self, arriving: list[torch.Tensor], mb: Microbatch, *, grad: bool) -> Passed:
        """Compute the stage, and what its outputs are for the next one."""
        run, function = self._run, self._function
        with torch.set_grad_enabled(grad):
            leaves, (made, statistics) = function.apply(self._module, arriving, run.named(mb), self._device)
            outputs = function.graded(made)
        passed = Passed(leaves, outputs, statistics, [], [])
        graded = iter(outputs)
        for number, what in enumerate(function.gives):
            if what.graded:
                sent = encode(next(graded), run.codec.forward_at(self._number))
                arrived = decode(*sent, device=self._device)
                passed.places.append(places_of(sent))
            else:
                arrived = arriving[function.passes[number]] if number in function.passes else made[number]
            passed.arriving.append(arrived.detach().clone(memory_format=torch.contiguous_format))
        return passed

    def backward(
        self,
        passed: Passed,
        gradients: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor | None],
        mb: Microbatch,
    ) -> list[torch.Tensor]:
        """Add to the sums; return the gradients of the inputs as the stage before gets them.

        `places`: of the inputs that have a gradient.
        """
        roots = [(y, g) for y, g in zip(passed.outputs, gradients, strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in roots], [g for _, g in roots])
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                self._add(name, parameter.grad, mb)
                parameter.grad = None
        for name, told in passed.statistics.items():
            self._add(name, told, mb)
        if not passed.leaves:
            return []
        codec = self._run.codec
        answer = codec.backward_at(self._number - 1, codec.forward_at(self._number - 1))
        return [
            round_trip(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, answer, places=kept)
            for leaf, kept in zip(passed.leaves, places, strict=True)
        ]

    def totals(self) -> torch.Tensor:
        """The sums as the stage's vector has them, in the dtype of the weights; they begin anew."""
        dtype = weights_dtype(self._run)
        flat = torch.zeros(self.layout.sum_numel, dtype=dtype, device=self._device)
        for name, (start, end, _) in self.layout.terms.items():
            total = self._sums.pop(name, None)
            if total is not None:
                exact = total.dtype == torch.int64
                value = to_float(total, dtype, self._dropped.get(name)) if exact else total
                flat[start:end].copy_(value.view(-1))
        return flat

    def _add(self, name: str, term: torch.Tensor, mb: Microbatch) -> None:
        """`term` keeps its memory to itself."""
        total = self._sums.get(name)
        if self._run.adds_exactly:
            if total is None:
                total = self._sums[name] = torch.zeros(term.numel(), dtype=torch.int64, device=term.device)
            dropped = self._dropped.get(name)
            add_exact(total, term, None if dropped is None else Rounded.of(self._run, mb, name, dropped))
        elif total is None:
            self._sums[name] = term.detach().clone()
        else:
            total.add_(term)


def add_up(
    layouts: Sequence[Layout], sum_of: Callable[[Stage], torch.Tensor]
) -> tuple[dict[str, torch.Tensor], float]:
    """(the totals of what several stages sum, by name, the sum of all gradients' squares): see
    `SingleProcess.totals`. `sum_of`: asked for one stage's sum at a time.
    """
    held = Counter(name for layout in layouts for name in layout.terms)
    shared: dict[str, torch.Tensor] = {}
    for stage, layout in enumerate(layouts):
        for name in (name for name in layout.terms if held[name] > 1):
            start, end, shape = layout.terms[name]
            total = sum_of(stage)[start:end].view(shape)
            shared[name] = shared[name] + total if name in shared else total.clone()
    squares, seen = list[float](), set[str]()
    for stage, layout in enumerate(layouts):
        # As a stage adds them: at their places in its vector.
        own = sum_of(stage)
        flat = torch.zeros_like(own[: layout.numel])
        for name, view in layout.views(flat):
            if name not in seen:
                start, end, shape = layout.spans[name]
                view.copy_(shared[name] if name in shared else own[start:end].view(shape))
        seen |= layout.spans.keys()
        squares.append(sqnorm(flat))
    return shared, total_of(squares)


def _vectors(run: Run, stage: Stage, layout: Layout, *, blank: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and statistics on the CPU: those of version 0, or `blank` zeros."""
    if not blank:
        return initial_vectors(run, stage, layout, torch.device("cpu"))
    sizes, dtype = (layout.numel, layout.statistics_numel), weights_dtype(run)
    return torch.zeros(sizes[0], dtype=dtype), torch.zeros(sizes[1], dtype=dtype)


def _optimizer_of(
    run: Run, parameters: Mapping[str, torch.nn.Parameter], terms: Mapping[str, Terms]
) -> torch.optim.Optimizer:
    """torch's own, of the weights in `terms`."""
    spec = run.optimizer
    groups: list[dict[str, Any]] = [
        {
            "params": [parameters[name] for name in terms if terms[name] == one],
            "weight_decay": one.decay,
            "multiple": one.lr,
        }
        for one in dict.fromkeys(terms.values())
    ]
    groups = groups or [{"params": [torch.nn.Parameter(torch.zeros(0))], "multiple": 1.0}]  # torch wants one
    if spec.name in ("adamw", "muon"):
        betas = (spec.beta1, spec.beta2)
        return torch.optim.AdamW(groups, lr=spec.lr, betas=betas, eps=spec.eps, foreach=False)
    for group in groups:  # torch's SGD has no decoupled decay: `SingleProcess.step` does it by hand
        group["decay"] = group.pop("weight_decay", 0.0)
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, foreach=False)
