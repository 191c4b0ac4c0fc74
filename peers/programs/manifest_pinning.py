"""Binding a written manifest to its data and model, before it is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.errors import SetupError
from swarm.manifest import CustomModelSpec, Run

if TYPE_CHECKING:
    from peers.storage.dataset import Dataset
    from peers.storage.samples import Samples


def pinned(run: Run, data: Dataset | Samples) -> Run:
    """`run` with what is open filled in, as it is on this machine.

    Raises:
        SetupError: the model cannot be built, is not what is pinned, or does not take these data.
    """
    run = data.pinned(run)
    if not isinstance(run.model, CustomModelSpec):
        return run
    from peers.storage.samples import Samples
    from swarm.data import sample_offsets
    from swarm.model.custom import custom_model, model_inputs, pin_model

    if not run.model.pinned:
        run = pin_model(run)
    if isinstance(data, Samples):
        model_inputs(run, data.batch(sample_offsets(run, 0, 0)))
        for taken, (value, sample) in zip(custom_model(run).inputs, data.largest, strict=True):
            if value >= taken.below > 0:
                raise SetupError(
                    f"sample {sample} of {run.data.code} has {value} for the model's input {taken.name}, "
                    f"which takes 0 to {taken.below - 1}: the model looks it up in something of that size"
                )
    return run
