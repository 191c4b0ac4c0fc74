"""How many bytes a microbatch keeps between its forward and its backward, found by running it.

For a stage that is not here it is run with tensors that have no memory: what peers will measure is known
before there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from swarm.ids import Microbatch, Stage
from swarm.manifest import Run
from swarm.model.boundary import Boundary
from swarm.model.gpt import replace_parameters, weights_dtype
from swarm.model.same_bits import storage_of
from swarm.model.stage_function import stage_function


def kept_bytes(
    compute: Callable[[], Iterable[torch.Tensor]],
    given: Iterable[torch.Tensor | None],
    held: Callable[[torch.Tensor], bool],
) -> int:
    """Bytes of what `compute` saves for its backward, returns, and is given.

    Args:
        held: whether a tensor lies in memory that is there without any microbatch.
    """
    # What is counted stays alive meanwhile, or memory that is used again would count once.
    alive: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive += compute()
    alive += [tensor for tensor in given if tensor is not None]
    return sum({storage_of(t): t.untyped_storage().nbytes() for t in alive if not held(t)}.values())


@lru_cache(maxsize=64)
def foretold_bytes(run: Run, stage: Stage) -> int:
    """What `StageCompute.saved_bytes` will measure on a peer of that stage; builds no weights.

    Raises:
        SetupError: the run's model cannot be built here.
    """
    function = stage_function(run, stage)
    number, cpu = weights_dtype(run), torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = function.module()
        replace_parameters(module, lambda _, old: torch.empty(old.shape, dtype=number))
        if function.halves and not run.brings_model:  # as `StageState.bind` has the decoder's matrices
            for part in module.modules():
                if isinstance(part, nn.Linear):
                    part.weight = nn.Parameter(part.weight.detach().to(torch.bfloat16))
        own = {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
        given = Boundary(run, stage, function, cpu).made_up(zeros=True).values

        def compute() -> Sequence[torch.Tensor]:
            return function.graded(function.apply(module, given, Microbatch(0, 0), cpu)[1].values)

        return kept_bytes(compute, given, lambda tensor: storage_of(tensor) in own)
