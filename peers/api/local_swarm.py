"""`swarm.local`: train a run with real processes on this machine, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from peers.api.background import Background, heard
from peers.api.processes import Processes, Tally
from peers.api.run import Run, check_run
from peers.api.steps import Progress, Step
from peers.events import Emit
from peers.programs.fleet import check_folder, check_size, check_unused
from swarm.errors import SetupError
from swarm.ids import PeerId, Stage
from swarm.manifest import load_run


class LocalSwarm:
    """A swarm on this machine: `with` starts it and ends it, iterating it gives its steps."""

    def __init__(self, run: Run, processes: Processes, *, progress: bool) -> None:
        self.run, self._processes = run, processes
        self._background: Background | None = None
        self._progress = Progress(run.terms.name, run.terms.steps) if progress else None
        self._weights: tuple[dict[str, torch.Tensor], int] | None = None

    def __enter__(self) -> LocalSwarm:
        if self._processes.children:
            raise SetupError("a swarm is started once: for another, call swarm.local again")
        self._background = Background()
        try:
            self._background.call(self._processes.start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __iter__(self) -> Iterator[Step]:
        """The steps as they are taken, until the run is done.

        Raises:
            SetupError: a process failed, or no step is taken.
        """
        while (step := self._running.call(self._processes.next_step())) is not None:
            told, died = step
            names = ("t", "steps", "loss", "losses", "tokens_per_s", "peers")
            found = Step(died=died, **{name: getattr(told, name) for name in names})
            if self._progress is not None:
                self._progress(found)
            yield found
        if self._weights is None:
            self._running.call(self._processes.finish())
            self._weights = self._running.call(self._processes.weights())

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where other peers can join, with the run's id."""
        assert self._running  # raises what to do before the start
        return self._processes.addresses

    @property
    def tally(self) -> Tally:
        """What all processes said, added up."""
        return self._processes.tally

    def kill(self, stage: Stage | None = None) -> PeerId:
        """Kill a peer of that stage, or of any, with SIGKILL at its work; another takes its place. Raises
        SetupError: there is no such stage, or no peer that takes over the weights of a last one can start."""
        return self._running.call(self._processes.kill(stage))

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights by full name, also after the block.

        Raises:
            SetupError: the run was not trained to its end.
        """
        return self.trained()[0]

    def model(self) -> nn.Module:
        """The trained model, in evaluation mode, also after the block; raises as `weights`."""
        return self.run.trained(*self.trained())

    def trained(self) -> tuple[dict[str, torch.Tensor], int]:
        """The trained weights, and their version."""
        if self._weights is None:
            raise SetupError("the run is not trained to its end: go through all of its steps first")
        return self._weights

    @property
    def _running(self) -> Background:
        if self._background is None:
            raise SetupError(
                "start the swarm first: with swarm.local(run) as s: ... It runs in that block only"
            )
        return self._background

    def __exit__(self, *_: object) -> None:
        background, self._background = self._background, None
        if self._progress is not None:
            self._progress.close()
        if background is not None:
            with contextlib.closing(background):
                try:
                    background.call(self._processes.close())
                finally:  # interrupted, it has killed them: wait for their ends
                    background.call(self._processes.close())


def local(
    run: Run, peers: int = 2, *, on_event: Emit | None = None, progress: bool = True, yes: bool = False,
    folder: str | Path | None = None, device: str = "cpu",
) -> LocalSwarm:  # fmt: skip
    """Train a run with processes of this machine: a bootstrap, `peers` peers of each stage, and a trainer.

        with swarm.local(run, peers=2) as s:
            for step in s:
                print(step.t, step.loss)
        model = s.model()

    No process is left behind, however the block ends.

    Args:
        on_event: hears what happens, as it happens, from another thread. Its errors are logged.
        progress: show a bar.
        folder: that `swarm init` made of this run: checkpoints are kept there, and another swarm goes
            on from the newest.
        device: of the peers, as `swarm peer` takes it; they have several (`cuda:0,cuda:1`, `all`) in turn. On
            another than the CPU the result is not that of `reference` to the last bit.
        yes: start as many processes as that takes, however few cores there are.

    Raises:
        SetupError: more processes than this machine is likely to bear, or no such device, run or folder.
    """
    check_run(run)
    check_size(run.terms.cells, peers, yes)
    emit = heard(on_event or (lambda event: None))
    own = None if folder is None else Path(folder).expanduser()
    if own is not None:
        check_folder(own)
        check_unused(own)
        if load_run(path := own / "run.toml").id != run.id:
            raise SetupError(f"{own} holds another run than {run!r}: take swarm.Run.from_toml({str(path)!r})")
    processes = Processes(run, peers, emit, folder=own, device=device)
    return LocalSwarm(run, processes, progress=progress)
