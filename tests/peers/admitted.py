"""Runs whose manifest names trainers: simulated processes whose names have the form of peer ids."""

from __future__ import annotations

from dataclasses import replace

from swarm.manifest import AdmissionSpec, Run


def trainer_name(letter: str) -> str:
    """An id of the right form; `letter`: one of base58."""
    return "12D3KooW" + letter * 44


TRAINER, OTHER = trainer_name("t"), trainer_name("u")


def admitting(run: Run, *trainers: str) -> Run:
    """The run, with these trainers, or the usual two."""
    return replace(run, admission=AdmissionSpec(trainers=trainers or (TRAINER, OTHER)))
