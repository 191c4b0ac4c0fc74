"""What a caller of `swarm.Run` has, as what a run needs: samples as arrays, and a module with an example."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from peers.storage.written import Columns
from swarm.errors import SetupError
from swarm.installed import first_line
from swarm.manifest import Run
from swarm.model.gpt import weights_dtype
from swarm.model.graph.capture import WithLoss
from swarm.model.graph.model_source import CustomModel, as_tuple
from swarm.model.graph.trace import check_traceable
from swarm.model.graph.untraceable import reason

ROWS = 8
"""Samples of a microbatch, where neither the example nor the caller says how many."""


def sample_of(
    terms: Run, model: nn.Module, inputs: Any, loss: Any, targets: Any, columns: Columns | None
) -> CustomModel:
    """A module, copied, with a microbatch of the run's size: of the example, or as the samples have it.
    Raises SetupError: they do not fit one another, or the module cannot be copied."""
    dtype, rows, length = weights_dtype(terms), terms.batch.microbatch_size, terms.data.sequence_length
    if columns is None:
        arrays = [torch.zeros(rows, length, dtype=torch.int64) for _ in range(2)]
    else:
        given = columns[np.arange(rows) % len(columns)]
        kinds = [np.int64 if array.dtype.kind in "iu" else array.dtype for array in given]
        arrays = [torch.from_numpy(one.astype(kind)) for one, kind in zip(given, kinds, strict=True)]
    if inputs is None:
        count = 1 if columns is None else len(arrays) - (loss is not None)
        if not count:
            raise SetupError("samples have one array each, and the loss needs another: the target")
        inputs = tuple(arrays[:count])
    entering = _count_tensors(inputs)
    if loss is None:
        targets = ()
    elif targets is None:
        targets = tuple(arrays[entering:]) if columns is not None else (arrays[1],)
    wanted = entering + _count_tensors(targets)
    if columns is not None and wanted != len(arrays):
        raise SetupError(
            f"samples have {len(arrays)} arrays each, but the example has {wanted}: one for each input and "
            "target"
        )
    left = iter(arrays)

    def sized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if columns is None:
            return torch.zeros(rows, length, dtype=leaf.dtype)
        array = next(left)
        if leaf.shape[1:] != array.shape[1:]:
            raise SetupError(
                f"the example has an input {list(leaf.shape)}, and samples have "
                f"{list(array.shape[1:])} each: give the example the batch first"
            )
        return array.to(dtype if leaf.is_floating_point() else leaf.dtype)

    check_traceable(WithLoss(model, loss))  # a copy's tensors share no memory
    try:
        model, loss = copied(model, loss)
        for part in (model, loss):
            if isinstance(part, nn.Module):
                # `to(dtype)` drops the imaginary part of complex numbers.
                _ = part.cpu().double() if dtype == torch.float64 else part.cpu().float()
    except Exception as error:
        raise SetupError(f"the module cannot be copied: {first_line(error)}") from error
    by_name = isinstance(inputs, Mapping)
    return CustomModel(
        module=model,
        args=() if by_name else pytree.tree_map(sized, as_tuple(inputs)),
        kwargs=pytree.tree_map(sized, dict(inputs)) if by_name else {},
        loss=loss,
        targets=pytree.tree_map(sized, as_tuple(targets)),
    )


def copied(model: nn.Module, loss: Any) -> tuple[nn.Module, Any]:
    """Copies of both; also of what they keep of a call before, which was computed and torch does not copy."""
    wholes = [whole for whole in (model, loss) if isinstance(whole, nn.Module)]
    kept = pytree.tree_leaves([vars(part) for whole in wholes for part in whole.modules()])
    computed = [leaf for leaf in kept if isinstance(leaf, torch.Tensor) and not leaf.is_leaf]
    return copy.deepcopy((model, loss), {id(one): one.detach().clone().requires_grad_() for one in computed})


def rehearse(made: CustomModel, *, halves: bool) -> None:
    """Compute the microbatch of a copy: operators look at what a trace lets pass. `halves`: by autocast.
    Raises SetupError: one refuses what it is given; says in which line."""
    try:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=halves)
        with torch.no_grad(), torch.random.fork_rng([]), autocast:
            out = made.module(*made.args, **made.kwargs)
            _ = out if made.loss is None else made.loss(out, *made.targets)
    except NotImplementedError:
        pass  # not on a CPU
    except (RuntimeError, IndexError, TypeError) as error:
        how = " in bfloat16" if halves else ""
        raise SetupError(f"{type(made.module).__name__} cannot be computed{how}: {reason(error)}") from error


def _count_tensors(tree: Any) -> int:
    return sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(tree))


def rows_of(inputs: Any) -> int:
    leaves = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return next((leaf.shape[0] for leaf in leaves if leaf.dim()), ROWS)


def columns_of(data: Any) -> Columns:
    """Samples as one array for each input. Raises SetupError: they are no samples, not of one form, or others
    each time; names the sample."""
    if isinstance(data, tuple) and data and all(isinstance(one, (torch.Tensor, np.ndarray)) for one in data):
        arrays = [_array(one) for one in data]
        lengths = {len(array) for array in arrays if array.ndim}
        if len(lengths) != 1 or not all(array.ndim for array in arrays):
            raise SetupError(f"data has arrays of {sorted(lengths)} samples: all must have as many")
    else:
        if isinstance(data, str) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise SetupError(
                f"data is a {type(data).__name__}: give samples (of a DataLoader its .dataset), anything "
                "with a length that gives a tuple of arrays for each number, or a table [data]"
            )
        parts: list[list[np.ndarray]] = []
        for number in (*range(len(data)), *range(min(1, len(data)))):  # the first one twice
            try:
                sample = data[number]
                one = [_array(part) for part in (sample if isinstance(sample, (tuple, list)) else (sample,))]
            except SetupError:
                raise
            except Exception as error:
                raise SetupError(f"data[{number}] cannot be had: {first_line(error)}") from error
            if parts and [array.shape for array in one] != [array.shape for array in parts[0]]:
                told = [" and ".join(str(list(array.shape)) for array in its) for its in (one, parts[0])]
                raise SetupError(f"data[{number}] is {told[0]}, data[0] is {told[1]}: make them alike")
            parts.append(one)
        if parts and not all(map(partial(np.array_equal, equal_nan=True), parts.pop(), parts[0])):
            raise SetupError(
                "data[0] holds other numbers when it is read again, and samples are read once: what is "
                "random in one must follow from its number, or be drawn by the model"
            )
        arrays = [np.stack(column) for column in zip(*parts, strict=True)]
    if not arrays or not len(arrays[0]):
        raise SetupError("data has no samples")
    return Columns([np.ascontiguousarray(array) for array in arrays])


def _array(part: Any) -> np.ndarray:
    if isinstance(part, torch.Tensor):  # numpy has no bfloat16
        try:
            part = (part.float() if part.dtype == torch.bfloat16 else part).detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:  # sparse, or without numbers
            raise SetupError(f"data holds a tensor that is no array: {first_line(error)}") from None
    array = np.asarray(part)
    if array.dtype.kind not in "biuf":
        kind = type(part).__name__ if array.dtype.kind == "O" else array.dtype
        raise SetupError(f"data holds {kind}: integers, booleans and floats can be trained on")
    return array


def largest_of(columns: Columns) -> int:
    arrays = [array for array in columns[:] if array.dtype.kind in "iu" and array.size]
    return max((int(array.max()) for array in arrays), default=0)
