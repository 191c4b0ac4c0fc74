"""What a stage peer computes: one stage's weights, the gradient sums of its steps, and the maths between.

Synchronous. Everything that comes from another peer is checked before use (I7); what is asked for with
weights that are not held is refused (I3).

Several threads may compute at once: `forward`, `gradients`, `loss_gradients` and `digest` read weights and
change nothing. What changes sums (`add`, `begin`, `drop_sum`, `subtract`, `add_to_sum`) is called by one
thread at a time; what changes weights (`apply`, `load_state`, `free`) while nothing else is called.

Memory is flat: the weights are ONE vector (the parameters are views of it), so is the gradient sum of a step,
and so are the optimizer's moments. The decayed parameters come first, then the others, each in the module's
order.

With delayed updates step t is computed with version t - 1 while version t is being made, so two versions are
held, in two vectors, and the sums of two steps may be alive at once.

The same inputs give the same bits on the same kind of device, however often they are computed, wherever they
lie in memory and however many cores there are: see `swarm.model.same_bits`.

A CUDA device is kept busy by launching ahead: `start_forward` and its like return before the device is done,
and what they return is asked for its result when the next one is launched. All of it is on one stream.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from swarm.errors import NotReady, Refused, SetupError, Stale, SwarmError
from swarm.ids import Microbatch, Stage
from swarm.manifest import Run
from swarm.model.fixed_point import add_exact, largest_term, to_float
from swarm.model.gpt import Matrix, replace_parameters, weights_dtype
from swarm.model.layout import initial_statistics, initial_weights, shared_terms, stage_layout
from swarm.model.optimizer import FlatOptimizer
from swarm.model.same_bits import aligned, use_threads_of
from swarm.model.stage_function import body_of
from swarm.model.stage_io import StageInput
from swarm.wire.buffers import Buffer
from swarm.wire.codec import (
    Encoded,
    Pending,
    TensorMeta,
    decode,
    places_of,
    start_encode,
    to_device,
)

Wire: TypeAlias = tuple[TensorMeta, Sequence[Buffer]]
"""A tensor as it arrived: its meta and its buffers. An `Encoded` is one."""

_REDUCE_SLICE = 1 << 20
"""Elements whose squares are summed at once: a fixed number, since it decides the rounding."""
_REDUCE_ROW = 1 << 10
"""Of which each row is summed by itself: `_REDUCE_SLICE` holds few enough that one thread adds the rows."""


class SumLost(SwarmError):
    """An addition failed part-way: the sum of step `t` was set to zero, with all that it had.

    The microbatches that it held have to be recomputed. The cause is chained.
    """

    code = "sum-lost"

    def __init__(self, text: str, *, t: int) -> None:
        super().__init__(text)
        self.t = t


class Entered(NamedTuple):
    """The inputs of a microbatch as a stage computes with them, entry by entry."""

    values: list[torch.Tensor | None]
    """On the device; None where nothing here reads it."""
    passing: list[torch.Tensor]
    """On the host, the values without a gradient: for a stage that only passes them on."""


class Computed(NamedTuple):
    """One microbatch through one stage, as autograd knows it."""

    leaves: list[torch.Tensor]
    """The inputs that have a gradient, as they came."""
    outputs: list[torch.Tensor]
    """Those that have a gradient, in the dtypes of the boundary; of the last stage the loss."""
    others: dict[int, torch.Tensor]
    """Output -> the tensor, of what was computed here and has no gradient."""
    statistics: dict[str, torch.Tensor]
    """Buffer of a batch norm -> this microbatch's statistic for it."""


@dataclass(eq=False, slots=True)
class Forward:
    """One microbatch in flight at a stage. Keeps its graph until its backward (unless recomputed)."""

    mb: Microbatch
    version: int
    """The version of the weights that it was computed with."""
    inputs: list[Encoded]
    """The inputs as they arrived: `StageCompute.subtract` needs them to retract it."""
    outputs: list[Encoded]
    """The inputs of the next stage."""
    graph: Computed | None = None
    """None when it is to be recomputed, or was used."""
    loads: int = 0
    """How many states had been loaded when it was computed."""


@dataclass(eq=False, slots=True)
class Gradients:
    """The gradients of one microbatch's backward. In no sum yet: `StageCompute.add` does that."""

    mb: Microbatch
    answer: Pending[tuple[Encoded, ...]]
    """The gradients of the inputs that have one, for the stage before."""
    terms: dict[str, torch.Tensor]
    """By the name of the weight, or of the statistic; empty if they were not asked for."""
    norms: list[torch.Tensor]
    """Of the terms, where they are added exactly."""
    statistics: frozenset[str]
    """The names of the terms that are no gradients."""
    loads: int
    """How many states had been loaded when it was computed."""
    terms_wanted: bool = False
    """Those of the weights were asked for."""
    loss: float = 0.0
    """Of the last stage."""


class StageCompute:
    """One stage's weights, sums and maths. Synchronous; see above for threads."""

    def __init__(self, run: Run, stage: Stage, device: str = "cpu", *, recompute: bool = False) -> None:
        """Hold weights of version 0, a function of the run alone.

        `recompute`: keep only the input of a microbatch in flight and run its forward again in the backward:
        a third more compute for a fraction of the memory.

        Raises:
            SetupError: this device cannot compute this run.
        """
        self.run, self.stage, self.recompute = run, stage, recompute
        self.device = torch.device(device)
        self.dtype = weights_dtype(run)
        self.sum_dtype = torch.int64 if run.adds_exactly else self.dtype
        self.first, self.last = stage == 0, stage == run.S - 1
        self._body = body_of(run, stage)
        self._layout = stage_layout(run, stage)
        end, decayed = self._layout.numel, self._layout.decayed
        self.numel, self.version = self._layout.sum_numel, 0
        self.shares = shared_terms(run, stage)
        """Other stage -> what it holds as well as this one: their sums of it are added up."""
        self._optimizer = FlatOptimizer(run.optimizer, end, decayed, self.dtype, self.device)
        # One vector and module a version held: version v lives in number v % len.
        weights = initial_weights(run, self._layout, self.device)
        self._weights = [weights]
        if run.delayed_updates:
            self._weights.append(weights.clone())
        # The decoder's matrices in bfloat16, for bfloat16 runs: see `Matrix`. They are the decayed weights.
        low = decayed if run.dtype == "bfloat16" and not run.brings_model else 0
        self._low = [flat[:low].to(torch.bfloat16) for flat in self._weights]
        self._modules = [self._bind(self._body.module(), number) for number in range(len(self._weights))]
        self._parameters = [dict(module.named_parameters()) for module in self._modules]
        self._sums: dict[int, torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []
        self._saved_bytes = self._loads = 0
        self._statistics = initial_statistics(run, self._layout, self.device)
        """Of batch norms: of the newest version only, since training does not read them."""

    # --- microbatches -----------------------------------------------------------------------------------

    def forward(
        self, mb: Microbatch, inputs: Sequence[Wire], *, grad: bool = True, codec: str | None = None
    ) -> Forward:
        """Compute a microbatch up to the hand-over to the next stage.

        `inputs`: as `swarm.model.stage_io` has them, such as [tokens [B, T+1]] for the decoder's first stage
        and [hidden [B, T, H], labels [B, T]] for its others; what has a gradient with the forward codec.
        `outputs` are those of the next stage. `grad=False`: no graph is kept, for a replay that only feeds a
        deeper stage; its backward would recompute. `codec`: of the outputs, one that `codec.adaptive` allows;
        None: the manifest's.

        Raises:
            Refused: an input is not what the run prescribes, or an output is not finite.
            Stale, NotReady: the weights of that step are not held any more, or yet.
        """
        return self.start_forward(mb, inputs, grad=grad, codec=codec).result()

    def start_forward(
        self, mb: Microbatch, inputs: Sequence[Wire], *, grad: bool = True, codec: str | None = None
    ) -> Pending[Forward]:
        """As `forward`, without waiting for the device."""
        assert not self.last, "the last stage has a loss and no output"
        version = self._held_version(mb)
        kept = [Encoded(meta, buffers) for meta, buffers in inputs]
        entered = self._enter(kept)
        keep = grad and not self.recompute
        with torch.set_grad_enabled(keep):
            computed = self._compute(mb, version, entered)
        outputs = self._encode_outputs(mb, entered, computed, codec)
        graph, loads = computed if keep else None, self._loads
        return Pending(
            lambda: Forward(mb, version, kept, [output.result() for output in outputs], graph, loads)
        )

    def backward(self, fwd: Forward, grads_out: Sequence[Wire], *, add: bool) -> tuple[Encoded, ...]:
        """The gradients of the inputs that have one, from those of the outputs.

        `add`: also add the gradient of the weights to the sum of the step (which must have begun). Otherwise
        the sum is not touched. May be called again for the same `fwd`: it recomputes.

        Raises:
            As `gradients` and `add`.
        """
        return self.start_backward(fwd, grads_out, add=add).result()

    def start_backward(
        self, fwd: Forward, grads_out: Sequence[Wire], *, add: bool
    ) -> Pending[tuple[Encoded, ...]]:
        """As `backward`, without waiting for the device. Added to the sum only if the result says so."""
        found = self.gradients(fwd, grads_out, weights=add)
        return Pending(lambda: self._finished(found, add=add))

    def gradients(self, fwd: Forward, grads_out: Sequence[Wire], *, weights: bool) -> Gradients:
        """The gradients of the inputs and, with `weights`, of the weights; does not wait for the device.

        Raises:
            Refused: `grads_out` are not what the run prescribes. Of the answer, if it is not finite.
            Stale: the weights it was computed with are gone.
        """
        if self._held_version(fwd.mb) != fwd.version or self._loads != fwd.loads:
            raise Stale(f"{fwd.mb} was computed with weights that are gone", version=self.version)
        grads = self._decode_grads(grads_out)
        if not weights and not self._gives_gradients:
            return self._nothing(fwd.mb)
        graph, fwd.graph = fwd.graph, None
        if graph is None:
            graph = self._compute(fwd.mb, fwd.version, self._enter(fwd.inputs))
        return self._differentiate(fwd.mb, fwd.version, graph, grads, weights=weights, answers=fwd.inputs)

    def loss_backward(
        self, mb: Microbatch, inputs: Sequence[Wire], *, add: bool
    ) -> tuple[float, tuple[Encoded, ...]]:
        """The last stage's forward, loss and backward: (mean loss, gradients of the inputs that have one).

        Inputs as in `forward`.

        Raises:
            As `loss_gradients` and `add`.
        """
        return self.start_loss_backward(mb, inputs, add=add).result()

    def start_loss_backward(
        self, mb: Microbatch, inputs: Sequence[Wire], *, add: bool
    ) -> Pending[tuple[float, tuple[Encoded, ...]]]:
        """As `loss_backward`, without waiting for the device."""
        found = self.loss_gradients(mb, inputs, weights=add)
        return Pending(lambda: (found.loss, self._finished(found, add=add)))

    def loss_gradients(self, mb: Microbatch, inputs: Sequence[Wire], *, weights: bool) -> Gradients:
        """As `gradients`, of the last stage: its forward, loss and backward.

        Raises:
            Refused: an input is not what the run prescribes, or the loss is not finite.
            Stale, NotReady: the weights of that step are not held any more, or yet.
        """
        assert self.last, "only the last stage has a loss"
        version = self._held_version(mb)
        taken = [Encoded(meta, buffers) for meta, buffers in inputs]
        wanted = weights or self._gives_gradients
        with torch.set_grad_enabled(wanted):
            computed = self._compute(mb, version, self._enter(taken))
        # This waits for the forward, also on CUDA. It costs the device one launch, not those of the backward.
        loss = computed.outputs[0].item()
        if not math.isfinite(loss):
            raise Refused(f"the loss of {mb} is not finite: {loss}")
        if not wanted:
            found = self._nothing(mb)
        else:
            found = self._differentiate(mb, version, computed, [None], weights=weights, answers=taken)
        found.loss = loss
        return found

    def add(self, found: Gradients) -> None:
        """Add the gradients of the weights to the sum of their step, which must have begun.

        Raises:
            Refused: they are beyond what is added exactly; the sum is as it was.
            Stale: the weights they were computed with are gone.
            NotReady: there is no sum of that step.
            SumLost: it broke part-way; see there.
        """
        t = found.mb.t
        if self._loads != found.loads:
            raise Stale(f"{found.mb} was computed with weights that are gone", version=self.version)
        total = self.sum(t)
        self._check_terms(found)
        try:
            for name, term in found.terms.items():
                start, end, _ = self._layout.terms[name]
                if self.run.adds_exactly:
                    add_exact(total[start:end], term)
                else:
                    total[start:end].add_(term.reshape(-1))
        except BaseException as error:  # no memory, perhaps: some parameters have it and some do not
            total.zero_()
            raise SumLost(f"adding {found.mb} broke ({error}): the sum of step {t} is lost", t=t) from error

    def subtract(self, mb: Microbatch, inputs: Sequence[Wire], grads_out: Sequence[Wire]) -> None:
        """Take a microbatch out of the sum again: compute it once more and subtract.

        `inputs` and `grads_out` as they were (none for the last stage). The gradient is the negative, bit for
        bit, of what was added; the sum is what it was before (up to rounding, where the run adds floats).

        Raises:
            As `forward` and `backward`.
        """
        version = self._held_version(mb)
        entered = self._enter([Encoded(meta, buffers) for meta, buffers in inputs])
        if not self.last and not grads_out:
            raise Refused(f"undoing {mb} takes the gradient of its output")
        given = [] if self.last else self._decode_grads(grads_out)
        computed = self._compute(mb, version, entered)
        # Not in place: with codec none the gradient is the caller's memory.
        against = [grad.neg() for grad in given] or [torch.ones_like(computed.outputs[0]).neg()]
        computed = computed._replace(statistics={name: -told for name, told in computed.statistics.items()})
        self.add(self._differentiate(mb, version, computed, against, weights=True, answers=None))

    # --- the sums of steps ------------------------------------------------------------------------------

    def begin(self, t: int) -> None:
        """Make an all-zero sum for step `t`, unless there is one."""
        if t not in self._sums:
            # Reused memory: fresh pages would cost more than zeroing.
            flat = (
                self._spare.pop()
                if self._spare
                else torch.empty(self.numel, dtype=self.sum_dtype, device=self.device)
            )
            self._sums[t] = flat.zero_()

    def sum(self, t: int) -> torch.Tensor:
        """The gradients of step `t` added up over microbatches (not divided by M): 1-D, the live vector.

        Of `sum_dtype`: int64 where the run adds exactly, see `swarm.model.fixed_point`; `settle` gives its
        value.

        Raises:
            NotReady, Stale: there is no sum of that step.
        """
        found = self._sums.get(t)
        if found is not None:
            return found
        if t < self.version:
            raise Stale(
                f"step {t} is over: stage {self.stage} is at weights {self.version}", version=self.version
            )
        raise NotReady(f"step {t} has not begun at stage {self.stage}", version=self.version)

    def add_to_sum(self, t: int, other: torch.Tensor) -> None:
        """Add another replica's sum of step `t`, of `sum_dtype`, to this one's.

        Raises:
            NotReady, Stale: there is no sum of that step.
        """
        self.sum(t).add_(other.to(self.device))

    def settle(self, total: torch.Tensor) -> torch.Tensor:
        """The value of a sum of `sum_dtype`, in `dtype`: what `apply` takes."""
        return to_float(total, self.dtype) if self.sum_dtype == torch.int64 else total

    def drop_sum(self, t: int) -> None:
        """Forget the sum of step `t`, if there is one."""
        flat = self._sums.pop(t, None)
        if flat is not None and not self._spare:  # one is enough: it is there for the next step's
            self._spare.append(flat)

    def apply(self, t: int, reduced: torch.Tensor, total_sqnorm: float) -> None:
        """Optimizer step `t`: makes weights of version t + 1; sums of steps up to `t` are dropped.

        `reduced`: the settled sum over all M microbatches, `complete`, 1-D, any device. The gradient
        is its mean, reduced / M. `total_sqnorm`: `self.sqnorm(reduced)` added up over all stages, so
        sqrt(total_sqnorm) / M is the norm that is clipped.

        Raises:
            Stale, NotReady: the weights are not of version t.
            SetupError: the gradient is not finite: the run diverged.
        """
        if t != self.version:
            cls = Stale if t < self.version else NotReady
            raise cls(f"step {t} cannot be applied to weights {self.version}", version=self.version)
        if reduced.shape != (self.numel,) or reduced.dtype != self.dtype:
            raise Refused(
                f"the gradient of stage {self.stage} has {list(reduced.shape)} numbers of {reduced.dtype}; "
                f"expected [{self.numel}] of {self.dtype}"
            )
        if not 0.0 <= total_sqnorm < math.inf:
            raise SetupError(
                f"the gradient of step {t} is not finite: the run diverged; "
                "start it again with a lower optimizer.lr"
            )
        use_threads_of(self.run)
        spec, M = self.run.optimizer, self.run.M
        scale = 1.0 / M
        if spec.clip_norm:
            scale *= min(1.0, spec.clip_norm / (math.sqrt(total_sqnorm) / M + 1e-6))
        old, new = self._weights_of(t), self._weights_of(t + 1)
        gradient, told = reduced.to(self.device).split([self._layout.numel, self._layout.statistics_numel])
        self._optimizer.step(t, spec.lr_at(t, self.run.steps), old, new, gradient, scale)
        self._take_statistics(told)
        self._weights_changed(t + 1)
        self.version = t + 1
        for done in [s for s in self._sums if s <= t]:
            self.drop_sum(done)

    def shared_part(
        self, reduced: torch.Tensor, other: Stage, start: int = 0, end: int | None = None
    ) -> torch.Tensor:
        """What `other` needs of this stage's settled sum: 1-D, in the order of `shares[other]`; of that the
        numbers from `start` to `end`, and no others are copied.

        Raises:
            Refused: that stage holds nothing of what this one does.
        """
        end, at = self.shared_numel(other) if end is None else end, 0
        parts: list[torch.Tensor] = []
        for name in self.shares[other]:
            span = self._layout.terms[name]
            first, last = max(start - at, 0), min(end - at, span.end - span.start)
            if first < last:
                parts.append(reduced[span.start + first : span.start + last])
            at += span.end - span.start
        return torch.cat(parts)

    def shared_numel(self, other: Stage) -> int:
        """Numbers in `shared_part`, of either; raises as that."""
        names = self.shares.get(other)
        if not names:
            raise Refused(f"stage {other} shares no weights with stage {self.stage}")
        return sum(self._layout.terms[name].shape.numel() for name in names)

    def complete(self, reduced: torch.Tensor, shared: Mapping[Stage, torch.Tensor]) -> torch.Tensor:
        """This stage's settled sum with what the other stages found of the weights that they share with it.

        `shared`: stage -> its `shared_part`. Added in the order of the stages, so that all end with the same.
        Touches nothing but its arguments: any thread may call it.

        Raises:
            Refused: a part is missing, or is not as long as it should be.
        """
        parts: dict[str, dict[Stage, torch.Tensor]] = {}
        for stage, names in self.shares.items():
            spans = [self._layout.terms[name] for name in names]
            sizes = [span.end - span.start for span in spans]
            part = shared.get(stage)
            if part is None or part.shape != (sum(sizes),) or part.dtype != reduced.dtype:
                due = f"[{sum(sizes)}] of {reduced.dtype}"
                raise Refused(f"of the weights it shares, stage {stage} gave {_form(part)}; due was {due}")
            for name, own in zip(names, part.split(sizes), strict=True):
                parts.setdefault(name, {})[stage] = own
        if not parts:
            return reduced
        whole = reduced.clone()
        for name, found in parts.items():
            start, end, _ = self._layout.terms[name]
            found[self.stage] = reduced[start:end]
            total = torch.zeros_like(whole[start:end])
            for stage in sorted(found):
                total += found[stage]
            whole[start:end] = total
        return whole

    def sqnorm(self, reduced: torch.Tensor) -> float:
        """This stage's share of `total_sqnorm`; a weight that several stages hold counts at the first."""
        earlier = {name for stage, names in self.shares.items() if stage < self.stage for name in names}
        if not earlier:
            return sqnorm(reduced[: self._layout.numel])
        spans = [span for name, span in self._layout.spans.items() if name not in earlier]
        own = [reduced[start:end] for start, end, _ in spans]
        return sqnorm(torch.cat(own)) if own else 0.0

    def _take_statistics(self, told: torch.Tensor) -> None:
        """Batch norms: new = (1 - momentum) · old + momentum · mean over the step's microbatches."""
        means = told * (1.0 / self.run.M)
        for (start, end, _), momentum in self._layout.statistics.values():
            old = self._statistics[start:end]
            old.mul_(1.0 - momentum).add_(means[start:end], alpha=momentum)

    # --- the state --------------------------------------------------------------------------------------

    def digest(self, *, canonical: bool = True) -> str:
        """32 hex digits of the newest weights: SHA-256 of their bytes.

        Not `canonical`: comparable among devices of one kind only, and on a GPU computed there, since
        bringing gigabytes to the host at every step would cost more than the step.
        """
        vectors = [self._weights_of(self.version)]
        if self._statistics.numel():
            vectors.append(self._statistics)
        if canonical or self.device.type == "cpu":
            return _sha256(*vectors)
        digests = [device_digest(vector) for vector in vectors]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()[:32]

    def state(self) -> dict[str, torch.Tensor]:
        """All that version `self.version` is made of: flat vectors, copied to the CPU.

        `weights`, the optimizer's vectors, `statistics` if there are batch norms, and with delayed updates
        `weights_previous`, which the next step is computed with.
        """
        return {
            name: vector.detach().to("cpu", copy=True)
            for name, vector in self._state_vectors(self.version).items()
        }

    def load_state(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Become version `version`; sums and microbatches in flight are void.

        Raises:
            Refused: names, shapes, dtypes or numbers are not what this stage has; nothing is changed.
        """
        if version < 0:
            raise Refused(f"a state of version {version}")
        mine = self._state_vectors(version)
        if set(tensors) != set(mine):
            raise Refused(f"a state of {sorted(tensors)[:10]}; stage {self.stage} has {sorted(mine)}")
        for name, vector in mine.items():
            other = tensors[name]
            if other.shape != vector.shape or other.dtype != vector.dtype:
                raise Refused(
                    f"state {name} has {list(other.shape)} numbers of {other.dtype}; "
                    f"expected {list(vector.shape)} of {vector.dtype}"
                )
            if other.dtype.is_floating_point and other.numel():
                low, high = (bound.item() for bound in torch.aminmax(other))
                if not -math.inf < low <= high < math.inf:
                    raise Refused(f"state {name} is not finite")
        for t in list(self._sums):
            self.drop_sum(t)
        for name, vector in mine.items():
            vector.copy_(tensors[name])
        for held in range(version, version + len(self._weights)):
            self._weights_changed(held)
        self.version = version
        self._loads += 1

    @property
    def state_bytes(self) -> int:
        """Bytes of `state`: what a newcomer has to download."""
        return sum(vector.nbytes for vector in self._state_vectors(self.version).values())

    def free(self) -> None:
        """Release every tensor: the device's memory is its owner's again. Nothing works after it."""
        self._weights, self._low, self._spare = [], [], []
        self._modules, self._parameters, self._sums = [], [], {}
        self._optimizer.vectors = {}
        self._statistics = self._statistics[:0].clone()

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The newest weights and batch norms' statistics by full name, copied to the CPU."""
        flat = self._weights_of(self.version).detach().cpu().clone()
        statistics = self._statistics.cpu().clone()
        return {**dict(self._layout.views(flat)), **dict(self._layout.statistics_views(statistics))}

    def saved_bytes(self) -> int:
        """Bytes that one microbatch in flight holds, measured once with a microbatch of zeros."""
        if not self._saved_bytes:
            self._saved_bytes = self._measure()
        return self._saved_bytes

    def rehearse(self) -> str:
        """32 hex digits of all that a made-up microbatch gives, forward and backward; nothing is kept.

        With the weights of version 0, peers with the same digits compute alike: they are of one kind. The
        time that it takes gives the speed.
        """
        entered = self._made_up()
        computed = self._compute(Microbatch(0, 0), self.version, entered)
        ones = [torch.ones_like(output) for output in computed.outputs]
        grads, terms = self._autograd(self.version, computed, ones, weights=True)
        given = [*computed.outputs, *computed.others.values(), *computed.statistics.values()]
        given += [grad for grad in (*grads, *terms.values()) if grad is not None]
        if self.device.type == "cpu":
            return _sha256(*given)
        return hashlib.sha256("".join(map(device_digest, given)).encode()).hexdigest()[:32]

    # --- inside -----------------------------------------------------------------------------------------

    def _zeros(self) -> Entered:
        """A microbatch of zeros, as `_enter` gives it."""
        taken = [
            torch.zeros(what.shape, dtype=_dtype(what), device=self.device if what.graded else "cpu")
            for what in self._body.takes
        ]
        return self._placed(self._body.enter(taken))

    def _made_up(self) -> Entered:
        """A microbatch of numbers that are the same everywhere, as `_enter` gives it."""
        generator = torch.Generator().manual_seed(1)
        taken: list[torch.Tensor] = []
        for what in self._body.takes:
            dtype, device = _dtype(what), self.device if what.graded else torch.device("cpu")
            if what.below:
                made = torch.randint(what.least, what.below, what.shape, generator=generator)
            elif dtype.is_floating_point:  # exact in every dtype, and spread like hidden states
                made = torch.randint(-128, 128, what.shape, generator=generator) / 64
            else:
                made = torch.zeros(what.shape)
            taken.append(made.to(device, dtype))
        return self._placed(self._body.enter(taken))

    def _bind(self, module: nn.Module, number: int) -> nn.Module:
        views = dict(self._layout.views(self._weights[number]))
        replace_parameters(module, lambda name, _: views[name])
        low = self._low[number]
        for name, part in module.named_modules():
            if isinstance(part, Matrix) and low.numel():
                start, end, shape = self._layout.spans[f"{name}.weight"]
                part.low = low[start:end].view(shape)
        return module.to(self.device)

    def _weights_changed(self, version: int) -> None:
        low = self._low[version % len(self._low)]
        low.copy_(self._weights_of(version)[: low.numel()])

    def _weights_of(self, version: int) -> torch.Tensor:
        return self._weights[version % len(self._weights)]

    def _state_vectors(self, version: int) -> dict[str, torch.Tensor]:
        vectors = {"weights": self._weights_of(version), **self._optimizer.vectors}
        if self._statistics.numel():
            vectors["statistics"] = self._statistics
        if self.run.delayed_updates:
            vectors["weights_previous"] = self._weights_of(version + 1)
        return vectors

    def _held_version(self, mb: Microbatch) -> int:
        """The weight version that `mb` is computed with, or Stale, NotReady or Refused."""
        if not (0 <= mb.t < self.run.steps and 0 <= mb.m < self.run.M):
            raise Refused(f"no microbatch {mb} in a run of {self.run.steps} steps of {self.run.M}")
        wanted = self.run.weight_version(mb.t)
        if wanted > self.version:
            raise NotReady(
                f"{mb} needs weights {wanted}; stage {self.stage} is at {self.version}", version=self.version
            )
        if wanted <= self.version - len(self._weights):
            raise Stale(
                f"{mb} needs weights {wanted}; stage {self.stage} is at {self.version}", version=self.version
            )
        return wanted

    @property
    def _gives_gradients(self) -> bool:
        """Whether the stage before expects gradients."""
        return any(what.graded for what in self._body.takes)

    def _enter(self, inputs: Sequence[Encoded]) -> Entered:
        """The inputs that arrived, checked, as the stage function's entries."""
        takes = self._body.takes
        if len(inputs) != len(takes):
            raise Refused(f"{len(inputs)} tensors for stage {self.stage}; expected {len(takes)}")
        # Values that only pass are checked too: a wrong one should be refused where it enters.
        return self._placed(
            self._body.enter([self._decode(what, came) for what, came in zip(takes, inputs, strict=True)])
        )

    def _decode(self, what: StageInput, came: Encoded) -> torch.Tensor:
        """On the device, if it has a gradient, else on the host."""
        allowed = self.run.codec.allowed_at(self.stage - 1) if what.graded else "none"
        tensor = decode(
            *came,
            device=self.device if what.graded else "cpu",
            expect_shape=what.shape,
            expect_dtype=_dtype(what),
            expect_codec=allowed,
            name=what.name,
        )
        if what.below and tensor.numel():
            low, high = (int(end) for end in tensor.to(torch.int64).aminmax())
            if high >= what.below:
                raise Refused(f"{what.name} hold {high}; the vocabulary has {what.below}")
            if low < what.least:
                raise Refused(f"{what.name} hold {low}; they are {what.least} or more")
        return aligned(tensor)

    def _placed(self, passing: list[torch.Tensor]) -> Entered:
        values: list[torch.Tensor | None] = []
        for entry, value in zip(self._body.entries, passing, strict=True):
            if entry.dtype is None:
                values.append(None)
            else:
                values.append(value if entry.graded else to_device(value.to(entry.dtype), self.device))
        return Entered(values, passing)

    def _encode_outputs(
        self, mb: Microbatch, entered: Entered, computed: Computed, codec: str | None
    ) -> list[Pending[Encoded]]:
        name = f"the output of stage {self.stage} for {mb}"
        codec, body = codec or self.run.codec.forward_at(self.stage), self._body
        graded = iter(computed.outputs)
        pending: list[Pending[Encoded]] = []
        for number, what in enumerate(body.gives):
            if what.graded:
                pending.append(start_encode(next(graded), codec, name=name))
            elif number in body.passes:
                pending.append(start_encode(entered.passing[body.passes[number]], "none", name=name))
            else:
                pending.append(start_encode(computed.others[number].to(_dtype(what)), "none", name=name))
        return pending

    def _decode_grads(self, grads_out: Sequence[Wire]) -> list[torch.Tensor]:
        codec = self.run.codec
        due = [what for what in self._body.gives if what.graded]
        if len(grads_out) != len(due):
            raise Refused(f"{len(grads_out)} gradients for stage {self.stage}; expected {len(due)}")
        return [
            aligned(
                decode(
                    *grad,
                    device=self.device,
                    expect_shape=what.shape,
                    expect_dtype=_dtype(what),
                    expect_codec=[
                        codec.backward_at(self.stage, sent) for sent in codec.allowed_at(self.stage)
                    ],
                    name="the gradient",
                )
            )
            for what, grad in zip(due, grads_out, strict=True)
        ]

    def _compute(self, mb: Microbatch, version: int, entered: Entered) -> Computed:
        use_threads_of(self.run)
        module, body = self._modules[version % len(self._modules)], self._body
        leaves: list[torch.Tensor] = []
        values: list[torch.Tensor | None] = []
        for entry, value in zip(body.entries, entered.values, strict=True):
            if value is not None and entry.graded:
                assert entry.dtype is not None
                leaves.append(value.requires_grad_(torch.is_grad_enabled()))
                value = value.to(entry.dtype)
            values.append(value)
        try:
            with self._autocast():
                made, statistics = body.compute(module, values, mb)
        except (IndexError, RuntimeError) as error:
            # A whole number from another peer with unknown bounds.
            if isinstance(error, IndexError) or "index" in str(error):
                raise Refused(f"stage {self.stage} cannot look up what came for {mb}: {error}") from error
            raise
        if self.last:
            return Computed(leaves, [made[0]], {}, statistics)
        # What is sent again later must be what was sent now, whatever becomes of the weights meanwhile.
        weights = {vector.untyped_storage().data_ptr() for vector in self._weights}
        made = [
            value if value is None or value.untyped_storage().data_ptr() not in weights else value.clone()
            for value in made
        ]
        graded = [made[number].to(_dtype(what)) for number, what in enumerate(body.gives) if what.graded]
        others = {
            number: made[number]
            for number, what in enumerate(body.gives)
            if not what.graded and number not in body.passes
        }
        return Computed(leaves, graded, others, statistics)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.run.dtype == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _nothing(self, mb: Microbatch) -> Gradients:
        return Gradients(mb, Pending(tuple), {}, [], frozenset(), self._loads)

    def _differentiate(
        self,
        mb: Microbatch,
        version: int,
        computed: Computed,
        grads_out: Sequence[torch.Tensor | None],
        *,
        weights: bool,
        answers: Sequence[Encoded] | None,
    ) -> Gradients:
        """Run autograd. `answers`: the gradients that came; None: no caller waits for the gradients of the
        inputs.
        """
        grads, terms = self._autograd(version, computed, grads_out, weights=weights)
        if weights:
            terms |= computed.statistics
        # Nothing in a vector is larger than its norm, found in half the time: as a rule that is enough.
        exact = self.run.adds_exactly
        norms = [torch.linalg.vector_norm(term) for term in terms.values()] if exact else []
        answer: Pending[tuple[Encoded, ...]] = Pending(tuple)
        if answers is not None:
            answer = self._encode_gradients(mb, computed.leaves, grads, answers)
        told = frozenset(computed.statistics)
        return Gradients(mb, answer, terms, norms, told, self._loads, terms_wanted=weights)

    def _autograd(
        self,
        version: int,
        computed: Computed,
        grads_out: Sequence[torch.Tensor | None],
        *,
        weights: bool,
    ) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor]]:
        """(gradients of the leaves, by name those of the weights that have a part in it).

        `.grad` is not used: several microbatches are differentiated at once with the same parameters.
        """
        # A cut may leave an output that no weight here has a part in.
        roots = [(y, g) for y, g in zip(computed.outputs, grads_out, strict=True) if y.requires_grad]
        parameters = {
            name: p for name, p in self._parameters[version % len(self._modules)].items() if p.requires_grad
        }
        wanted = [*computed.leaves, *(parameters.values() if weights else ())]
        if not roots or not wanted:
            return [None] * len(computed.leaves), {}
        use_threads_of(self.run)
        found = torch.autograd.grad([y for y, _ in roots], wanted, [g for _, g in roots], allow_unused=True)
        count = len(computed.leaves)
        terms = dict(zip(parameters, found[count:], strict=False))
        return list(found[:count]), {name: term for name, term in terms.items() if term is not None}

    def _finished(self, found: Gradients, *, add: bool) -> tuple[Encoded, ...]:
        """The answer to the stage before; with `add`, and if it is valid, the weights' gradients enter the
        sum.
        """
        answer = found.answer.result()
        if add:
            self.add(found)
        return answer

    def _check_terms(self, found: Gradients) -> None:
        limit = largest_term(self.run.M)
        if not found.norms or torch.stack(found.norms).max().item() <= limit:
            return
        beyond = [name for name, term in found.terms.items() if not term.abs().max().item() <= limit]
        if any(name in found.statistics for name in beyond):
            raise Refused(
                f"{beyond[0]} of stage {self.stage} for {found.mb} is beyond {limit:g}, the most that is "
                "added up exactly: give the model smaller inputs, or a norm before this one"
            )
        if beyond:
            raise Refused(
                f"the gradient of the weights of stage {self.stage} for {found.mb} is beyond {limit:g}"
            )

    def _encode_gradients(
        self,
        mb: Microbatch,
        leaves: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        answers: Sequence[Encoded],
    ) -> Pending[tuple[Encoded, ...]]:
        """The gradients of the inputs that have one, `answers` being all that came, for the stage before."""
        name = f"the gradient of stage {self.stage} for {mb}"
        graded = [came for what, came in zip(self._body.takes, answers, strict=True) if what.graded]
        pending = [
            start_encode(
                torch.zeros_like(leaf) if grad is None else grad,
                self.run.codec.backward_at(self.stage - 1, came.meta.codec),
                name=name,
                places=places_of(came),
            )
            for leaf, grad, came in zip(leaves, grads, graded, strict=True)
        ]
        return Pending(lambda: tuple(one.result() for one in pending))

    def _measure(self) -> int:
        seen: dict[int, int] = {}
        own = {flat.untyped_storage().data_ptr() for flat in (*self._weights, *self._low)}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        entered = self._zeros()
        mb = Microbatch(0, 0)
        # What was saved must stay alive while we count, or memory that is reused would count once.
        alive: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            alive.append(tensor)
            return note(tensor)

        if not self.recompute:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                computed = self._compute(mb, 0, entered)
            for output in computed.outputs:
                note(output)
        for value in entered.values:
            if value is not None:
                note(value)
        return sum(seen.values())


def _form(part: torch.Tensor | None) -> str:
    return "nothing" if part is None else f"{list(part.shape)} numbers of {part.dtype}"


def _dtype(what: StageInput) -> torch.dtype:
    return getattr(torch, what.dtype)


def sqnorm(vector: torch.Tensor) -> float:
    """The sum of squares, in float64 whatever the dtype: a stage's share of `total_sqnorm`.

    Replicas with the same bits get the same number on the same kind of device, whatever their thread counts.
    """
    return float(sum(_sum_of_squares(part) for part in vector.split(_REDUCE_SLICE)))


def _sum_of_squares(part: torch.Tensor) -> float:
    """torch shares one long sum among its threads, which decides its rounding; a row is one thread's."""
    squares = part.double().square()
    whole = squares.numel() - squares.numel() % _REDUCE_ROW
    rows = squares[:whole].view(-1, _REDUCE_ROW).sum(dim=1)
    return float((rows.sum() + squares[whole:].sum()).item())


def state_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """32 hex digits over all vectors of a `StageCompute.state()`, with their names, shapes and dtypes."""
    return _sha256(*(tensors[name] for name in sorted(tensors)), names=sorted(tensors))


def device_digest(vector: torch.Tensor) -> str:
    """32 hex digits from two sums modulo 2^64 over the bits, weighted by position; on the vector's device.

    Finds accidents, not forgeries: a change of any one element changes both sums.
    """
    flat = vector.detach().contiguous().view(-1)
    words = flat.view({1: torch.int8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    sums = [0, 0]
    for number, part in enumerate(words.split(_REDUCE_SLICE)):
        place = torch.arange(part.numel(), device=part.device, dtype=torch.int64) + number * _REDUCE_SLICE
        for i, factor in enumerate((0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D)):
            sums[i] += int((part.to(torch.int64) * ((place * factor) | 1)).sum().item())
    return "".join(f"{total % 2**64:016x}" for total in sums)


def _sha256(*vectors: torch.Tensor, names: Sequence[str] = ()) -> str:
    found = hashlib.sha256()
    for number, vector in enumerate(vectors):
        host = vector.detach().cpu().contiguous().view(-1)
        if names:
            found.update(f"{names[number]} {list(vector.shape)} {vector.dtype}\n".encode())
        found.update(host.view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]
