"""The same run in a single process: what every swarm must arrive at, and what `--verify` compares with.

Deliberately not built on `StageCompute`: plain modules, gradients in `.grad`, torch's own optimizer. They
share what a stage is (`swarm.model.stage_function`), the initial weights, and the codecs at the boundaries.

Of a model that does not fit into one machine one stage at a time is in memory. Of a step all microbatches
pass stage 0 then, all pass stage 1, and so to the last and back; each stage computes its forward again in its
backward. What is not being computed lies elsewhere, such as in a folder. The bits are the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nn import Parameter

from swarm.data import sample_offsets
from swarm.errors import DIVERGED, Refused, SetupError
from swarm.floats import total_of
from swarm.ids import Microbatch, Stage
from swarm.manifest import OptimizerSpec, Run
from swarm.model.custom import model_inputs
from swarm.model.fixed_point import Rounded, add_exact, dropped_after, largest_norm, largest_term, to_float
from swarm.model.gpt import replace_parameters, weights_dtype
from swarm.model.layout import MET_MOMENTUM, MET_WEIGHTS, Layout, empty_state, initial_state, stage_layout
from swarm.model.meeting import difference
from swarm.model.optimizer import moment_seed, muon_update, to_bfloat16
from swarm.model.reductions import sqnorm, state_digest
from swarm.model.same_bits import aligned, use_same_algorithms, use_threads_of
from swarm.model.stage_function import stage_function
from swarm.wire.codec import decode, encode, places_of, round_trip

_MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}
"""Of the optimizer, in a stage's state: what torch calls them."""

Scratch: TypeAlias = MutableMapping[str, dict[str, torch.Tensor]]
"""Tensors that are not needed now. What is read is not written to."""

_SUM = "sum"
_FOR_GRADIENTS = ("weights", "weights_previous", "statistics", "dropped_bits")
"""Of a stage's state, what its forward and backward take."""


class SingleProcess:
    """All cells of a run, with the codecs' round trips at the boundaries: its stages, or those of all
    islands."""

    def __init__(
        self, run: Run, batch: Callable[[list[int]], Any], device: str | torch.device = "cpu", *,
        version: int = 0, state: Callable[[Stage], Mapping[str, torch.Tensor]] | None = None,
        scratch: Scratch | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            batch: offsets -> samples, as a dataset's method of that name.
            state: of each stage at that version, as `StageState.copy` has it, which all islands have in
                common; asked for once. None: that of version 0.
            scratch: for what is not being computed: one stage at a time is in memory. None: all are.

        Raises:
            SetupError: as `PlainStage`, with a `scratch` once something is computed.
        """
        self.run, self.version, self._batch, self.device = run, version, batch, torch.device(device)
        self._scratch: Scratch = {} if scratch is None else scratch
        self._kept_on = self.device if scratch is None else torch.device("cpu")
        self.stages: dict[Stage, PlainStage] = {}
        """The cells, if all are in memory."""
        self._layouts = [stage_layout(run, stage) for stage in range(run.S)]
        for stage in range(run.S):
            empty, given = empty_state(run, stage), (state or partial(initial_state, run))(stage)
            begun = {name: given[name].to(one.dtype) for name, one in empty.items()}
            for cell in range(stage, run.cells, run.S):
                self._scratch[f"state {cell}"] = begun
                if scratch is None:
                    self.stages[cell] = self._load(cell)
                    self._scratch[f"state {cell}"] = self.stages[cell].state
        self._passed: dict[tuple[Stage, int], Passed] = {}
        """By cell and microbatch, on the way to the last stage."""
        self._losses: list[float] = []
        self._shared: list[dict[str, torch.Tensor]] = []
        self._half_taken = False

    def step(self, t: int) -> list[float]:
        """Do step `t`, the next one; return the losses of its microbatches in order. One that was interrupted
        may be done again. Raises SetupError: not if that was while weights changed; or the run diverged."""
        assert t == self.version, "steps are done in order"
        if self._half_taken:
            raise SetupError(f"step {t} was interrupted while weights changed: begin with a new reference")
        try:
            squares = self.compute()
        except Refused as error:  # by a codec
            raise SetupError(f"{error.text} in step {t}{DIVERGED}") from None
        self._half_taken = True
        self.take(squares)
        self._half_taken = False
        return self._losses

    def compute(self, done: Callable[[int], None] = lambda more: None) -> list[float]:
        """The microbatches of the next step, or what islands bring to a meeting. Returns of each island the
        sum of the gradients' squares; of a meeting nothing. `done`: told of each microbatch that has passed a
        stage both ways. Raises SetupError: a loss is not finite.
        """
        self._losses = []
        if self.run.meets_at(self.version):
            for cell in range(self.run.cells):
                layout = self._layouts[cell % self.run.S]
                self._scratch[f"{_SUM} {cell}"] = {_SUM: difference(self.run, layout, self.state_of(cell))}
            return []
        self._passed.clear()
        for plain in self.stages.values():
            plain.forget()
        found: list[tuple[dict[str, torch.Tensor], float]] = []
        for island in map(self.run.island, range(self.run.islands.count)):
            cells = range(island.cell(0), island.cell(island.S))
            all_m = range(island.microbatches(self.version))
            for together in [[m] for m in all_m] if self.stages else [all_m]:
                for cell in cells[:-1]:
                    self._forward(cell, together)
                for cell in reversed(cells):
                    plain = self._backward(cell, together, done)
                    if together[-1] == all_m[-1]:
                        self._scratch[f"{_SUM} {cell}"] = {_SUM: plain.totals().to(self._kept_on)}
            found.append(add_up(self._layouts, lambda stage, cells=cells: self.sum_of(cells[stage])))
        self._shared = [shared for shared, _ in found]
        return [squares for _, squares in found]

    def sum_of(self, cell: Stage) -> torch.Tensor:
        """What a cell alone found in the step that was computed: flat, not divided by M; or at a meeting what
        its island has changed of the stage, as that travels.
        """
        return self._scratch[f"{_SUM} {cell}"][_SUM]

    @torch.no_grad()
    def take(self, squares: Sequence[float]) -> None:
        """Take the step that was computed. `squares`: as `compute` has them. Raises SetupError: one is not
        finite."""
        if not all(0.0 <= one < math.inf for one in squares):
            raise SetupError(f"the gradient of step {self.version} is not finite{DIVERGED}")
        for stage, layout in enumerate(self._layouts):
            islands = {cell: self._load(cell) for cell in range(stage, self.run.cells, self.run.S)}
            if not squares:
                meet([*islands.values()])
            for number, (cell, plain) in enumerate(islands.items()):
                if squares:
                    totals = {**layout.terms_of(self.sum_of(cell)), **self._shared[number]}
                    here = {name: totals[name].to(self.device) for name in layout.terms}
                    plain.take(self.version, here, squares[number])
                self._scratch[f"state {cell}"] = {n: v.to(self._kept_on) for n, v in plain.state.items()}
        self.version += 1

    def state_of(self, cell: Stage) -> dict[str, torch.Tensor]:
        """The newest state of a cell, as `StageState.copy` has it, until the next step."""
        return self._scratch[f"state {cell}"]

    def digest(self, cell: Stage, *, whole: bool) -> str:
        """What replicas say of that, as `state_digest` has it."""
        state = self.state_of(cell)
        return state_digest(state if whole else {n: v.to(self.device) for n, v in state.items()}, whole=whole)

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The newest weights and statistics of all stages, of the first island, by full name, on the CPU. All
        have to be in memory."""
        named = (self.stages[stage].named.items() for stage in range(self.run.S))
        return {name: tensor.cpu().clone() for of_stage in named for name, tensor in of_stage}

    def _load(self, cell: Stage, *vectors: str) -> PlainStage:
        """A cell with these vectors of its state; none: with all."""
        if cell in self.stages:
            return self.stages[cell]
        number, stage = divmod(cell, self.run.S)
        state = self.state_of(cell)
        needed = {name: state[name] for name in state if not vectors or name in vectors}
        return PlainStage(self.run.island(number), stage, self.device, needed)

    def _forward(self, cell: Stage, together: Sequence[int]) -> None:
        plain = self._load(cell, *_FOR_GRADIENTS)
        for m in together:
            passed = self._pass(plain, cell, m, grad=bool(self.stages))
            if self.stages:
                self._passed[cell, m] = passed
            self._put(f"inputs {cell + 1} {m}", passed.arriving)
            self._put(f"places {cell + 1} {m}", passed.places)

    def _backward(self, cell: Stage, together: Sequence[int], done: Callable[[int], None]) -> PlainStage:
        """Returns the cell, with what was added to its sums."""
        plain, stage = self._load(cell, *_FOR_GRADIENTS), cell % self.run.S
        for m in together:
            mb = Microbatch(self.version, m)
            passed = self._passed.pop((cell, m), None) or self._pass(plain, cell, m, grad=True)
            if stage == self.run.S - 1:
                (loss,) = passed.outputs
                self._losses.append(loss.item())
                if not math.isfinite(self._losses[-1]):
                    text = f"the loss of microbatch {mb} is not finite: {self._losses[-1]}{DIVERGED}"
                    raise SetupError(text)
                gradients = [torch.ones_like(loss)]
            else:
                gradients = self._get(f"gradients {cell} {m}", len(passed.outputs))
            places = self._get(f"places {cell} {m}", len(passed.leaves)) if stage else []
            back = plain.backward(passed, gradients, places, mb)
            for used in (f"gradients {cell} {m}", f"places {cell} {m}", f"inputs {cell} {m}"):
                self._scratch.pop(used, None)
            if stage:
                self._put(f"gradients {cell - 1} {m}", back)
            done(1)
        return plain

    def _pass(self, plain: PlainStage, cell: Stage, m: int, *, grad: bool) -> Passed:
        use_threads_of(self.run)
        mb, (number, stage) = Microbatch(self.version, m), divmod(cell, self.run.S)
        if stage:
            arriving = self._get(f"inputs {cell} {m}")
        else:
            arriving = samples_of(self.run.island(number), self._batch, mb, self.device)
        return plain.forward(arriving, mb, grad=grad)

    def _put(self, name: str, tensors: Sequence[torch.Tensor | None]) -> None:
        there = {str(i): one.detach().to(self._kept_on) for i, one in enumerate(tensors) if one is not None}
        self._scratch[name] = there

    def _get(self, name: str, count: int | None = None) -> list[Any]:
        """`count`: how many there are, where some may be None."""
        found = self._scratch[name]
        order = map(str, range(len(found) if count is None else count))
        return [aligned(found[i]).to(self.device) if i in found else None for i in order]


def samples_of(
    run: Run, batch: Callable[[list[int]], Any], mb: Microbatch, device: torch.device
) -> list[torch.Tensor]:
    """What enters the first stage. `batch`: as `SingleProcess` takes it."""
    rows = batch(sample_offsets(run, mb.t, mb.m))
    inputs = model_inputs(run, rows) if run.brings_model else [torch.from_numpy(rows.astype(np.int64))]
    return [aligned(values).to(device) for values in inputs]


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


class PlainStage:
    """One stage: its module, its state, and the sums of the present step by name, as whole numbers or floats.

    A weight that several stages hold is there in each, and all take the same steps.
    """

    def __init__(
        self, run: Run, stage: Stage, device: torch.device, state: Mapping[str, torch.Tensor]
    ) -> None:
        """`state`: of it what is needed, copied."""
        use_same_algorithms(device)
        self._run, self._number, self._device = run, stage, device
        self.layout = stage_layout(run, stage)
        self.state = {name: vector.to(device, copy=True) for name, vector in state.items()}
        """The newest, as `StageState.copy` has it."""
        self.weights = self._views("weights")
        """By full name, as all that follows: views of the state."""
        self.named = self.layout.views(self.state["weights"], self.state.get("statistics"))
        """With the statistics of batch norms."""
        blocks = self.layout.blocks if run.rounds_sums else {}
        self._dropped = {name: self.state["dropped_bits"][part] for name, part in blocks.items()}
        """Of a run that rounds gradients, the bits that those of each weight drop in the next step."""
        self._function = stage_function(run, stage)
        self._module = self._function.module()
        # With delayed updates a step is computed with the weights before the newest.
        held = self._views("weights_previous") if run.delayed_updates else self.weights
        replace_parameters(self._module, lambda name, _: held[name])
        self._module.to(device)
        self._sums: dict[str, torch.Tensor] = {}

    def _views(self, vector: str) -> dict[str, torch.Tensor]:
        return self.layout.views(self.state[vector])

    @torch.enable_grad()
    def forward(self, arriving: list[torch.Tensor], mb: Microbatch, *, grad: bool) -> Passed:
        """Compute the stage, and what its outputs are for the next one."""
        run, function = self._run, self._function
        leaves, (made, statistics) = function.apply(self._module, arriving, run.named(mb), self._device)
        outputs = [one if grad else one.detach() for one in function.graded(made)]
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
        self, passed: Passed, gradients: Sequence[torch.Tensor], places: Sequence[torch.Tensor | None],
        mb: Microbatch,
    ) -> list[torch.Tensor]:  # fmt: skip
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

    def forget(self) -> None:
        """Drop what a step that was interrupted has left."""
        self._sums = {}
        self._module.zero_grad()

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
        """`term` keeps its memory to itself. Raises SetupError: a swarm would not add it either."""
        total, limit = self._sums.get(name), largest_term(self._run.M)
        if self._run.adds_exactly:
            if not (largest_norm(term) <= limit or term.abs().max() <= limit):  # NaN is not
                raise SetupError(f"the gradient of {name} for {mb} is beyond {limit:g}{DIVERGED}")
            if total is None:
                total = self._sums[name] = torch.zeros(term.numel(), dtype=torch.int64, device=term.device)
            dropped = self._dropped.get(name)
            add_exact(total, term, None if dropped is None else Rounded.of(self._run, mb, name, dropped))
        else:
            self._sums[name] = term.detach().clone() if total is None else total.add_(term)

    @torch.no_grad()
    def take(self, t: int, totals: Mapping[str, torch.Tensor], squares: float) -> None:
        """Take step `t` with the totals of all stages, of them what concerns this one."""
        run, spec = self._run, self._run.optimizer
        # One factor for the mean and the clipping, as the stages have it: two would round twice.
        M = run.microbatches(t)
        scale = 1.0 / M
        if spec.clip_norm:
            scale *= min(1.0, spec.clip_norm / (math.sqrt(squares) / M + 1e-6))
        for name, momentum in self.layout.statistics.items():
            self.named[name].mul_(1.0 - momentum).add_(totals[name] * (1.0 / M), alpha=momentum)
        for name, dropped in self._dropped.items():
            dropped.copy_(dropped_after(totals[name], dropped, run.kept_bits))
        if run.delayed_updates:
            self.state["weights_previous"].copy_(self.state["weights"])
        self._optimize(t, {name: totals[name] * scale for name in self.weights})

    def _optimize(self, t: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Step by torch's own optimizer, whose moments are in the state."""
        run, spec, lr = self._run, self._run.optimizer, self._run.lr_at(t)
        kept = {vector: self._views(vector) for vector in _MOMENTS if vector in self.state}
        moments = {  # what is kept in bfloat16 is computed with as float32
            vector: {name: view.to(self.weights[name].dtype) for name, view in views.items()}
            for vector, views in kept.items()
        }
        parameters: dict[str, Parameter] = {}
        groups: list[dict[str, Any]] = []
        for name, weights in self.weights.items():
            terms = spec.terms_of(name, weights.dim())
            rate = lr * terms.lr
            weights.mul_(1.0 - rate * terms.decay)
            if terms.is_muon:
                weights.add_(muon_update(moments["exp_avg"][name], gradients[name]), alpha=-rate)
                continue
            parameters[name] = Parameter(weights)
            parameters[name].grad = gradients[name]
            groups.append({"params": [parameters[name]], "lr": rate})
        if groups:
            optimizer, age = _optimizer_of(spec, groups), float(run.islands.moments_age(t))
            for name, parameter in parameters.items():
                of_weight = {_MOMENTS[vector]: found[name] for vector, found in moments.items()}
                optimizer.state[parameter] = {"step": torch.tensor(age), **of_weight}
            optimizer.step()
        for vector, views in kept.items() if spec.moments == "bfloat16" else ():
            for name, view in views.items():
                seed = moment_seed(run.seed, run.step_number(t), vector, name)
                view.copy_(to_bfloat16(moments[vector][name].view(-1), seed, 0).view_as(view))

    def changes(self) -> dict[str, torch.Tensor]:
        """What the island has changed since the last meeting, as others get it."""
        then, codec = self.layout.terms_of(self.state[MET_WEIGHTS]), self._run.islands.codec
        return {
            name: round_trip((then[name] - now).flatten(), codec).view(now.shape)
            for name, now in self.named.items()
        }

    def meet(self, means: Mapping[str, torch.Tensor]) -> None:
        """Go on from where a meeting says. `means`: of what the islands have changed."""
        spec, then = self._run.islands, self.layout.terms_of(self.state[MET_WEIGHTS])
        parameters = {name: Parameter(then[name]) for name in self.weights}
        momentum = self._views(MET_MOMENTUM) if spec.outer_momentum else {}
        optimizer = torch.optim.SGD(
            [*parameters.values()], lr=spec.outer_lr, momentum=spec.outer_momentum,
            nesterov=spec.outer_momentum > 0, foreach=False,
        )  # fmt: skip
        for name, parameter in parameters.items():
            parameter.grad = means[name]
            if momentum:
                optimizer.state[parameter] = {"momentum_buffer": momentum[name]}
        optimizer.step()
        for name in self.layout.statistics:
            then[name].sub_(means[name])
        for name, now in self.named.items():
            now.copy_(then[name])
        for begun_anew in (*_MOMENTS, "dropped_bits"):
            if begun_anew in self.state:
                self.state[begun_anew].zero_()


@torch.no_grad()
def meet(islands: Sequence[PlainStage]) -> None:
    changes = [island.changes() for island in islands]
    zero, share = torch.zeros(()), 1.0 / len(islands)
    means = {name: sum((change[name] for change in changes), zero) * share for name in changes[0]}
    for island in islands:
        island.meet(means)


def add_up(
    layouts: Sequence[Layout], sum_of: Callable[[Stage], torch.Tensor]
) -> tuple[dict[str, torch.Tensor], float]:
    """(the totals of what several stages sum, by name, the sum of all gradients' squares).

    A weight's total is the sum of its stages', in their order; its square counts at the first. `sum_of`:
    asked for one stage's sum at a time.
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
        terms = layout.terms_of(own := sum_of(stage))
        flat = torch.zeros_like(own[: layout.numel])
        for name, view in layout.views(flat).items():
            if name not in seen:
                view.copy_(shared.get(name, terms[name]))
        seen |= layout.spans.keys()
        squares.append(sqnorm(flat))
    return shared, total_of(squares)


def _optimizer_of(spec: OptimizerSpec, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """torch's own. Weights decay before, by hand, since its SGD has no decoupled decay."""
    if spec.name == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, foreach=False)
    betas = (spec.beta1, spec.beta2)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=betas, eps=spec.eps, weight_decay=0.0, foreach=False)
