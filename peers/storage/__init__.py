"""Files: tokens and checkpoints. Nothing here knows of the network."""

from __future__ import annotations

import os
from pathlib import Path

RESULTS_ENV = "SWARM_RESULTS"
"""The folder for the last versions of finished runs; empty: they are not saved."""

CACHE_ENV = "SWARM_CACHE"
"""Environment variable with the cache folder; ~/.cache/swarm without it."""


def cache_folder() -> Path:
    """What can be made again, or is kept between two starts."""
    return Path(os.environ.get(CACHE_ENV) or "~/.cache/swarm").expanduser()


def charters_folder() -> Path:
    """The highest charters that were seen: what is older is not believed again."""
    return cache_folder() / "charters"


def results_folder() -> Path | None:
    """Where the last version of a finished run goes if its peer was given no folder; None: nowhere."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    chosen = os.environ.get(RESULTS_ENV, f"{data}/swarm/results")
    return Path(chosen).expanduser() if chosen else None
