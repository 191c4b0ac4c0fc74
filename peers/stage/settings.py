"""What the owner of a stage peer decides: room, folders, and how long leaving may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from peers.clock import now_s, unix_s
from peers.vouching.own import OwnVoucher


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where this peer saves its stage, and how many steps are kept there."""

    folder: Path
    keep: int = 2
    only_last: bool = False
    """Save the run's last version only, and resume from nothing: where the owner named no folder."""


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What a peer decides for itself."""

    max_inflight: int = 4
    workers: int = 1
    """Microbatches that are computed at once."""
    device_name: str = "cpu"
    addresses: tuple[str, ...] = ()
    machine: str = ""
    checkpoints: Checkpoints | None = None
    movable: bool = False
    """It may be sent to another stage that needs it more."""
    leave_within_s: float = 25.0
    """Limit for finishing; a cloud's notice is 30 s."""
    pause_within_s: float = 5.0
    """The same before a pause: the owner waits for the device."""
    hung_s: float = 600.0
    """A job of the device that takes less is never given up."""
    joined_at: float = field(default_factory=unix_s)
    started_at: float = field(default_factory=now_s)
    """When its program started, which pauses and moves do not change."""
    upload_bps: float = 0.0
    """What its owner lets it send, bits per second; 0: no limit."""
    voucher: OwnVoucher = field(default_factory=OwnVoucher)
    """That it has worked for the run: of the process, whichever stage it serves."""

    @property
    def resumed_from(self) -> Path | None:
        """The folder whose checkpoints this peer starts from, goes back to and gives out."""
        saved = self.checkpoints
        return None if saved is None or saved.only_last else saved.folder
