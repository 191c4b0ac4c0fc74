"""Cuts of a model to compare with: as many layers for each stage, or as many operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.errors import SetupError
from swarm.model.graph.ir import OpGraph


def equal_layers(graph: OpGraph, stages: int) -> list[int]:
    """The stage of each operator. A layer is a module with a number in its name.

    Raises:
        SetupError: fewer layers than stages.
    """
    layer, layers = "", list[list[int]]()
    for op in graph.operators:
        name = _layer_of(op.module) or layer
        if not layers or (name != layer and not op.cheap):
            layers.append([])
            layer = name
        layers[-1].append(op.index)
    if len(layers) < stages:
        raise SetupError(f"{len(layers)} layers cannot be cut into {stages} stages of whole layers")
    stage_of = {i: n * stages // len(layers) for n, layer_ops in enumerate(layers) for i in layer_ops}
    return [stage_of[op.index] for op in graph.operators]


def equal_shares(amounts: Sequence[float], stages: int) -> list[int]:
    """In the order of the graph, cut where so many S-ths of all `amounts` are reached."""
    done, total, assignment = 0.0, math.fsum(amounts), []
    for number in amounts:
        # An operator goes where its middle lies.
        assignment.append(min(stages - 1, int((done + number / 2) * stages / total)) if total else 0)
        done += number
    return assignment


def _layer_of(module: str) -> str:
    """`decoder.layers.3.attention.q` -> `decoder.layers.3`; the first part of a name without a number."""
    parts = module.split(".")
    number = next((n for n, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])
