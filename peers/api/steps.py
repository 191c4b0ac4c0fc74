"""A step as a caller sees it, `swarm.reference` of one process; and a bar that shows how far a run is, in a
notebook or in a terminal."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn

from peers.api.background import as_in_peers
from peers.api.run import Run, check_run
from peers.progress import Bar
from swarm.floats import mean_of
from swarm.ids import PeerId
from swarm.model.reference import SingleProcess


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was taken."""

    t: int
    """0 … steps - 1. After a stage lost all of its peers, steps are taken again."""
    steps: int
    """Of the whole run."""
    loss: float | None
    """Mean of its microbatches; of a meeting of islands, which has none: None."""
    losses: tuple[float, ...]
    """Of each microbatch; empty: the trainer heard of the step before it had all answers."""
    tokens_per_s: float
    """Samples, where they are no text."""
    peers: tuple[int, ...] = ()
    """Peers that serve each stage."""
    died: tuple[PeerId, ...] = ()
    """Peers whose processes died since the step before; others take their places."""


class Progress:
    """A bar with the last loss, in a notebook's own way if this is one."""

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._display = name, _notebook_display()
        self._bar = None if self._display is not None else Bar(f"training {name}", steps, unit="steps")
        self._handle: Any = None

    def __call__(self, step: Step) -> None:
        if self._bar is not None:
            self._bar(1)
            return
        loss = "" if step.loss is None else f", loss {step.loss:.4f}"
        words = f"{self._name}: step {step.t + 1} of {step.steps}{loss}, {step.tokens_per_s:,.0f} a second"
        place = f'<progress value="{step.t + 1}" max="{step.steps}"></progress>'
        content = {"text/plain": words, "text/html": f"{place} {html.escape(words)}"}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def close(self) -> None:
        """The next line of a terminal is free."""
        if self._bar is not None:
            self._bar.__exit__()


def _notebook_display() -> Any:
    """A notebook's function `display`, or None where there is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    return sys.modules["IPython.display"].display


class Reference:
    """A run in one process, step by step; iterating it takes the steps that are left."""

    @as_in_peers()
    def __init__(self, run: Run) -> None:
        self.run = run
        self._single = SingleProcess(run.terms, run.open_data().batch)

    def __iter__(self) -> Iterator[Step]:
        terms, single = self.run.terms, self._single
        while single.version < terms.steps:
            t, began = single.version, time.monotonic()
            with as_in_peers():
                losses = single.step(t)
            tokens = len(losses) * terms.tokens_per_step / terms.M
            yield Step(
                t=t, steps=terms.steps, losses=tuple(losses), loss=mean_of(losses) if losses else None,
                tokens_per_s=tokens / (time.monotonic() - began),
            )  # fmt: skip

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights by full name; takes the steps that are left."""
        for _ in self:
            pass
        return self._single.named_weights()

    def model(self) -> nn.Module:
        """The trained model, in evaluation mode; takes the steps that are left."""
        return self.run.trained(self.weights(), self.run.terms.steps)


def reference(run: Run) -> Reference:
    """The same run in one process: its losses and weights are what every swarm has to arrive at.

    Raises:
        SetupError: `run` is no `swarm.Run`.
    """
    check_run(run)
    return Reference(run)
