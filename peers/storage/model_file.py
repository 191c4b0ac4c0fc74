"""A trained model as two files, for use without its run.

    NAME.safetensors    the weights of all stages, by full name
    NAME.json           what they are: the run's manifest, the step, and the digest of the file beside it

The JSON is written last. A model may come from a stranger: digest, names, shapes and finiteness are checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from peers.storage import atomic_file, safetensors_file
from peers.storage.safetensors_file import Progress, unheard
from swarm.errors import MALFORMED, SetupError
from swarm.manifest import MAX_MANIFEST_BYTES, Run, check_id

MAX_CONFIG_BYTES = 4 * MAX_MANIFEST_BYTES
"""The manifest, escaped, and as much again."""

SUFFIX = ".safetensors"
_KIND = safetensors_file.FileKind("model", "Copy or export it again")


class ModelConfig(safetensors_file.Described, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What stands in the JSON. (Older files repeat fields of the manifest in it.)"""

    parameters: int
    manifest: str
    """The run's manifest (TOML)."""


def config_path(weights: Path) -> Path:
    """Of the JSON beside a model's safetensors file."""
    return weights.with_suffix(".json")


def write(
    path: Path, run: Run, step: int, shapes: Mapping[str, torch.Tensor], value: Callable[[str], torch.Tensor],
    *, progress: Progress = unheard, remedy: str = "choose another --out",
) -> ModelConfig:  # fmt: skip
    """Write a model: `path` and the JSON beside it, each whole or not at all.

    Args:
        shapes: full name -> a tensor of that shape and dtype (of the meta device, to hold no memory).
        value: full name -> the weights; asked for in the order of `shapes`.
        remedy: what to do if there is no room, besides making some.

    Raises:
        SetupError: it could not be written.
    """
    _refuse_strange(config_path(path))
    with atomic_file.as_setup_error("cannot write the model", remedy, folder=path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Neither replaces what was there before there was room for both.
        with atomic_file.writing(config_path(path)) as described, atomic_file.writing(path) as file:
            origin = {"run": run.id, "step": str(step), "format": "pt"}
            digest, size = safetensors_file.write(file, shapes, value, origin, progress=progress)
            config = ModelConfig(
                format=safetensors_file.FORMAT, run=run.id, step=step, sha256=digest, bytes=size,
                parameters=sum(tensor.numel() for tensor in shapes.values()), manifest=run.to_toml(),
            )  # fmt: skip
            atomic_file.write_all(described, safetensors_file.to_json(config))
    return config


def _refuse_strange(where: Path) -> None:
    """Refuse to write over a JSON file of another kind."""
    try:
        msgspec.json.decode(where.read_bytes(), type=ModelConfig)
    except FileNotFoundError:
        return
    except (OSError, *MALFORMED):
        raise SetupError(f"{where} is there already and is not of a model: choose another --out") from None


def read_config(path: Path) -> tuple[ModelConfig, Run]:
    """What the model in `path` is.

    Raises:
        SetupError: there is none, or its JSON is damaged or contradicts itself.
    """
    if not path.is_file():
        raise SetupError(f"there is no model file {path}: swarm export makes one from checkpoints")
    where = config_path(path)
    try:
        config = safetensors_file.read_json(_KIND, where, ModelConfig, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise SetupError(
            f"{where} is missing: it says what {path} is. Copy it there, or export again"
        ) from None
    try:
        run = check_id(config.manifest, config.run)
    except SetupError as error:
        raise _KIND.damaged(where, error.text) from None
    if not 0 <= config.step <= run.steps:
        raise _KIND.damaged(where, f"step {config.step} of a run of {run.steps}")
    return config, run


def is_trained(path: Path, run: Run) -> bool:
    """Whether the model of the run's last step is there, by its length."""
    with contextlib.suppress(SetupError, OSError):
        config, _ = read_config(path)
        return (config.run, config.step, config.bytes) == (run.id, run.steps, path.stat().st_size)
    return False


def read(
    path: Path, shapes: Callable[[Run], Mapping[str, torch.Tensor]], *, progress: Progress = unheard
) -> tuple[ModelConfig, Run, dict[str, torch.Tensor]]:
    """A model's config, its run, and its weights by full name, on the CPU.

    Args:
        shapes: what `write` was given, for a run.

    Raises:
        SetupError: it is missing, damaged or not what its JSON says. Says what to do.
    """
    config, run = read_config(path)
    expected = {name: safetensors_file.info(tensor) for name, tensor in shapes(run).items()}
    by = f"of run {run.id}"
    return config, run, safetensors_file.read(_KIND, path, config, (by, expected), progress=progress)
