"""What a stage peer computes: the path of a microbatch through one stage, and of a step.

    forward          inputs -> `Boundary.enter` -> the stage function -> `Boundary.encode_outputs`
    gradients        gradients of the outputs -> autograd -> those of the inputs (the answer) and the weights
    loss_gradients   both in one, at the last stage
    add              the gradients of the weights -> the sum of their step (`GradientSums`)
    apply            the reduced sum -> weights of the next version (`StageState`)

Synchronous. Everything that comes from another peer is checked before use (I7); what is asked for with
weights that are not held is refused (I3).

Several threads may compute at once: `forward`, `gradients` and `loss_gradients` read weights and change
nothing. What changes sums (`add`, `subtract`, and `sums`) is called by one thread at a time; what changes
weights (`apply`, `load_state`, `free`) while nothing else is called.

With delayed updates step t is computed with version t - 1 while version t is being made, so the sums of two
steps may be alive at once.

The same inputs give the same bits on the same kind of device, however often they are computed, wherever they
lie in memory and however many cores there are: see `swarm.model.same_bits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from swarm.errors import DIVERGED, NotReady, Refused, SetupError, Stale
from swarm.ids import Microbatch, Stage
from swarm.manifest import Run
from swarm.model.boundary import Boundary, Computed, Entered
from swarm.model.fixed_point import largest_norm
from swarm.model.gpt import GptStage, replace_parameters, weights_dtype
from swarm.model.gradient_sum import Gradients, GradientSums, SharedWeights
from swarm.model.layout import stage_layout
from swarm.model.reductions import vectors_digest
from swarm.model.same_bits import storage_of, use_same_algorithms, use_threads_of
from swarm.model.stage_function import stage_function
from swarm.model.state import StageState
from swarm.wire.codec import Encoded


@dataclass(eq=False, slots=True)
class Forward:
    """One microbatch in flight at a stage. Keeps its graph until its backward (unless recomputed)."""

    mb: Microbatch
    loads: int
    """How many states had been loaded when it was computed."""
    inputs: Sequence[Encoded]
    """The inputs as they arrived: `StageCompute.subtract` needs them to retract it."""
    outputs: list[Encoded]
    """The inputs of the next stage."""
    graph: Computed | None = None
    """None when it is to be recomputed, or was used."""


class StageCompute:
    """One stage's maths, with its `state` and its `sums`; see above for threads."""

    def __init__(
        self, run: Run, stage: Stage, device: str = "cpu", *, recompute: bool = False,
        recompute_layers: bool = False, host_sums: bool = False,
    ) -> None:  # fmt: skip
        """Hold weights of version 0, a function of the run alone.

        `recompute`: keep only the input of a microbatch in flight and run its forward again in the backward:
        a third more compute for a fraction of the memory. `recompute_layers`: keep the input of each layer,
        and run its forward again in the backward: as much compute, and of what a layer saves there is one at
        a time. The results are the same to the last bit. `host_sums`: the sums of steps are in the machine's
        memory; they are the same numbers there, and each microbatch's gradients are brought to it.

        Raises:
            SetupError: this device cannot compute this run.
        """
        self.run, self.stage, self.recompute, self._host_sums = run, stage, recompute, host_sums
        self.device = torch.device(device)
        if self.device.type == "mps" and run.dtype == "float64":
            raise SetupError('dtype = "float64" cannot be computed on --device mps: take --device cpu')
        use_same_algorithms(self.device)
        if self.device.type == "cuda":
            # Before threads need it: one that comes while another imports it finds kernels unregistered.
            import bitsandbytes.functional  # noqa: F401
        self._last = stage == run.S - 1
        self._function = stage_function(run, stage)
        self.passes: Collection[int] = self._function.passes
        """The places of outputs that are inputs, unchanged: tokens, labels, masks."""
        if recompute_layers and run.model.kind != "gpt":
            raise SetupError(
                f"--recompute-layers: only the built-in decoder has layers that are known, and model.kind = "
                f'"{run.model.kind}": take --recompute, which keeps the inputs of the whole stage'
            )
        if recompute_layers and recompute:
            raise SetupError("--recompute keeps less than --recompute-layers: take one of them")
        self._recompute_layers = recompute_layers
        self._boundary = Boundary(run, stage, self._function, self.device)
        self.layout = stage_layout(run, stage)
        self.numel = self.layout.sum_numel
        """Numbers in the sum of a step."""
        self.state = StageState(run, stage, self.layout, self.device)
        self.sums = GradientSums(run, stage, self.layout, self.state, on_host=host_sums)
        self.shared = SharedWeights(run, stage, self.layout, self.device)
        self._bind()

    def _bind(self) -> None:
        self._modules = [
            self.state.bind(self._function.module(), version) for version in range(self.state.versions)
        ]
        for module in self._modules:
            if isinstance(module, GptStage):
                module.recomputes_layers = self._recompute_layers
        self._parameters = [dict(module.named_parameters()) for module in self._modules]

    @property
    def version(self) -> int:
        """Newest weight version held."""
        return self.state.version

    # --- microbatches -----------------------------------------------------------------------------------

    def forward(self, mb: Microbatch, inputs: Sequence[Encoded], *, grad: bool = True) -> Forward:
        """Compute a microbatch up to the hand-over to the next stage.

        `inputs`: as `swarm.model.stage_io` has them, such as [tokens [B, T+1]] for the decoder's first stage
        and [hidden [B, T, H], tokens] for its others; what has a gradient with the forward codec.
        `outputs` are those of the next stage. `grad=False`: no graph is kept, for a replay that only feeds a
        deeper stage; its backward would recompute.

        Raises:
            Refused: an input is not what the run prescribes, or an output is not finite.
            Stale, NotReady: the weights of that step are not held any more, or yet.
        """
        assert not self._last, "the last stage has a loss and no output"
        version, keep = self._held_version(mb), grad and not self.recompute
        entered = self._boundary.enter(inputs)
        computed = self._compute(mb, version, entered)
        outputs = self._boundary.encode_outputs(mb, entered, computed)
        return Forward(mb, self.state.loads, inputs, outputs, computed if keep else None)

    def evaluate(self, version: int, inputs: Sequence[Encoded]) -> list[Encoded] | float:
        """The inputs of the next stage, or the loss, of samples that are not trained on, with these weights.

        `inputs`: as `forward` takes them.

        Raises: as `forward`.
        """
        mb = Microbatch(version, 0)  # as errors call it
        self._check_held(version, "an evaluation")
        entered = self._boundary.enter(inputs)
        computed = self._compute(mb, version, entered, drops=False)
        if not self._last:
            return self._boundary.encode_outputs(mb, entered, computed)
        loss = computed.outputs[0].item()
        if not math.isfinite(loss):
            raise Refused(f"the loss of the evaluation of version {version} is not finite: {loss}")
        return loss

    def gradients(self, fwd: Forward, grads_out: Sequence[Encoded], *, weights: bool) -> Gradients:
        """The gradients of the inputs and, with `weights`, of the weights, from those of the outputs.

        May be called again for the same `fwd`: it recomputes.

        Raises:
            Refused: `grads_out` are not what the run prescribes, or the answer is not finite.
            Stale: the weights it was computed with are gone.
        """
        version = self._held_version(fwd.mb)
        if self.state.loads != fwd.loads:
            raise self._gone(fwd.mb)
        grads = self._boundary.decode_gradients(grads_out)
        if not weights and not self._boundary.answers:
            return Gradients(mb=fwd.mb, loads=self.state.loads)
        graph, fwd.graph = fwd.graph, None
        if graph is None:
            graph = self._compute(fwd.mb, version, self._boundary.enter(fwd.inputs))
        found = self._differentiate(fwd.mb, version, graph, grads, weights=weights, inputs=fwd.inputs)
        found.arrived = [torch.linalg.vector_norm(grad) for grad in grads]
        return found

    def loss_gradients(self, mb: Microbatch, inputs: Sequence[Encoded], *, weights: bool) -> Gradients:
        """As `forward` and `gradients`, of the last stage: its forward, mean loss and backward.

        Raises:
            Refused: an input is not what the run prescribes, or the loss or the answer is not finite.
            Stale, NotReady: the weights of that step are not held any more, or yet.
        """
        assert self._last, "only the last stage has a loss"
        version = self._held_version(mb)
        computed = self._compute(mb, version, self._boundary.enter(inputs))
        loss = computed.outputs[0].item()
        if not math.isfinite(loss):
            raise Refused(f"the loss of {mb} is not finite: {loss}{DIVERGED}")
        found = Gradients(mb=mb, loads=self.state.loads)
        if weights or self._boundary.answers:
            found = self._differentiate(mb, version, computed, [None], weights=weights, inputs=inputs)
        found.loss = loss
        return found

    def gradients_of(
        self, mb: Microbatch, inputs: Sequence[Encoded], grads_out: Sequence[Encoded]
    ) -> Gradients:
        """Those of a microbatch that is computed again, from what was kept of it (`grads_out`: nothing at the
        last stage). Raises as `forward` and `gradients`.
        """
        if self._last:
            return self.loss_gradients(mb, inputs, weights=True)
        return self.gradients(Forward(mb, self.state.loads, inputs, []), grads_out, weights=True)

    def add(self, found: Gradients) -> None:
        """Add the gradients of the weights to the sum of their step, which must have begun. Raises as
        `GradientSums.add`, and Stale if the weights they were computed with are gone.
        """
        if self.state.loads != found.loads:
            raise self._gone(found.mb)
        self.sums.add(found)

    def subtract(self, mb: Microbatch, inputs: Sequence[Encoded], grads_out: Sequence[Encoded]) -> None:
        """Take a microbatch out of the sum again: compute it once more and subtract.

        `inputs` and `grads_out` as they were (none for the last stage). The gradient is the negative, bit for
        bit, of what was added; the sum is what it was before (up to rounding, where the run adds floats).
        Raises as `forward`, `gradients` and `add`.
        """
        if not self._last and not grads_out:
            raise Refused(f"undoing {mb} takes the gradient of its output")
        found = self.gradients_of(mb, inputs, grads_out)
        found.terms = {name: -term for name, term in found.terms.items()}
        self.add(found)

    # --- steps ------------------------------------------------------------------------------------------

    def apply(self, t: int, reduced: torch.Tensor, total_sqnorm: float) -> None:
        """Optimizer step `t`: makes weights of version t + 1; sums of steps up to `t` are dropped.

        `reduced`: the value of the sum over all M microbatches, `SharedWeights.complete`, 1-D, any device.
        The gradient is its mean, reduced / M. `total_sqnorm`: `SharedWeights.sqnorm(reduced)` added up over
        all stages, so sqrt(total_sqnorm) / M is the norm that is clipped.

        Raises:
            Stale, NotReady: the weights are not of version t.
            Refused: the gradient is not of this stage.
            SetupError: the gradient is not finite: the run diverged.
        """
        self.state.step(t, reduced, total_sqnorm)
        self.sums.move_to(t + 1, keep_later=True)

    def load_state(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Become version `version`; sums and microbatches in flight are void. Raises as `StageState.load`."""
        self.state.load(version, tensors)
        self.sums.move_to(version, keep_later=False)

    def snapshot(self, t: int) -> StageCompute:
        """The same stage with a copy of the weights of step `t` and an empty sum of it, for no other step.

        To compute the step again while the run goes on: 12 bytes a weight, in float32.

        Raises:
            Stale, NotReady: these weights are not held any more, or yet.
        """
        version = self._held_version(Microbatch(t, 0))
        other = copy(self)
        other.state = self.state.snapshot(version)
        other.sums = GradientSums(self.run, self.stage, self.layout, other.state, on_host=self._host_sums)
        other._bind()
        other.sums.begin(t)
        return other

    def nudged(self, above: float = 0.0, seed: int = 1) -> StageCompute:
        """The same stage, weights and sums, that takes what comes in as rounded otherwise: how far its
        results are from those of this one is how much rounding may change. Arguments: as `Boundary.nudged`.
        """
        other = copy(self)
        other._boundary = self._boundary.nudged(above, seed)
        return other

    def use_lock(self, lock: AbstractContextManager[object]) -> None:
        """Several threads will compute: `lock` is held where they may not at once."""
        self._function = replace(self._function, lock=lock)

    def free(self) -> None:
        """Release every tensor: the device's memory is its owner's again. Nothing works after it."""
        self.state.free()
        self.sums.free()
        self._modules, self._parameters = [], []

    def needs_others(self, t: int) -> bool:
        """Whether step `t` also takes what other stages, or islands, have found."""
        return self.run.meets_at(t) or bool(self.shared.names)

    # --- measured ---------------------------------------------------------------------------------------

    def saved_bytes(self) -> int:
        """Bytes that one microbatch in flight holds, measured with a microbatch of zeros."""
        entered = self._boundary.made_up(zeros=True)

        def compute() -> Sequence[torch.Tensor]:
            return [] if self.recompute else self._compute(Microbatch(0, 0), 0, entered).outputs

        return kept_bytes(compute, entered.values, self._modules)

    def rehearse(self) -> str:
        """32 hex digits of all that a made-up microbatch gives, forward and backward; nothing is kept.

        With the weights of version 0, peers with the same digits compute alike: they are of one kind. The
        time that it takes gives the speed.

        Raises:
            SetupError: this device finds other bits each time.
        """
        try:
            computed = self._compute(Microbatch(0, 0), self.version, self._boundary.made_up(zeros=False))
            ones = [torch.ones_like(output) for output in computed.outputs]
            grads, terms = self._autograd(self.version, computed, ones, weights=True)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            said = f"stage {self.stage} cannot be computed on {self.device}, which finds other bits each time"
            remedy = "batch.microbatch_threads = 1" if self.device.type == "cpu" else "--device cpu"
            raise SetupError(f"{said}: {str(error).split('. ')[0]}. Take {remedy}") from error
        given = [*computed.outputs, *computed.others.values(), *computed.statistics.values()]
        given += [grad for grad in grads if grad is not None]
        given += [term.to(self.state.dtype) for term in terms.values()]
        return vectors_digest(given, on_device=self.device.type != "cpu")

    # --- inside -----------------------------------------------------------------------------------------

    def _held_version(self, mb: Microbatch) -> int:
        """The weight version that `mb` is computed with, or Stale, NotReady or Refused."""
        if not (0 <= mb.t < self.run.steps and 0 <= mb.m < self.run.microbatches(mb.t)):
            raise Refused(f"no microbatch {mb} in a run of {self.run.steps} steps of {self.run.M}")
        wanted = self.run.weight_version(mb.t)
        self._check_held(wanted, str(mb))
        return wanted

    def _check_held(self, version: int, what: str) -> None:
        if not self.version - self.state.versions < version <= self.version:
            cls, at = NotReady if version > self.version else Stale, self.version
            raise cls(f"{what} needs weights {version}; stage {self.stage} is at {at}", version=at)

    def _gone(self, mb: Microbatch) -> Stale:
        return Stale(f"{mb} was computed with weights that are gone", version=self.version)

    @torch.enable_grad()
    def _compute(self, mb: Microbatch, version: int, entered: Entered, *, drops: bool = True) -> Computed:
        use_threads_of(self.run)
        module, function = self._modules[version % len(self._modules)], self._function
        named = self.run.named(mb) if drops else None
        try:
            leaves, (made, statistics) = function.apply(module, entered.values, named, self.device)
        except (IndexError, RuntimeError) as error:
            # A whole number from another peer with unknown bounds.
            if isinstance(error, IndexError) or "index" in str(error):
                raise Refused(f"stage {self.stage} cannot look up what came for {mb}: {error}") from error
            raise
        # What is sent again later must be what was sent now, whatever becomes of the weights meanwhile.
        made = [value.clone() if value is not None and self.state.holds(value) else value for value in made]
        others = {
            number: made[number]
            for number, what in enumerate(function.gives)
            if not what.graded and number not in function.passes
        }
        return Computed(leaves, function.graded(made), others, statistics)

    def _differentiate(
        self, mb: Microbatch, version: int, computed: Computed, grads_out: Sequence[torch.Tensor | None], *,
        weights: bool, inputs: Sequence[Encoded],
    ) -> Gradients:  # fmt: skip
        """Run autograd. `inputs`: all that came."""
        grads, terms = self._autograd(version, computed, grads_out, weights=weights)
        if weights:
            terms |= computed.statistics
        exact = self.run.adds_exactly
        return Gradients(
            mb=mb, loads=self.state.loads,
            norms=[largest_norm(term) for term in terms.values()] if exact else [],
            answer=self._boundary.encode_gradients(mb, computed.leaves, grads, inputs), terms=terms,
            statistics=frozenset(computed.statistics), terms_wanted=weights,
        )  # fmt: skip

    def _autograd(
        self, version: int, computed: Computed, grads_out: Sequence[torch.Tensor | None], *, weights: bool
    ) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor]]:
        """(gradients of the leaves, by name those of the weights that have a part in it).

        `.grad` is not used: several microbatches are differentiated at once with the same parameters.
        """
        # A cut may leave an output that no weight here has a part in.
        roots = [(y, g) for y, g in zip(computed.outputs, grads_out, strict=True) if y.requires_grad]
        parameters = self._parameters[version % len(self._parameters)] if weights else {}
        wanted = [*computed.leaves, *parameters.values()]
        if not roots or not wanted:
            return [None] * len(computed.leaves), {}
        use_threads_of(self.run)
        outputs, grads = zip(*roots, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        leaves: list[torch.Tensor | None] = [next(found) for _ in computed.leaves]
        return leaves, {name: term for name, term in zip(parameters, found, strict=True) if term is not None}


# --- bytes that a microbatch keeps --------------------------------------------------------------------------


def kept_bytes(
    compute: Callable[[], Iterable[torch.Tensor]], given: Iterable[torch.Tensor | None],
    modules: Iterable[nn.Module],
) -> int:  # fmt: skip
    """Bytes of what `compute` saves for its backward, returns, and is given; not what these modules hold."""
    own = {storage_of(t) for module in modules for t in (*module.parameters(), *module.buffers())}
    # What is counted stays alive meanwhile, or memory that is used again would count once.
    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: alive.append(t) or t, lambda t: t):
        alive += compute()
    alive += [tensor for tensor in given if tensor is not None]
    return sum(
        {storage_of(t): t.untyped_storage().nbytes() for t in alive if storage_of(t) not in own}.values()
    )


@lru_cache(maxsize=64)
def foretold_bytes(run: Run, stage: Stage) -> int:
    """What `StageCompute.saved_bytes` will measure on a peer of that stage: with tensors that have no memory.

    Raises:
        SetupError: the run's model cannot be built here.
    """
    function = stage_function(run, stage)
    number, cpu = weights_dtype(run), torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = function.module()
        replace_parameters(module, lambda _, old: torch.empty(old.shape, dtype=number))
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, torch.empty_like(buffer))
        if function.halves and not run.brings_model:  # as `StageState.bind` has the decoder's matrices
            for part in module.modules():
                if isinstance(part, nn.Linear):
                    part.weight = nn.Parameter(part.weight.detach().to(torch.bfloat16))
        given = Boundary(run, stage, function, cpu).made_up(zeros=True).values

        def compute() -> Sequence[torch.Tensor]:
            return function.graded(function.apply(module, given, Microbatch(0, 0), cpu)[1].values)

        return kept_bytes(compute, given, [module])
