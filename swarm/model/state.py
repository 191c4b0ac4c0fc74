"""One stage's weights and optimizer, as flat vectors: made, stepped, read, replaced.

The weights are ONE vector (the parameters of the module are views of it), and so are the optimizer's moments.
With delayed updates step t is computed with version t - 1 while version t is being made, so two versions are
held, in two vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy

import torch
from torch import nn

from swarm.errors import DIVERGED, NotReady, Refused, SetupError, Stale
from swarm.ids import Stage
from swarm.manifest import Run
from swarm.model.fixed_point import MOST_DROPPED, dropped_after
from swarm.model.gpt import replace_parameters, weights_dtype
from swarm.model.layout import Layout, initial_state
from swarm.model.meeting import difference, meet
from swarm.model.optimizer import FlatOptimizer, parts_of
from swarm.model.reductions import state_digest
from swarm.model.same_bits import storage_of, use_threads_of


class StageState:
    """All that a version of one stage is made of, on one device."""

    def __init__(self, run: Run, stage: Stage, layout: Layout, device: torch.device) -> None:
        """Version 0, a function of the run alone.

        Raises:
            SetupError: this device cannot compute this run, or has not the weights that it starts from.
        """
        self._run, self._stage, self._layout, self.device = run, stage, layout, device
        self.version = self.loads = 0
        """`loads`: how many states were loaded."""
        self.dtype = weights_dtype(run)
        self._besides = initial_state(run, stage, device)
        """All vectors but those of the weights: of the newest version only."""
        names = ("weights", "weights_previous")[: 1 + run.delayed_updates]
        self._weights = [self._besides.pop(name) for name in names]
        """Version v is number v % len."""
        parts = parts_of(run.optimizer, layout.spans)
        self._optimizer = FlatOptimizer(run.optimizer, parts, self._besides, device, run.seed)
        # The decoder's matrices in bfloat16, for bfloat16 runs: see `bind`. They are the decayed weights.
        low = layout.decayed if run.dtype == "bfloat16" and not run.brings_model else 0
        self._low = [flat[:low].to(torch.bfloat16) for flat in self._weights]
        self.dropped = self._besides.get("dropped_bits", torch.zeros(0, dtype=torch.uint8, device=device))
        """Where gradients are rounded, the bits that their blocks drop in the step of the newest version."""

    @property
    def versions(self) -> int:
        """How many are held at once."""
        return len(self._weights)

    def weights(self, version: int) -> torch.Tensor:
        return self._weights[version % len(self._weights)]

    def bind(self, module: nn.Module, version: int) -> nn.Module:
        """Make the parameters of `module` views of the vector in which that version lives.

        The decoder's matrices are given in bfloat16 in a bfloat16 run. Autocast would round them anew for
        every microbatch, and every microbatch in flight would hold a copy: 3.6 GB and 7 % of the time for a
        layer of GPT-3. The numbers are those of autocast (tested).
        """
        views, low = self._layout.views(self.weights(version)), self._low[version % len(self._low)]
        replace_parameters(module, lambda name, _: views[name])
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear) and low.numel():
                start, end, shape = self._layout.spans[f"{name}.weight"]
                part.weight = nn.Parameter(low[start:end].view(shape))
        return module.to(self.device)

    def snapshot(self, version: int) -> StageState:
        """A copy of the weights of a version that is held, which no step changes."""
        copied, held = copy(self), version % len(self._weights)
        copied.version = version
        copied._weights, copied._low = [self._weights[held].clone()], [self._low[held].clone()]
        copied.dropped = self.dropped.clone()
        return copied

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the weights, which change under it."""
        return storage_of(tensor) in map(storage_of, (*self._weights, *self._low))

    def step(self, t: int, reduced: torch.Tensor, total_sqnorm: float) -> None:
        """Make weights of version t + 1; as `StageCompute.apply`."""
        if t != self.version:
            cls = Stale if t < self.version else NotReady
            raise cls(f"step {t} cannot be applied to weights {self.version}", version=self.version)
        numel = self._layout.sum_numel
        if reduced.shape != (numel,) or reduced.dtype != self.dtype:
            raise Refused(
                f"the gradient of stage {self._stage} has {list(reduced.shape)} numbers of {reduced.dtype}; "
                f"expected [{numel}] of {self.dtype}"
            )
        if not 0.0 <= total_sqnorm < math.inf:
            raise SetupError(f"the gradient of step {t} is not finite{DIVERGED}")
        use_threads_of(self._run)
        if self._run.meets_at(t):
            meet(self._run, self._layout, self._vectors(t), reduced)
            self._made(t + 1)
            return
        spec, M = self._run.optimizer, self._run.microbatches(t)
        scale = 1.0 / M
        if spec.clip_norm:
            scale *= min(1.0, spec.clip_norm / (math.sqrt(total_sqnorm) / M + 1e-6))
        old, new = self.weights(t), self.weights(t + 1)
        reduced, numel = reduced.to(self.device), self._layout.numel
        gradient = reduced[:numel]
        self._optimizer.step(
            self._run.islands.moments_age(t), self._run.lr_at(t), old, new, gradient, scale,
            number=self._run.step_number(t),
        )  # fmt: skip
        for name, momentum in self._layout.statistics.items():
            start, end, _ = self._layout.terms[name]
            mean = self._besides["statistics"][start - numel : end - numel]
            mean.mul_(1.0 - momentum).add_(reduced[start:end] * (1.0 / M), alpha=momentum)
        if self._run.rounds_sums:
            for name, blocks in self._layout.blocks.items():
                start, end, _ = self._layout.spans[name]
                self.dropped[blocks] = dropped_after(
                    gradient[start:end], self.dropped[blocks], self._run.kept_bits
                )
        self._made(t + 1)

    def difference(self) -> torch.Tensor:
        """What this island has changed of the stage since the last meeting, as it travels."""
        return difference(self._run, self._layout, self._vectors(self.version))

    def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Become version `version`.

        Raises:
            Refused: names, shapes, dtypes or numbers are not what this stage has; nothing is changed.
        """
        if version < 0:
            raise Refused(f"a state of version {version}")
        mine = self._vectors(version)
        if set(tensors) != set(mine):
            raise Refused(f"a state of {sorted(tensors)[:10]}; stage {self._stage} has {sorted(mine)}")
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
            if name == "dropped_bits" and int(other.max()) > MOST_DROPPED:
                raise Refused(f"state {name} has numbers beyond {MOST_DROPPED}")
        for name, vector in mine.items():
            vector.copy_(tensors[name])
        for held in range(version, version + self.versions):
            self._round(held)
        self.version = version
        self.loads += 1

    def copy(self) -> dict[str, torch.Tensor]:
        """All that version `self.version` is made of: flat vectors, copied to the CPU.

        `weights`, the optimizer's vectors, `statistics` if there are batch norms, and with delayed updates
        `weights_previous`, which the next step is computed with.
        """
        vectors = self._vectors(self.version)
        return {name: vector.detach().to("cpu", copy=True) for name, vector in vectors.items()}

    def digest(self, *, whole: bool = True) -> str:
        """32 hex digits of the newest version, as `state_digest` has them."""
        return state_digest(self._vectors(self.version), whole=whole)

    @property
    def nbytes(self) -> int:
        """Bytes of `copy`: what a newcomer has to download."""
        return sum(vector.nbytes for vector in self._vectors(self.version).values())

    def free(self) -> None:
        """Release every tensor; nothing works after it."""
        self._weights, self._low = [], []
        self._besides.clear()
        self.dropped = self.dropped[:0].clone()

    def _made(self, version: int) -> None:
        self._round(version)
        self.version = version

    def _round(self, version: int) -> None:
        """The weights of a version changed: so do their low-precision copies."""
        low = self._low[version % len(self._low)]
        low.copy_(self.weights(version)[: low.numel()])

    def _vectors(self, version: int) -> dict[str, torch.Tensor]:
        vectors = {"weights": self.weights(version), **self._besides}
        if self._run.delayed_updates:
            vectors["weights_previous"] = self.weights(version + 1)
        return vectors
