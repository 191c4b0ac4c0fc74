"""Runs and machines that are only described: a step's work from the manifest, the network from a file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from swarm.errors import SetupError, count
from swarm.manifest import Run
from swarm.plan.network import BACKWARD_FORWARDS, Network, StepWork, read_devices

NAMES_SHOWN = 6


def job_of(run: Run) -> StepWork:
    """The work of one step of a run, from its manifest alone; memory as its peers will reckon it.

    Raises:
        SetupError: the audit model has no arithmetic to reckon; a custom model cannot be built here.
    """
    from peers.owner.memory_limit import needs_of
    from swarm.model.layout import empty_state, reduce_bytes
    from swarm.model.stage import foretold_bytes
    from swarm.model.stage_io import body_bytes, gradient_metas, input_metas

    if run.model.kind == "counting":
        raise SetupError('model.kind = "counting": it computes nothing; take a run of another model')
    stages = range(run.S)
    alike = _alike(run)
    kept = {kind: foretold_bytes(run, alike.index(kind)) for kind in set(alike)}
    return StepWork(
        stages=run.S,
        microbatches=run.M,
        forward_flops=_forward_flops(run),
        forward_bytes=tuple(body_bytes(input_metas(run, s)) for s in stages[1:]),
        backward_bytes=tuple(body_bytes(gradient_metas(run, boundary)) for boundary in stages[:-1]),
        gradient_bytes=tuple(reduce_bytes(run, s) for s in stages),
        state_bytes=tuple(
            float(sum(t.numel() * t.element_size() for t in empty_state(run, s).values())) for s in stages
        ),
        activation_bytes=tuple(float(kept[kind]) for kind in alike),
        fixed_bytes=tuple(float(needs_of(run, s).fixed) for s in stages),
    ).packing(run.codec)


def _alike(run: Run) -> list[tuple[int, ...]]:
    """Of every stage; those with the same keep as many bytes of a microbatch."""
    from swarm.model.gpt import layer_split

    if run.brings_model:
        return [(stage,) for stage in range(run.S)]
    return [(len(layers), s == 0, s == run.S - 1) for s, layers in enumerate(layer_split(run))]


def _forward_flops(run: Run) -> tuple[float, ...]:
    """Per stage, of a microbatch."""
    from swarm.model.gpt import layer_flops, layer_split

    if run.brings_model:
        from swarm.model.custom import custom_model
        from swarm.model.graph.cost import operations

        model = custom_model(run)
        each = [both / (1 + BACKWARD_FORWARDS) for both in operations(model.traced)]
        return tuple(sum(each[i] for i in plan.operators) for plan in model.plans)
    tokens = run.batch.microbatch_size * run.data.sequence_length
    block, head = layer_flops(run.built_in, run.data.sequence_length)
    layers = [len(layers) for layers in layer_split(run)]
    return tuple(2.0 * tokens * (n * block + head * (s == run.S - 1)) for s, n in enumerate(layers))


def load_devices(path: Path) -> Network:
    """The network of a `devices.toml`.

    Raises:
        SetupError: it cannot be read, or says what cannot be; the text names the file.
    """
    text = read_text(path)
    try:
        return read_devices(text)
    except SetupError as error:
        raise SetupError(f"{path}: {error.text}") from None


def read_text(path: Path) -> str:
    """All of a file that a user gave. Raises SetupError: there is none, or it is no text."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise SetupError(f"{path} cannot be read: {reason}") from None


def heading(run: Run, network: Network) -> str:
    there = f"{count(len(network), 'device')} in {count(len(set(network.place_of)), 'region')}"
    if (islands := run.islands.count) == 1:
        return f"{run.name}: {count(run.S, 'stage')}, {run.M} microbatches a step, {there}"
    each = run.M // islands
    return f"{run.name}: {islands} islands of {run.S} stages, {each} microbatches a step, on {there}"


def as_now(now_s: float | None, step_s: float, measured: str, lacks: str) -> list[str]:
    """What a step takes as the peers of a run are, beside what is planned; nothing of described machines.
    `lacks`: what there is to say if one is missing."""
    if now_s is None:
        return []
    taken = f": {now_s:.3g} s ({now_s / step_s:.2f} times)" if now_s < math.inf else f", {lacks}"
    return [f"as the peers are now{taken}", measured]


def shown_bytes(size: float) -> str:
    """`512 B`, `1.5 kB`, ... for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def shown_names(network: Network, members: np.ndarray) -> str:
    """The first of some devices, and how many there are more."""
    shown = [network.devices[i].name for i in members[:NAMES_SHOWN]]
    more = len(members) - len(shown)
    return ", ".join(shown) + (f" and {more} more (--json names all)" if more else "")
