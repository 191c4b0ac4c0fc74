"""The only import of the tracing code by what every peer runs: only runs with a custom model use it.

So a peer of a built-in model imports neither the tracing nor the search for a cut, which is thousands of
lines and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.ids import Stage
from swarm.manifest import Run

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from swarm.model.graph.custom_model import Model
    from swarm.model.stage_io import StageInput


def custom_model(run: Run) -> Model:
    """The model of a run, built, traced and cut; seconds at the first call, which no other may overlap.

    Raises:
        SetupError: it cannot be built, traced or cut here, or is not what the manifest pins.
    """
    from swarm.model.graph.custom_model import custom_model as build

    return build(run)


def pin_model(run: Run) -> Run:
    """`run` with what is open in its model filled in, as it is here; raises SetupError as `custom_model`."""
    from swarm.model.graph import custom_model as tool

    return tool.pin_model(run)


def model_inputs(run: Run, rows: np.ndarray | Sequence[np.ndarray]) -> list[torch.Tensor]:
    """What enters stage 0 for a microbatch; raises SetupError: the samples do not fit the model."""
    from swarm.model.graph import custom_model as tool

    return tool.model_inputs(run, rows)


def custom_inputs(run: Run, stage: Stage) -> tuple[StageInput, ...]:
    """What enters a stage of a custom model."""
    from swarm.model.graph import custom_model as tool

    return tool.stage_inputs(run, stage)


def stage_module(run: Run, stage: Stage) -> nn.Module:
    """The module of a stage, a new one each time."""
    from swarm.model.graph import custom_model as tool

    return tool.stage_module(run, stage)
