"""A brought model whose stages are sent a mask beside activations; and devices of other kinds."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from swarm.ids import Microbatch
from swarm.manifest import BatchSpec, CodecSpec, CustomModelSpec, DataSpec, OptimizerSpec, Run, write_cut
from swarm.model.stage import StageCompute
from swarm.model.stage_io import stage_inputs
from swarm.wire.codec import Encoded
from tests.audit.roundings import tensor
from tests.peers.admitted import admitting

WIDTH, ROWS = 16, 8
CUT = [0] + [1] * 15 + [2] * 6
MB = Microbatch(0, 0)


class Masked(nn.Module):
    """Its middle stage makes of a mask and activations what has much rounding in it, and what has little."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        shares = (x @ x.mT + mask).softmax(-1)
        attended = x + shares @ self.second(x)
        nearly_equal = functional.layer_norm(1 + x / 1024, (WIDTH,))
        nothing = shares.sum(-1) - 1 + functional.layer_norm(x, (WIDTH,)).mean(-1)
        x = self.third(attended) + nearly_equal + nothing[..., None]
        return functional.cross_entropy(x.mean(1), labels)


def masked() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model, and a sample of it."""
    return Masked(), sample(0, 0.0)


def sample(seed: int, bar: float) -> tuple[torch.Tensor, ...]:
    """No row sees a later one; the first one sees none at all, as rows of padding do."""
    dice = torch.Generator().manual_seed(seed)
    barred = torch.ones(2, ROWS, ROWS).triu(1)
    barred[:, 0] = 1
    mask = torch.where(barred > 0, bar, 0.0)
    return torch.randn(2, ROWS, WIDTH, generator=dice), mask, torch.tensor([1, 3])


class Otherwise(TorchDispatchMode):
    """Computes each operation in float64 and rounds once (`exact`), adds products up one by one from the last
    (`backwards`), or has other last places (`noisy`).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind, self._dice = kind, torch.Generator().manual_seed(2)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(one.alias_info for one in (*func._schema.arguments, *func._schema.returns)):
            return made
        if self._kind == "exact" and "dtype" not in (kwargs or {}):
            wide = tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, args)
            return tree_map(
                lambda better, one: better.to(one.dtype) if isinstance(one, torch.Tensor) else one,
                func(*wide, **(kwargs or {})),
                made,
            )
        if self._kind == "backwards" and func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            a, b = args
            found = torch.zeros(made.shape, dtype=torch.promote_types(made.dtype, torch.float32))
            for k in reversed(range(a.shape[-1])):
                found += a[..., k, None] * b[..., k, None, :]
            return found.to(made.dtype)
        return tree_map_only(torch.Tensor, self._noisy, made) if self._kind == "noisy" else made

    def _noisy(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        signs = torch.randint(-1, 2, x.shape, generator=self._dice).to(x.dtype)
        return torch.where(x.abs() < 1e3, x * (1 + torch.finfo(x.dtype).eps * signs), x)


class OtherDevice(StageCompute):
    """A stage on a device of another kind."""

    kind = ""

    def _compute(self, *args: Any, **how: Any) -> Any:
        with Otherwise(self.kind):
            return super()._compute(*args, **how)

    def _autograd(self, *args: Any, **how: Any) -> Any:
        with Otherwise(self.kind):
            return super()._autograd(*args, **how)


class Masks(NamedTuple):
    """A run of the model, and what its first two stages are given of a microbatch."""

    run: Run
    inputs: list[list[Encoded]]
    output_grads: list[list[Encoded]]


@cache
def stages_of(dtype: str, codec: str) -> tuple[Run, list[StageCompute]]:
    run = Run(
        name="masked", seed=0, steps=3, dtype=dtype, codec=CodecSpec(forward=codec, backward=codec),
        model=CustomModelSpec(
            kind="code", source="tests.audit.masks:masked", stages=3, vocab_size=41, cut=write_cut(CUT)
        ),
        data=DataSpec(source="code", code="tests.model.graph.zoo:samples", sequence_length=1, tokens=1000),
        batch=BatchSpec(microbatch_size=2, microbatches_per_step=2),
        optimizer=OptimizerSpec(name="sgd", lr=0.1, clip_norm=0.0, weight_decay=0.0),
    )  # fmt: skip
    run = admitting(run)
    return run, [StageCompute(run, stage) for stage in range(3)]


def microbatch(dtype: str, codec: str, seed: int, bar: float) -> Masks:
    run, (first, middle, last) = stages_of(dtype, codec)
    given = zip(sample(seed, bar), stage_inputs(run, 0), strict=True)
    inputs = [[tensor(values.to(getattr(torch, what.dtype))) for values, what in given]]
    for stage in (first, middle):
        inputs.append(stage.forward(MB, inputs[-1]).outputs)
    grads = list(last.loss_gradients(MB, inputs[2], weights=False).answer)
    back = middle.gradients(middle.forward(MB, inputs[1]), grads, weights=False).answer
    return Masks(run, inputs, [list(back), grads])
