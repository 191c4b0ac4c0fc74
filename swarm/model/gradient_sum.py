"""The gradient sums of the steps that are open, and the weights that several stages sum together.

A sum is one vector: the gradients of the weights as `swarm.model.layout` has them, then the statistics of
batch norms. Called by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from swarm.errors import DIVERGED, NotReady, Refused, Stale, SwarmError
from swarm.ids import Microbatch, Stage
from swarm.manifest import Run
from swarm.model.fixed_point import Rounded, add_exact, largest_term, to_float
from swarm.model.gpt import weights_dtype
from swarm.model.layout import Layout, shared_terms
from swarm.model.reductions import sqnorm
from swarm.model.state import StageState
from swarm.wire.codec import Encoded


class SumLost(SwarmError):
    """An addition failed part-way: the sum of step `t` was set to zero, with all that it had.

    The microbatches that it held have to be recomputed. The cause is chained.
    """


@dataclass(eq=False, slots=True, kw_only=True)
class Gradients:
    """The gradients of one microbatch's backward. In no sum yet: `StageCompute.add` does that."""

    mb: Microbatch
    loads: int
    """How many states had been loaded when it was computed."""
    answer: tuple[Encoded, ...] = ()
    """The gradients of the inputs that have one, for the stage before."""
    terms: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the name of the weight, or of the statistic; empty if they were not asked for."""
    norms: list[torch.Tensor] = field(default_factory=list)
    """Of the terms, where they are added exactly."""
    statistics: frozenset[str] = frozenset()
    """The names of the terms that are no gradients."""
    terms_wanted: bool = False
    """Those of the weights were asked for."""
    loss: float = 0.0
    """Of the last stage."""
    arrived: list[torch.Tensor] = field(default_factory=list)
    """Norms of the gradients of the outputs, which the next stage answered."""


class GradientSums:
    """The sums of one stage, by step."""

    def __init__(
        self, run: Run, stage: Stage, layout: Layout, state: StageState, *, on_host: bool = False
    ) -> None:
        """`state`: of the weights that gradients are computed with. `on_host`: sums are not on its device."""
        self._run, self._stage, self._layout, self._state = run, stage, layout, state
        self._device, self._blocks = torch.device("cpu") if on_host else state.device, layout.blocks
        self.dtype = torch.int64 if run.adds_exactly else weights_dtype(run)
        self.version = 0
        """Steps before it are over."""
        self._sums: dict[int, torch.Tensor] = {}
        self._spare: torch.Tensor | None = None

    def begin(self, t: int) -> None:
        """Make an all-zero sum for step `t`, unless there is one."""
        if t not in self._sums:
            # Reused memory: fresh pages would cost more than zeroing.
            spare, self._spare = self._spare, None
            if spare is None:
                spare = torch.empty(self._layout.sum_numel, dtype=self.dtype, device=self._device)
            self._sums[t] = spare.zero_()

    def of(self, t: int) -> torch.Tensor:
        """The gradients of step `t` added up over microbatches (not divided by M): 1-D, the live vector.

        int64 where the run adds exactly, see `swarm.model.fixed_point`; `value` is what they stand for.

        Raises:
            NotReady, Stale: there is no sum of that step.
        """
        found = self._sums.get(t)
        if found is not None:
            return found
        if t < self.version:
            raise Stale(
                f"step {t} is over: stage {self._stage} is at weights {self.version}", version=self.version
            )
        raise NotReady(f"step {t} has not begun at stage {self._stage}", version=self.version)

    def value(self, total: torch.Tensor) -> torch.Tensor:
        """The value of the open step's sum, in the dtype of the weights: what `StageCompute.apply` takes."""
        return self.value_of_answer()(self.answer(total))

    def answer(self, total: torch.Tensor) -> torch.Tensor:
        """What replicas are told of a part of the sum of them all: its value; or, where gradients are
        rounded, the whole numbers, which are shorter.
        """
        as_it_is = self._run.rounds_sums or not self._run.adds_exactly
        return total if as_it_is else to_float(total, weights_dtype(self._run))

    def value_of_answer(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function from a whole answer to its value: in any thread, whatever becomes of the weights."""
        if not self._run.rounds_sums:
            return lambda answer: answer
        dropped = self._state.dropped.clone()

        def value(answer: torch.Tensor) -> torch.Tensor:
            found = to_float(answer, weights_dtype(self._run))  # statistics of batch norms are not rounded
            for name, blocks in self._blocks.items():
                start, end, _ = self._layout.spans[name]
                found[start:end] = to_float(answer[start:end], found.dtype, dropped[blocks])
            return found

        return value

    def add(self, found: Gradients) -> None:
        """Add a microbatch to the sum of its step, which must have begun.

        Raises:
            Refused: it is beyond what is added exactly; the sum is as it was.
            NotReady, Stale: there is no sum of that step.
            SumLost: it broke part-way; see there.
        """
        t = found.mb.t
        total = self.of(t)
        self._check(found)
        try:
            for name, term in found.terms.items():
                start, end, _ = self._layout.terms[name]
                term = term.to(self._device)
                if self._run.adds_exactly:
                    add_exact(total[start:end], term, self._rounded(found.mb, name))
                else:
                    total[start:end].add_(term.reshape(-1))
        except BaseException as error:  # no memory, perhaps: some parameters have it and some do not
            total.zero_()
            raise SumLost(f"adding {found.mb} broke ({error}): the sum of step {t} is lost") from error

    def _rounded(self, mb: Microbatch, name: str) -> Rounded | None:
        """How a term is rounded; the statistics of batch norms are not."""
        if not self._run.rounds_sums or name not in self._blocks:
            return None
        return Rounded.of(self._run, mb, name, self._state.dropped[self._blocks[name]].to(self._device))

    def drop(self, t: int) -> None:
        self._spare = self._sums.pop(t, self._spare)  # one is enough: it is there for the next step's

    def move_to(self, version: int, *, keep_later: bool) -> None:
        """Weights of `version` are held: drop the sums of the steps before it, or all."""
        self.version = version
        for t in [t for t in self._sums if t < version or not keep_later]:
            self.drop(t)

    def free(self) -> None:
        self._sums, self._spare = {}, None

    def _check(self, found: Gradients) -> None:
        limit = largest_term(self._run.M)
        if not found.norms or torch.stack(found.norms).max().item() <= limit:
            return
        beyond = [name for name, term in found.terms.items() if not term.abs().max().item() <= limit]
        if any(name in found.statistics for name in beyond):
            raise Refused(
                f"{beyond[0]} of stage {self._stage} for {found.mb} is beyond {limit:g}, the most that is "
                "added up exactly: give the model smaller inputs, or a norm before this one"
            )
        if beyond:
            of = f"the weights of stage {self._stage} for {found.mb}"
            raise Refused(f"the gradient of {of} is beyond {limit:g}{DIVERGED}")


class SharedWeights:
    """The weights and statistics that other stages hold as well: their parts of a step's sum are added up.

    Changes nothing but its results: any thread may call it.
    """

    def __init__(self, run: Run, stage: Stage, layout: Layout, device: torch.device) -> None:
        self._stage, self._layout, self._device = stage, layout, device
        self.names = shared_terms(run, stage)
        """Other stage -> what it holds as well as this one, sorted."""

    def numel(self, other: Stage) -> int:
        """Numbers in the `part` of either. Raises Refused: that stage holds nothing of what this one does."""
        if other not in self.names:
            raise Refused(f"stage {other} shares no weights with stage {self._stage}")
        return sum(self._layout.terms[name].shape.numel() for name in self.names[other])

    def part(self, reduced: torch.Tensor, other: Stage) -> torch.Tensor:
        """What `other` needs of this stage's sum: a copy, 1-D, by `names[other]`. Raises as `numel`."""
        self.numel(other)
        spans = (self._layout.terms[name] for name in self.names[other])
        return torch.cat([reduced[span.start : span.end] for span in spans])

    def complete(self, reduced: torch.Tensor, shared: Mapping[Stage, torch.Tensor]) -> torch.Tensor:
        """The value of this stage's sum, with what the other stages found of the weights that they share.

        `shared`: stage -> its `part`. Added in the order of the stages, so that all end with the same.

        Raises:
            Refused: a part is missing, or is not as long as it should be.
        """
        parts: dict[str, dict[Stage, torch.Tensor]] = {}
        for stage, names in self.names.items():
            sizes = [self._layout.terms[name].shape.numel() for name in names]
            part = shared.get(stage)
            if part is None or part.shape != (sum(sizes),) or part.dtype != reduced.dtype:
                given = "nothing" if part is None else f"{list(part.shape)} numbers of {part.dtype}"
                due = f"[{sum(sizes)}] of {reduced.dtype}"
                raise Refused(f"of the weights it shares, stage {stage} gave {given}; due was {due}")
            for name, own in zip(names, part.split(sizes), strict=True):
                parts.setdefault(name, {})[stage] = own
        whole = reduced.clone() if parts else reduced
        for name, found in parts.items():
            start, end, _ = self._layout.terms[name]
            found[self._stage] = reduced[start:end]
            total = torch.zeros_like(whole[start:end])
            for stage in sorted(found):
                total += found[stage]
            whole[start:end] = total
        return whole

    def sqnorm(self, reduced: torch.Tensor) -> float:
        """This stage's share of `total_sqnorm`; a weight that several stages hold counts at the first."""
        earlier = {name for stage, names in self.names.items() if stage < self._stage for name in names}
        own = reduced[: self._layout.numel]
        own = own.clone() if earlier else own
        for name in earlier & self._layout.spans.keys():
            start, end, _ = self._layout.spans[name]
            own[start:end] = 0
        return sqnorm(own, self._device if self._device.type == "cuda" else None)
