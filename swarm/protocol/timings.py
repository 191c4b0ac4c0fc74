"""How long the coordination of steps waits for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProtocolTimings:
    """Time limits in seconds. Peers of a run need not agree on them: other numbers cost time only."""

    refresh_s: float = 1.0
    """Everything is told again this often, so that a lost message costs at most this."""
    gone_after_s: float = 3.5
    """A replica that was silent this long is left out: three missed reports, as with a call's heartbeats."""
    check_s: float = 1.0
    """How often a stage that cannot follow the run is checked."""
    lost_s: float = 6.0
    """A stage without any replica that has its weights counts as lost after this: replicas may be cut off
    shortly."""

    def is_gone(self, seen_s: float, *, now: float) -> bool:
        """Whether a replica that last spoke at `seen_s` is left out."""
        return now - seen_s > self.gone_after_s
