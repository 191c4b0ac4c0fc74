"""What a stage peer computes: one stage's weights, the gradient sums of its steps, and the maths between.

Synchronous, and used from one thread at a time. Everything that comes from another peer is checked before use
(I7); what is asked for with weights that are not held is refused (I3).

Memory is flat: the weights are ONE vector (the parameters are views of it), so is the gradient sum of a step
(the parameters' `.grad` are views of it, so autograd adds in place and nothing is gathered), so are the
optimizer's moments. The decayed parameters come first, then the others, each in the module's order.

With delayed updates step t is computed with version t - 1 while version t is being made, so two versions are
held, in two vectors, and the sums of two steps may be alive at once.

The same inputs give the same bits on the same kind of device, however often they are computed.

A CUDA device is kept busy by launching ahead: `start_forward` and its like return before the device is done,
and what they return is asked for its result when the next one is launched. All of it is on one stream.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from swarm.data import token_dtype
from swarm.errors import NotReady, Refused, SetupError, Stale, SwarmError
from swarm.ids import Microbatch, Stage
from swarm.model.exact import add_exact, largest_term, to_float
from swarm.model.gpt import (
    Matrix,
    boundary_dtype,
    replace_parameters,
    stage_skeleton,
    weights_dtype,
)
from swarm.model.layout import initial_weights, layout_of
from swarm.model.optimizer import FlatOptimizer
from swarm.run import Run
from swarm.wire.buffers import Buffer
from swarm.wire.codec import (
    Encoded,
    Pending,
    TensorMeta,
    decode,
    encode,
    places_of,
    start_encode,
    to_device,
)
from swarm.wire.tensors import boundary_shape

Wire: TypeAlias = tuple[TensorMeta, Sequence[Buffer]]
"""A tensor as it came: its meta and its buffers. An `Encoded` is one."""

_REDUCE_SLICE = 1 << 20
"""Elements whose squares are summed at once: a fixed number, since it decides the rounding."""
_REDUCE_ROW = 1 << 10
"""Of which each row is summed by itself: `_REDUCE_SLICE` holds few enough that one thread adds the rows."""


class SumLost(SwarmError):
    """A backward broke part-way: the sum of step `t` is void and was set to zero, with all it had.

    The microbatches that it held have to be computed again. The cause is chained.
    """

    code = "sum-lost"

    def __init__(self, text: str, *, t: int) -> None:
        super().__init__(text)
        self.t = t


@dataclass(eq=False, slots=True)
class Forward:
    """One microbatch in flight at a stage. Keeps its graph until its backward (unless recomputed)."""

    mb: Microbatch
    version: int
    """Of the weights that it was computed with."""
    inputs: list[Encoded]
    """As they came: what `StageCompute.subtract` needs to undo it."""
    outputs: list[Encoded]
    """For the next stage: hidden, labels."""
    graph: tuple[torch.Tensor, torch.Tensor] | None = None
    """(input leaf, output); None when it is to be recomputed, or was used."""
    loads: int = 0
    """How many states had been loaded when it was computed."""


class StageCompute:
    """One stage's weights, sums and maths. Synchronous; used from one thread at a time."""

    def __init__(self, run: Run, stage: Stage, device: str = "cpu", *, recompute: bool = False) -> None:
        """Weights of version 0, a function of the run alone.

        `recompute`: keep only the input of a microbatch in flight and run its forward again in the
        backward: a third more compute for a fraction of the memory.

        Raises:
            SetupError: this device cannot compute this run.
        """
        self.run, self.stage, self.recompute = run, stage, recompute
        self.device = torch.device(device)
        self.dtype = weights_dtype(run)
        self.sum_dtype = torch.int64 if run.adds_exactly else self.dtype
        self.first, self.last = stage == 0, stage == run.S - 1
        module = stage_skeleton(run, stage)
        self._layout = layout_of(module)
        end, decayed = self._layout.numel, self._layout.decayed
        self.numel, self.version = end, 0
        self._optimizer = FlatOptimizer(run.optimizer, end, decayed, self.dtype, self.device)
        # One vector and module a version held: version v lives in number v % len.
        weights = initial_weights(run, self._layout, self.device)
        self._weights = [weights]
        if run.delayed_updates:
            self._weights.append(weights.clone())
        # The matrices in bfloat16, for bfloat16 runs: see `Matrix`. They are the decayed weights.
        low = decayed if run.dtype == "bfloat16" else 0
        self._low = [flat[:low].to(torch.bfloat16) for flat in self._weights]
        self._modules = [self._bind(copy.deepcopy(module), number) for number in range(len(self._weights))]
        self._parameters = [dict(module.named_parameters()) for module in self._modules]
        self._grads_of: list[int | None] = [None] * len(self._modules)
        self._sums: dict[int, torch.Tensor] = {}
        self._lives: dict[int, int] = {}
        """Step -> number of its sum's present life: it changes when the sum is begun or lost."""
        self._life = itertools.count()
        self._spare: list[torch.Tensor] = []
        self._saved_bytes = self._loads = 0

        B, T = run.batch.microbatch_size, run.data.sequence_length
        self._tokens_shape, self._labels_shape = (B, T + 1), (B, T)
        self._tokens_dtype: torch.dtype = getattr(torch, token_dtype(run.model.vocab_size))
        self._hidden_shape, self._hidden_dtype = boundary_shape(run), boundary_dtype(run)

    # --- microbatches -----------------------------------------------------------------------------------

    def forward(
        self, mb: Microbatch, inputs: Sequence[Wire], *, grad: bool = True, codec: str | None = None
    ) -> Forward:
        """Compute a microbatch up to the hand-over to the next stage.

        `inputs`: the first stage takes [tokens [B, T+1]], the others [hidden [B, T, H], labels [B, T]],
        tokens and labels in the run's narrow dtype, hidden with the run's forward codec.
        `outputs` are [hidden, labels] for the next stage. `grad=False`: no graph is kept, for a replay that
        only feeds a deeper stage; its backward would recompute. `codec`: of the hidden output, one that
        `codec.adaptive` allows; None: the manifest's.

        Raises:
            Refused: an input is not what the run prescribes, or the output is not finite.
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
        x, labels = self._decode_inputs(kept)
        keep = grad and not self.recompute
        with torch.set_grad_enabled(keep):
            x, y = self._compute(mb, version, x, None)
        what = f"the output of stage {self.stage} for {mb}"
        hidden = start_encode(y, codec or self.run.codec.forward_at(self.stage), name=what)
        graph, loads = (x, y) if keep else None, self._loads
        return Pending(lambda: Forward(mb, version, kept, [hidden.result(), labels], graph, loads))

    def backward(self, fwd: Forward, grad_out: Wire, *, add: bool) -> Encoded | None:
        """The gradient of the input, from that of the output; None from the first stage.

        `add`: also add the gradient of the weights to the sum of the step (which must have begun). Otherwise
        the sum is not touched. May be called again for the same `fwd`: it recomputes.

        Raises:
            Refused: `grad_out` is not what the run prescribes, or (without `add`) the result is not finite.
            Stale: the weights it was computed with are gone.
            SumLost: the backward broke, or its sum was dropped meanwhile; see there.
        """
        return self.start_backward(fwd, grad_out, add=add).result()

    def start_backward(self, fwd: Forward, grad_out: Wire, *, add: bool) -> Pending[Encoded | None]:
        """As `backward`, without waiting for the device. Added to the sum only if the result says so."""
        if self._held_version(fwd.mb) != fwd.version or self._loads != fwd.loads:
            raise Stale(f"{fwd.mb} was computed with weights that are gone", version=self.version)
        g = self._decode_grad(grad_out)
        if self.first and not add:
            return Pending(lambda: None)
        graph, fwd.graph = fwd.graph, None
        if graph is None:
            x, _ = self._decode_inputs(fwd.inputs)
            graph = self._compute(fwd.mb, fwd.version, x, None)
        return self._backward(fwd.mb, fwd.version, *graph, g, add=add, hidden=self._hidden_of(fwd.inputs))

    def loss_backward(
        self, mb: Microbatch, inputs: Sequence[Wire], *, add: bool
    ) -> tuple[float, Encoded | None]:
        """The last stage's forward, loss and backward: (mean loss, gradient of the input).

        Inputs as in `forward`. The gradient is None if this is also the first stage.

        Raises:
            Refused: an input is not what the run prescribes, or the loss is not finite.
            Stale, NotReady: the weights of that step are not held any more, or yet.
            SumLost: the backward broke, or its sum was dropped meanwhile; see there.
        """
        return self.start_loss_backward(mb, inputs, add=add).result()

    def start_loss_backward(
        self, mb: Microbatch, inputs: Sequence[Wire], *, add: bool
    ) -> Pending[tuple[float, Encoded | None]]:
        """As `loss_backward`, without waiting for the device."""
        assert self.last, "only the last stage has a loss"
        version = self._held_version(mb)
        taken = [Encoded(meta, buffers) for meta, buffers in inputs]
        x, labels = self._decode_inputs(taken)
        with torch.set_grad_enabled(add or not self.first):
            x, y = self._compute(mb, version, x, self._labels_of(labels))
        # This waits for the forward, also on CUDA, so that a bad loss leaves the sum as it was. It costs the
        # device one launch, not the launches of the whole backward.
        loss = y.item()
        if not math.isfinite(loss):
            raise Refused(f"the loss of {mb} is not finite: {loss}")
        if self.first and not add:
            return Pending(lambda: (loss, None))
        grad_in = self._backward(mb, version, x, y, None, add=add, hidden=self._hidden_of(taken))
        return Pending(lambda: (loss, grad_in.result()))

    def subtract(self, mb: Microbatch, inputs: Sequence[Wire], grad_out: Wire | None) -> None:
        """Take a microbatch out of the sum again: compute it once more and subtract.

        `inputs` and `grad_out` as they were (None for the last stage). The gradient is the negative, bit for
        bit, of what was added; the sum is what it was before (up to rounding, where the run adds floats).

        Raises:
            As `forward` and `backward`.
        """
        version = self._held_version(mb)
        x, labels = self._decode_inputs([Encoded(meta, buffers) for meta, buffers in inputs])
        if self.last:
            x, y = self._compute(mb, version, x, self._labels_of(labels))
            g = torch.ones_like(y)
        else:
            if grad_out is None:
                raise Refused(f"undoing {mb} takes the gradient of its output")
            g = self._decode_grad(grad_out)
            x, y = self._compute(mb, version, x, None)
        # Not in place: with codec none the gradient is the caller's memory.
        self._backward(mb, version, x, y, g.neg(), add=True, hidden=None).result()

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
            self._sums[t], self._lives[t] = flat.zero_(), next(self._life)

    def sum(self, t: int) -> torch.Tensor:
        """The gradients of step `t` added up over microbatches (not divided by M): 1-D, the live vector.

        Of `sum_dtype`: int64 where the run adds exactly, see `swarm.model.exact`; `settle` gives its value.

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
        """Add another member's sum of step `t`, of `sum_dtype`, to this one's.

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
        if flat is None:
            return
        del self._lives[t]
        for number, bound in enumerate(self._grads_of):
            if bound == t:
                self._unbind_grads(number)
        if not self._spare:  # one is enough: it is there for the next step's
            self._spare.append(flat)

    def apply(self, t: int, reduced: torch.Tensor, total_sqnorm: float) -> None:
        """Optimizer step `t`: makes weights of version t + 1; sums of steps up to `t` are dropped.

        `reduced`: the settled sum over all M microbatches, 1-D, any device. The gradient
        is its mean, reduced / M. `total_sqnorm`: `sqnorm(reduced)` added up over all stages, so
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
        spec, M = self.run.optimizer, self.run.M
        scale = 1.0 / M
        if spec.clip_norm:
            scale *= min(1.0, spec.clip_norm / (math.sqrt(total_sqnorm) / M + 1e-6))
        old, new = self._weights_of(t), self._weights_of(t + 1)
        self._optimizer.step(t, spec.lr_at(t, self.run.steps), old, new, reduced.to(self.device), scale)
        self._weights_changed(t + 1)
        self.version = t + 1
        for done in [s for s in self._sums if s <= t]:
            self.drop_sum(done)

    # --- the state --------------------------------------------------------------------------------------

    def digest(self, *, canonical: bool = True) -> str:
        """32 hex digits of the newest weights: SHA-256 of their bytes.

        Not `canonical`: comparable among devices of one kind only, and on a GPU computed there, since
        bringing gigabytes to the host at every step would cost more than the step.
        """
        weights = self._weights_of(self.version)
        if canonical or weights.device.type == "cpu":
            return _sha256(weights)
        return device_digest(weights)

    def state(self) -> dict[str, torch.Tensor]:
        """All that version `self.version` is made of: flat vectors, copied to the CPU.

        `weights`, the optimizer's vectors, and with delayed updates `weights_previous`, which the next step
        is computed with.
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
        """Of `state`: what somebody who joins has to download."""
        return sum(vector.nbytes for vector in self._state_vectors(self.version).values())

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The newest weights by full name, copied to the CPU: for generation and verification."""
        flat = self._weights_of(self.version).detach().cpu().clone()
        return dict(self._layout.views(flat))

    def saved_bytes(self) -> int:
        """Bytes that one microbatch in flight holds, measured once with a microbatch of zeros."""
        if not self._saved_bytes:
            self._saved_bytes = self._measure()
        return self._saved_bytes

    def rehearse(self) -> None:
        """A forward of zeros, of which nothing is kept: whoever times it knows the speed.

        No backward: where weights have copies of less precision it would add to the sum, whatever is asked.
        """
        x, labels = self._zeros()
        _, y = self._compute(Microbatch(0, 0), self.version, x, labels)
        y.flatten()[:1].sum().item()  # the device is done

    # --- inside -----------------------------------------------------------------------------------------

    def _zeros(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(input, labels for the last stage) of a microbatch, on the device."""
        B, T = self._labels_shape
        if self.first:
            x = torch.zeros((B, T), dtype=torch.int64, device=self.device)
        else:
            x = torch.zeros(self._hidden_shape, dtype=self._hidden_dtype, device=self.device)
        return x, torch.zeros((B, T), dtype=torch.int64, device=self.device) if self.last else None

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

    def _decode_inputs(self, inputs: Sequence[Encoded]) -> tuple[torch.Tensor, Encoded]:
        """(tokens int64 or hidden, on the device; labels as they travel)."""
        expected = 1 if self.first else 2
        if len(inputs) != expected:
            raise Refused(f"{len(inputs)} tensors for stage {self.stage}; expected {expected}")
        if self.first:
            tokens = self._decode_tokens(inputs[0], self._tokens_shape, "tokens")
            labels = encode(tokens[:, 1:], "none")
            return self._index(tokens[:, :-1]), labels
        hidden = decode(
            *inputs[0],
            device=self.device,
            expect_shape=self._hidden_shape,
            expect_dtype=self._hidden_dtype,
            expect_codec=self.run.codec.allowed_at(self.stage - 1),
            name="hidden",
        )
        # Every stage checks them, though only the last looks: a wrong one should be refused where it enters.
        self._decode_tokens(inputs[1], self._labels_shape, "labels")
        return hidden, inputs[1]

    def _hidden_of(self, inputs: Sequence[Encoded]) -> Encoded | None:
        """The input that has a gradient, as it came; None at the first stage."""
        return None if self.first else inputs[0]

    def _decode_tokens(self, wire: Encoded, shape: tuple[int, int], name: str) -> torch.Tensor:
        tokens = decode(
            *wire, expect_shape=shape, expect_dtype=self._tokens_dtype, expect_codec="none", name=name
        )
        vocab = self.run.model.vocab_size
        if (largest := tokens.to(torch.int64).max().item()) >= vocab:
            raise Refused(f"{name} hold {largest}; the vocabulary has {vocab}")
        return tokens

    def _index(self, tokens: torch.Tensor) -> torch.Tensor:
        return to_device(tokens.to(torch.int64), self.device)

    def _labels_of(self, labels: Encoded) -> torch.Tensor:
        return self._index(decode(*labels))

    def _decode_grad(self, grad_out: Wire) -> torch.Tensor:
        codec = self.run.codec
        return decode(
            *grad_out,
            device=self.device,
            expect_shape=self._hidden_shape,
            expect_dtype=self._hidden_dtype,
            expect_codec=[codec.backward_at(self.stage, sent) for sent in codec.allowed_at(self.stage)],
            name="the gradient",
        )

    def _compute(
        self, mb: Microbatch, version: int, x: torch.Tensor, labels: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x as a leaf of the graph, the module's output in the boundary's dtype, or the loss)."""
        module = self._modules[version % len(self._modules)]
        if x.is_floating_point() and torch.is_grad_enabled():
            x.requires_grad_(True)
        with self._autocast():
            y: torch.Tensor = module(x, labels, mb=mb)
        return x, y if self.last else y.to(self._hidden_dtype)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.run.dtype == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _backward(
        self,
        mb: Microbatch,
        version: int,
        x: torch.Tensor,
        y: torch.Tensor,
        g: torch.Tensor | None,
        *,
        add: bool,
        hidden: Encoded | None,
    ) -> Pending[Encoded | None]:
        """Run autograd; the gradient of `x`, which came as `hidden`, encoded. None: it is not wanted."""
        if not add:
            assert hidden is not None
            (grad_x,) = torch.autograd.grad(y, x, g)
            return self._encode_gradient(mb, grad_x, hidden)
        t = mb.t
        self.sum(t)
        if self.run.adds_exactly:
            return self._backward_exact(mb, version, x, y, g, hidden=hidden)
        life = self._lives[t]
        self._bind_grads(version % len(self._modules), t)
        try:
            torch.autograd.backward(y, g)
            if hidden is None:
                pending: Pending[Encoded | None] = Pending(lambda: None)
            else:
                assert x.grad is not None
                pending = self._encode_gradient(mb, x.grad, hidden)
        except BaseException as error:
            raise self._lose_sum(mb, error) from error

        def finish() -> Encoded | None:
            if self._lives.get(t) != life:
                raise SumLost(f"the sum of step {t} that {mb} was added to is lost", t=t)
            try:
                return pending.result()
            except BaseException as error:
                raise self._lose_sum(mb, error) from error

        return Pending(finish)

    def _backward_exact(
        self,
        mb: Microbatch,
        version: int,
        x: torch.Tensor,
        y: torch.Tensor,
        g: torch.Tensor | None,
        *,
        hidden: Encoded | None,
    ) -> Pending[Encoded | None]:
        """As `_backward` with `add`; the sum is touched only once everything is known to be good."""
        parameters = self._parameters[version % len(self._modules)]
        t, life = mb.t, self._lives[mb.t]
        try:
            torch.autograd.backward(y, g)
            grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        finally:
            for parameter in parameters.values():
                parameter.grad = None
        # Nothing in a vector is larger than its norm, found in half the time: as a rule that is enough.
        norms = [torch.linalg.vector_norm(grad) for grad in grads.values()]
        pending: Pending[Encoded | None] = Pending(lambda: None)
        if hidden is not None:
            assert x.grad is not None
            pending = self._encode_gradient(mb, x.grad, hidden)

        def finish() -> Encoded | None:
            if self._lives.get(t) != life:
                raise SumLost(f"the sum of step {t} that {mb} belongs to is gone", t=t)
            result = pending.result()
            limit = largest_term(self.run.M)
            fits = torch.stack(norms).max().item() <= limit
            if not fits and not all(grad.abs().max().item() <= limit for grad in grads.values()):
                raise Refused(
                    f"the gradient of the weights of stage {self.stage} for {mb} is beyond {limit:g}"
                )
            total = self._sums[t]
            try:
                for name, grad in grads.items():
                    start, end, _ = self._layout.spans[name]
                    add_exact(total[start:end], grad)
            except BaseException as error:  # no memory, perhaps: some parameters have it and some do not
                raise self._lose_sum(mb, error) from error
            return result

        return Pending(finish)

    def _encode_gradient(
        self, mb: Microbatch, grad: torch.Tensor, hidden: Encoded
    ) -> Pending[Encoded | None]:
        """The gradient of `hidden`, which came from the stage before: for that stage."""
        what = f"the gradient of stage {self.stage} for {mb}"
        codec = self.run.codec.backward_at(self.stage - 1, hidden.meta.codec)
        pending = start_encode(grad, codec, name=what, places=places_of(hidden))
        return Pending(pending.result)

    def _lose_sum(self, mb: Microbatch, error: BaseException) -> SumLost:
        """Set the sum of the step to zero, void whatever is still pending for it."""
        self._sums[mb.t].zero_()
        self._lives[mb.t] = next(self._life)
        return SumLost(f"the backward of {mb} broke ({error}): the sum of step {mb.t} is lost", t=mb.t)

    def _bind_grads(self, number: int, t: int) -> None:
        """Make autograd of module `number` add to the sum of step `t`, in place."""
        if self._grads_of[number] != t:
            for name, view in self._layout.views(self._sums[t]):
                self._parameters[number][name].grad = view
            self._grads_of[number] = t

    def _unbind_grads(self, number: int) -> None:
        for parameter in self._parameters[number].values():
            parameter.grad = None
        self._grads_of[number] = None

    def _measure(self) -> int:
        seen: dict[int, int] = {}
        own = {flat.untyped_storage().data_ptr() for flat in (*self._weights, *self._low)}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        x, labels = self._zeros()
        mb = Microbatch(0, 0)
        # What was saved must stay alive while we count, or memory that is reused would count once.
        alive: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            alive.append(tensor)
            return note(tensor)

        if not self.recompute:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                x, y = self._compute(mb, 0, x, labels)
            note(y)
        note(x)
        return sum(seen.values())


def sqnorm(vector: torch.Tensor) -> float:
    """The sum of squares, in float64 whatever the dtype: a stage's share of `total_sqnorm`.

    Members with the same bits get the same number on the same kind of device, however many threads they have.
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
    words = vector.detach().contiguous().view(torch.int32)
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
