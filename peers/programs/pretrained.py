"""A trained model as a folder that Hugging Face's transformers reads: `from_pretrained(FOLDER)`.

transformers writes it, so names, shards, tied weights and configs are its own.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch

from peers.storage import atomic_file
from peers.storage.dataset import open_tokenizer
from swarm.errors import SetupError
from swarm.manifest import CustomModelSpec, Run
from swarm.model.full_model import FullModel

WHY_NOT = {
    "gpt": "transformers has no architecture that is the built-in decoder",
    "counting": "the audit model is of no use outside its audit",
    "code": "it is a model of your own code, whose load_state_dict takes the names in a file of --out",
}


def check(folder: Path, run: Run) -> None:
    """Raise SetupError if the model is none of transformers, or `folder` has something in it."""
    if not isinstance(run.model, CustomModelSpec) or run.model.kind != "hf":
        raise SetupError(
            f'--hf takes a run whose model.kind is "hf"; this one has "{run.model.kind}", and '
            f"{WHY_NOT[run.model.kind]}. Export it with --out FILE"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SetupError(f"{folder} is there already: choose another --hf, or remove it")


def write(
    folder: Path, run: Run, step: int, weights: Mapping[str, torch.Tensor], tokenizer: Path | None = None
) -> str:
    """Write the model into `folder`, which comes into being whole or not at all.

    Args:
        weights: parameters and batch norms' statistics of all stages by full name.
        tokenizer: the JSON of a run whose tokenizer is a file, to be put beside the model; bytes need none.

    Returns:
        The name of the class whose `from_pretrained` reads it.

    Raises:
        SetupError: as `check`, or it cannot be written.
    """
    check(folder, run)
    words = _tokenizer(run, tokenizer)
    module: Any = FullModel(run, weights, steps=step).module
    transformers = importlib.import_module("transformers")
    if hasattr(module.config, "use_cache"):
        module.config.use_cache = True  # training has no use for it; generation has
    module.config.swarm = {"run": run.id, "name": run.name, "step": step}
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=atomic_file.TEMPORARY, dir=folder.parent))
        module.save_pretrained(temporary)
        if words is not None:
            transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(temporary)
        temporary.chmod(0o755)
        temporary.replace(folder)
        atomic_file.sync_folder(folder.parent)
    except OSError as error:
        raise atomic_file.trouble(
            "cannot write the model", folder.parent, error, "choose another --hf"
        ) from None
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return type(module).__name__


def _tokenizer(run: Run, path: Path | None) -> tokenizers.Tokenizer | None:
    """The run's; None: of a file that was not given, or of no text."""
    if run.data.source == "code":
        return None
    if run.data.tokenizer == "bytes":
        open_tokenizer(run, path)  # a file would not be the run's
        return byte_tokenizer()
    if path is None:
        return None
    open_tokenizer(run, path)  # says what is wrong with it
    return tokenizers.Tokenizer.from_file(str(path))


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Text as UTF-8, a token a byte.

    `ByteLevel` stands each byte for a visible character, as GPT-2's tokenizer does (Radford et al., 2019).
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    vocabulary = {chr(byte): byte for byte in shown}
    vocabulary.update({chr(256 + place): byte for place, byte in enumerate(hidden)})
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made
