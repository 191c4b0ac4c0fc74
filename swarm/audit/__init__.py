"""Verification: what shows that a peer lied, computed again from what it signed."""

from __future__ import annotations

from swarm.manifest import Run


def is_audited(run: Run) -> bool:
    """Whether answers are audited: trainers are named, and codecs leave no numbers out."""
    sparse = any("topk" in run.codec.forward_at(boundary) for boundary in range(run.S - 1))
    return bool(run.admission.trainers) and not sparse
