"""What of a model is trained: all of it, all but what is frozen, or thin matrices beside frozen ones (LoRA).

LoRA (Hu et al., 2021): a linear layer y = W x + b gives y + alpha / rank * B A x, of which A [rank, in] and
B [out, rank] are trained. B begins with zeros, so the model begins as it was.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from swarm.errors import SetupError
from swarm.manifest import LoraSpec
from swarm.model.seeded_random import initial_normal

A, B = "lora_A", "lora_B"
"""As peft calls them."""
MAX_TOLD = 20
MAX_OF_LAYER, MAX_OF_ALL = 1 << 26, 1 << 30
"""Numbers in these matrices. Each peer makes all of them, before it can know whether its stage fits: the
largest take a GB meanwhile."""


def is_adapter(name: str) -> bool:
    """Whether a parameter, by its full name, is one that `adapt` has added."""
    return name.endswith((f".{A}.weight", f".{B}.weight"))


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Have the parameters whose names match stay as they are. Raises SetupError: a pattern matches none; says
    which there are."""
    parameters = dict(module.named_parameters())
    for pattern in patterns:
        found = fnmatch.filter(parameters, pattern)
        if not found:
            raise SetupError(f"model.frozen: {pattern!r} matches no weight; there are {_some(parameters)}")
        for name in found:
            parameters[name].requires_grad_(False)


def adapt(module: nn.Module, spec: LoraSpec, seed: int) -> None:
    """Freeze all, and put matrices that are trained beside the layers that `spec.targets` names. Raises
    SetupError: a target is no linear layer of the model; says which there are."""
    named = module.named_modules()
    layers = {name: part for name, part in named if isinstance(part, nn.Linear) or is_transposed(part)}
    chosen: dict[str, nn.Module] = {}
    for target in spec.targets:
        found = {name: part for name, part in layers.items() if f".{name}".endswith(f".{target}")}
        if not found:
            ends = {name.rpartition(".")[2]: None for name in layers}
            raise SetupError(
                f"lora.targets: {target!r} is no linear layer of the model; there are {_some(ends) or 'none'}"
            )
        chosen |= found
    numbers = [spec.rank * sum(_sizes(part)) for part in chosen.values()]
    if max(numbers) > MAX_OF_LAYER or sum(numbers) > MAX_OF_ALL:
        raise SetupError(
            f"lora.rank = {spec.rank}: its matrices have up to {max(numbers)} numbers beside a layer and "
            f"{sum(numbers)} in all; at most {MAX_OF_LAYER} and {MAX_OF_ALL} are allowed"
        )
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    scale = spec.alpha / spec.rank
    for name, part in chosen.items():
        inside, outside = _sizes(part)
        part.add_module(A, _matrix(seed, f"{name}.{A}.weight", spec.rank, inside, 1 / math.sqrt(3 * inside)))
        part.add_module(B, _matrix(seed, f"{name}.{B}.weight", outside, spec.rank, 0.0))

        def beside(part: Any, given: Any, made: torch.Tensor) -> torch.Tensor:
            return made + getattr(part, B)(getattr(part, A)(given[0])) * scale

        part.lora_hook = part.register_forward_hook(beside)  # type: ignore[assignment]


@torch.no_grad()
def merge(module: nn.Module, spec: LoraSpec) -> None:
    """Add what was trained to the layers that it stands beside, which are then as any others. Raises
    SetupError: others share the weight of such a layer, and would be changed with it."""
    owners = Counter(id(one) for part in module.modules() for one in part.parameters(recurse=False))
    for name, part in list(adapted(module)):
        if owners[id(part.weight)] > 1:
            raise SetupError(f"{name} shares its weight, so nothing can be added to it: take --adapter")
        more = getattr(part, B).weight @ getattr(part, A).weight * (spec.alpha / spec.rank)
        part.weight.add_(more.T if is_transposed(part) else more)
        part.lora_hook.remove()
        del part.lora_hook
        delattr(part, A)
        delattr(part, B)


def adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that `adapt` has put matrices beside, by full name."""
    return ((name, part) for name, part in module.named_modules() if hasattr(part, "lora_hook"))


def _matrix(seed: int, name: str, rows: int, columns: int, std: float) -> nn.Module:
    found = nn.Linear(columns, rows, bias=False, device="meta")
    value = initial_normal(seed, name, (rows, columns), std) if std else torch.zeros(rows, columns)
    found.weight = nn.Parameter(value)
    return found


def is_transposed(part: nn.Module) -> bool:
    """Whether a layer has its weight as [in, out]: as GPT-2's in transformers, which may not be installed."""
    return type(part).__name__ == "Conv1D" and hasattr(part, "nf")


def _sizes(part: Any) -> tuple[int, int]:
    """Inputs and outputs."""
    first, second = part.weight.shape
    return (first, second) if is_transposed(part) else (second, first)


def _some(names: Any) -> str:
    found = list(names)
    return ", ".join(found[:MAX_TOLD]) + (
        f" and {len(found) - MAX_TOLD} more" if len(found) > MAX_TOLD else ""
    )
