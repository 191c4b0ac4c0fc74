"""`swarm.Run`: a run in its owner's hands."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from peers.api.background import as_in_peers
from peers.api.example import columns_of, copied, largest_of, rehearse, rows_of, sample_of
from peers.api.module_text import module_text
from peers.events import unlogged
from peers.options import data_file
from peers.programs.manifest_pinning import pinned
from peers.storage import cache_folder, written
from peers.storage.atomic_file import as_setup_error
from peers.storage.dataset import Dataset
from peers.storage.samples import Samples, open_data
from peers.storage.written import Columns
from swarm import manifest
from swarm.errors import SetupError
from swarm.installed import import_file
from swarm.manifest import CustomModelSpec, load_run, run_of
from swarm.model.evaluate import FullModel, fill, given_decoder
from swarm.model.graph.capture import WithLoss
from swarm.model.graph.model_source import CustomModel
from swarm.wire.codec import bytes_of

MICROBATCHES = 8
"""Of a step, where the caller does not say."""
UNWRITTEN = "unwritten:function"
"""The function of a module or of samples that are not in a file yet."""


class Run:
    """The terms of a run (its manifest), and what the manifest only names: its code and its data.

    Others join with the terms' id, and with the code if it is in no installed package: `code` is the folder
    to hand over.
    """

    @as_in_peers()
    def __init__(
        self, *, model: nn.Module | Mapping[str, Any], data: Any, inputs: Any = None,
        loss: Callable[..., torch.Tensor] | None = None, targets: Any = None, stages: int | None = None,
        steps: int = 100, name: str = "notebook", seed: int = 0, vocab_size: int | None = None,
        batch: Mapping[str, Any] | None = None, optimizer: Mapping[str, Any] | None = None,
        files: Sequence[str | Path] = (), tokenizer: str | Path | None = None,
        start: str | Path | None = None, eval_data: Sequence[str | Path] = (),
        folder: str | Path | None = None, **terms: Any,
    ) -> None:  # fmt: skip
        """Everything is checked here, before a process is started: a module is traced with the example.

        Args:
            model: a module, which is trained from the weights that it has; or a manifest's table `[model]`.
            data: samples, anything with a length that gives a tuple of arrays for each number, one array for
                each input and target; or a tuple of arrays that have the samples along their first dimension;
                or a manifest's table `[data]`.
            inputs: example tensors, the batch first: one, a tuple, or a dict by name (default: the samples').
            loss: `loss(module(*inputs), *targets)`; left out, the module gives its loss itself.
            targets: example tensors of them. Left out: what samples have besides the inputs.
            stages: pieces that the model is cut into.
            vocab_size: integers in the data are less. Left out: as the samples have them.
            batch: the manifest's table `[batch]`; left out, as many rows as the example has.
            optimizer: the table `[optimizer]`; left out, AdamW with a rate of 0.001.
            files: the text files of a `[data]` that needs them, or their index; and its `tokenizer`.
            start: the folder of trained weights that the model of a table starts from.
            eval_data: the text files of an `[eval]`.
            folder: where the code of a module is written, in a folder of its own (default: the cache).
            terms: what else the manifest can say, such as `dtype` or `codec`.

        Raises:
            SetupError: what is wrong, and what to change.
        """
        self.module = model if isinstance(model, nn.Module) else None
        """The module as it was given; not changed."""
        self.loss = loss
        if not (loss is None or callable(loss)) or isinstance(loss, type):
            raise SetupError(f"loss is {loss!r}: give a function, such as torch.nn.functional.mse_loss")
        inputs, targets = pytree.tree_map_only(np.ndarray, torch.from_numpy, (inputs, targets))
        inputs, targets = pytree.tree_map_only(np.generic, np.generic.item, (inputs, targets))
        if isinstance(data, Mapping) and any(hasattr(one, "shape") for one in data.values()):
            raise SetupError("data is a dict of arrays: give a tuple, of the module's inputs and the targets")
        columns = None if isinstance(data, Mapping) else columns_of(data)
        table = _model_table(model, columns)
        if self.module is None and any(given is not None for given in (inputs, loss, targets)):
            raise SetupError("inputs, loss and targets belong to a module: its table [model] names none")
        chosen = {"stages": stages, "vocab_size": vocab_size}
        values: dict[str, Any] = {"name": name, "seed": seed, "steps": steps, **terms}
        values["model"] = table | {key: value for key, value in chosen.items() if value is not None}
        values["data"] = {"source": "code", "code": UNWRITTEN} if columns is not None else dict(data)
        defaults = {"microbatch_size": rows_of(inputs), "microbatches_per_step": MICROBATCHES}
        values["batch"] = {**defaults, **(batch or {})} if isinstance(batch or {}, Mapping) else batch
        optimizer = {"lr": 1e-3} if optimizer is None else optimizer
        values["optimizer"] = dict(optimizer) if isinstance(optimizer, Mapping) else optimizer
        if start is not None and self.module is None:
            values["start"] = {"weights": "folder"}
        found, example, code = run_of(values), None, None
        if self.module is not None:
            example = sample_of(found, self.module, inputs, loss, targets, columns)
        try:
            if self.module is not None or columns is not None:
                code = _write(name, example, columns, Path(folder or cache_folder() / "written"))
                import_file(code)
                found = _written(found, code)
            self._complete(found, files, tokenizer, start, eval_data, code)
        except SetupError:
            if example is not None:
                with unlogged():
                    example.trace()  # to tell what is wrong by its own lines, not those of the text
            raise
        if example is not None:
            rehearse(example, halves=self.terms.dtype == "bfloat16")

    @classmethod
    def from_toml(
        cls, path: str | Path, *, files: Sequence[str | Path] = (), tokenizer: str | Path | None = None,
        start: str | Path | None = None, eval_data: Sequence[str | Path] = (),
    ) -> Run:  # fmt: skip
        """The run of a manifest's file, as the commands take it. Raises SetupError: what is wrong with it, or
        with its data or its model."""
        return cls.of(load_run(path), files=files, tokenizer=tokenizer, start=start, eval_data=eval_data)

    @classmethod
    def of(
        cls, terms: manifest.Run, *, files: Sequence[str | Path] = (), tokenizer: str | Path | None = None,
        start: str | Path | None = None, eval_data: Sequence[str | Path] = (),
    ) -> Run:  # fmt: skip
        """The run of a manifest that was read already; raises as `from_toml`."""
        run = cls.__new__(cls)
        run.module = run.loss = None
        run._complete(terms, files, tokenizer, start, eval_data, None)
        return run

    def _complete(
        self, terms: manifest.Run, files: Sequence[str | Path], tokenizer: str | Path | None,
        start: str | Path | None, eval_data: Sequence[str | Path], code: Path | None,
    ) -> None:  # fmt: skip
        self.files, self.eval_data = _paths(files), _paths(eval_data)
        self.tokenizer = None if tokenizer is None else Path(tokenizer)
        self.start = None if start is None else Path(start)
        self.code = code
        """The folder of the module's code and weights, and the samples; None: its code is installed."""
        self.terms = pinned(terms, self.files, self.tokenizer, self.start, self.eval_data)
        """What the manifest says."""

    @property
    def id(self) -> str:
        """What others join with, besides an address."""
        return self.terms.id

    def to_toml(self) -> str:
        """The manifest."""
        return self.terms.to_toml()

    def open_data(self) -> Dataset | Samples:
        """What the run trains on. Raises SetupError: it cannot be read."""
        return open_data(self.terms, self.files, self.tokenizer)

    @as_in_peers()
    def trained(self, weights: Mapping[str, torch.Tensor], steps: int) -> nn.Module:
        """The model with weights by full name, after so many steps, in evaluation mode.

        A module that was given from Python comes back as a copy of what it is; the built-in decoder takes
        tokens and gives logits.

        Raises:
            SetupError: the run has the audit model, which computes nothing.
        """
        if self.module is not None:
            model, loss = copied(self.module, self.loss)
            fill(WithLoss(model, loss), weights, steps)
            return model.eval()
        if self.terms.brings_model:
            return FullModel(self.terms, weights, steps=steps).module
        if (kind := self.terms.model.kind) != "gpt":
            raise SetupError(f'model.kind = "{kind}" is there to count microbatches: it is no model')
        return given_decoder(self.terms, weights, torch.device("cpu"))

    def __repr__(self) -> str:
        terms = self.terms
        return f"<swarm.Run {terms.name} {terms.id}: {terms.S} stages, {terms.steps} steps>"


def check_run(run: object) -> None:
    """Raises SetupError: it is something else."""
    if not isinstance(run, Run):
        raise SetupError(f"run is a {type(run).__name__}: give a swarm.Run, as swarm.Run.from_toml(FILE) is")


def _paths(given: str | Path | Sequence[str | Path]) -> tuple[Path | str, ...]:
    return tuple(data_file(str(path)) for path in ([given] if isinstance(given, (str, Path)) else given))


def _model_table(model: nn.Module | Mapping[str, Any], columns: Columns | None) -> dict[str, Any]:
    """The manifest's table `[model]`. `columns`: of the samples, whose numbers a module looks up."""
    if isinstance(model, nn.Module):
        largest = 255 if columns is None else largest_of(columns)
        return {"kind": "code", "source": UNWRITTEN, "stages": 2, "vocab_size": max(2, largest + 1)}
    if isinstance(model, Mapping):
        return {"stages": 2, **model}
    what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    raise SetupError(f"model is {what}: give a torch.nn.Module that is made, or a table [model]")


def _written(terms: manifest.Run, code: Path) -> manifest.Run:
    """The terms with the functions that are in a file now."""
    model, data = terms.model, terms.data
    if isinstance(model, CustomModelSpec) and model.source == UNWRITTEN:
        model = replace(model, source=f"{code.name}:build")
    if data.code == UNWRITTEN:
        data = replace(data, code=f"{code.name}:samples")
    return replace(terms, model=model, data=data)


def _write(name: str, made: CustomModel | None, columns: Columns | None, folder: Path) -> Path:
    """Write a module and samples to a folder that is called by its content; where it is."""
    text = [
        f'"""Made by `swarm.Run` with torch {torch.__version__}: nothing but torch\'s operators."""',
        *("", "import torch", "", "from peers.storage.written import WrittenModule, read_samples"),
    ]
    digest, tensors = hashlib.sha256(), None
    if made is not None:
        lines, tensors = module_text(made)
        text += ["", "", *lines]
        for key, tensor in tensors.items():
            digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(bytes_of(tensor) if tensor.numel() else b"")
    arrays = None if columns is None else columns[:]
    if arrays is not None:
        text += ["", "", "def samples():", "    return read_samples(__file__)"]
        for array in arrays:
            digest.update(f"{array.dtype} {array.shape}\n".encode())
            digest.update(array.tobytes())
    whole = "\n".join(text) + "\n"
    digest.update(whole.encode())
    stem = re.sub(r"\W", "_", name, flags=re.ASCII)[:40]
    target = folder / f"{'_' if stem[:1].isdigit() else ''}{stem}_{digest.hexdigest()[:12]}"
    with as_setup_error(f"{target} cannot be written"):
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
            written.write(Path(making, target.name), whole, tensors, arrays)
            for made_now in Path(making, target.name).iterdir():  # what is there may be damaged
                made_now.replace(target / made_now.name)
    return target
