"""Liars in swarms of the shipped classes, in virtual time: how soon each is found, and what it costs.

    python scripts/bench/liars/adversary.py                       all lies, 4 seeds each
    python scripts/bench/liars/adversary.py --lie zero --seeds 20
    python scripts/bench/liars/adversary.py --decoder --liars 3 --lie "sign flip" --steps 200

3 stages of 5 replicas, 16 microbatches a step of the model that counts its gradients; with `--decoder` 30 of
a decoder of 3 layers of width 64 on Python's help topics. A liar of stage 1 (with `--liars 3` one of each
stage, a fifth of all) lies from step 42 on. Of each lie are told: after how many microbatches that the liar
had answered (of lies in answers), or steps (of lies in sums), its stage had left it out; who was accused
falsely; how many answers of honest peers were computed again; and by how much the loss of the last ten steps
differs from that of a run without liars. The last line is an object of rows for `tables.py --store threats`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from peers.sim.loop import run_virtual
from peers.stage.server import StagePeer
from peers.trainer import Batches
from swarm.errors import SwarmError
from swarm.manifest import CodecSpec, Run, demo_run
from tests.peers.admitted import TRAINER, admitting
from tests.peers.liars.test_false_answers import audited_run, lie
from tests.peers.liars.test_false_contributions import add_falsely
from tests.peers.liars.test_false_sums import value
from tests.peers.loops import Swarm, swarm

STAGES, REPLICAS, MICROBATCHES = 3, 5, 16
HONEST_STEPS = 42
"""Trainers vouch after 20 and 40 steps. While only one other replica of its stage has voice, a liar that has
some holds the run up until it is banned."""
Change = Callable[[np.ndarray], np.ndarray]


def noise(values: np.ndarray) -> np.ndarray:
    dice = np.random.default_rng(values.size)
    return values + dice.standard_normal(values.shape).astype(values.dtype) * (np.abs(values).mean() + 1e-3)


def stale() -> Change:
    """What was asked for before is answered now."""
    before: list[np.ndarray] = []

    def change(values: np.ndarray) -> np.ndarray:
        before.append(values.copy())
        old = before[-9] if len(before) > 8 else values
        return old if old.shape == values.shape else values

    return change


ANSWERS: dict[str, Callable[[], Change]] = {
    "sign flip": lambda: lambda values: -values,
    "zero": lambda: lambda values: values * 0,
    "times 100": lambda: lambda values: values * 100,
    "a tenth more": lambda: lambda values: values * 1.1,
    "constant": lambda: lambda values: np.full_like(values, 0.5),
    "noise": lambda: noise,
    "stale": stale,
}
ADDED = {"added: sign flip": -1.0, "added: zero": 0.0, "added: times 100": 100.0, "added: a tenth more": 1.1}
"""What a replica adds to its own sum; it answers truly."""
SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum: sign flip": torch.neg,
    "sum: zero": torch.zeros_like,
    "sum: times 100": lambda result: result * 100,
    "sum: a thousandth more": lambda result: result * 1.001,
}


@dataclass
class Played:
    """One run."""

    found_microbatches: list[int] = field(default_factory=list)
    found_steps: list[int] = field(default_factory=list)
    not_found: int = 0
    accused_falsely: int = 0
    audited: int = 0
    contributions: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def last_loss(self) -> float:
        """Of the last ten steps, on average."""
        return statistics.mean(self.losses[t] for t in sorted(self.losses)[-10:])


def decoder_run(seed: int, steps: int, trainer: str = TRAINER) -> tuple[Run, Batches]:
    """The demo's run, smaller, and its text."""
    run = demo_run(steps=steps, seed=seed)
    run = replace(
        run,
        model=replace(run.model, hidden=64, ffn_hidden=128),
        data=replace(run.data, sequence_length=64),
        batch=replace(run.batch, microbatch_size=2, microbatches_per_step=30),
        codec=CodecSpec.symmetric("none"),
    )
    tokens = np.frombuffer("\n".join(topics.values()).encode(), dtype=np.uint8)
    text = Text(tokens, run.data.sequence_length + 1)
    return admitting(replace(run, data=replace(run.data, tokens=len(tokens))), trainer), text


class Text:
    """Samples of a text in memory."""

    def __init__(self, tokens: np.ndarray, window: int) -> None:
        self._tokens, self._window = tokens, window

    def batch(self, offsets: list[int]) -> np.ndarray:
        return np.stack([self._tokens[start : start + self._window] for start in offsets])


async def play(name: str | None, seed: int, steps: int, liars: list[str], decoder: bool) -> Played:
    batches = None
    if decoder:
        run, batches = decoder_run(seed, steps)
    else:
        run = replace(audited_run(steps=steps, microbatches=MICROBATCHES), seed=seed)
    run = replace(run, name=f"adversary {name} {seed}".replace(":", ""))
    told = Played()
    async with swarm(run, replicas=REPLICAS, batches=batches) as s:
        await s.until_serving()
        trainer = s.add_trainer(TRAINER)
        await s.until_version(HONEST_STEPS, limit_s=600.0)
        for liar in liars:
            begin(s, s.peers[liar], name or "")
        before = {liar: s.peers[liar].microbatches.answered for liar in liars}
        began = s.network.loop.now_s
        honest = [peer for peer in s.peers if peer not in liars]
        found: dict[str, tuple[int, int]] = {}

        def over() -> bool:
            for liar in [liar for liar in liars if liar not in found and is_left_out(s, liar, liars)]:
                peer = s.peers[liar]
                version = max(s.peers[other].core.version for other in honest)
                found[liar] = (peer.microbatches.answered - before[liar], version + 1 - HONEST_STEPS)
            return all(s.peers[peer].core.version >= steps for peer in honest)

        await s.until(over, limit_s=600.0)
        told.took_s = s.network.loop.now_s - began
        await s.until(lambda: len(trainer.step_losses) == steps, limit_s=30.0)
        told.found_microbatches = [answered for answered, _ in found.values()]
        told.found_steps = [step for _, step in found.values()]
        told.not_found = len(liars) - len(found)
        told.accused_falsely = len(
            {who for peer in honest for who in s.peers[peer].convictions.convicted if who not in liars}
        )
        told.audited = sum(peer.answer_audits.audited for peer in s.peers.values())
        told.contributions = sum(peer.contribution_audits.audited for peer in s.peers.values())
        told.losses = dict(trainer.step_losses)
    return told


def begin(s: Any, peer: StagePeer, name: str) -> None:
    if name in ANSWERS:
        lie(peer, ANSWERS[name]())
    elif name in ADDED:
        add_falsely(peer, ADDED[name])
    else:
        value(SUMS[name])(s, peer)


def is_left_out(s: Swarm, liar: str, liars: list[str]) -> bool:
    """Whether an honest replica of its stage has convicted it."""
    mates = [peer for name, peer in s.peers.items() if name not in liars and name[:2] == liar[:2]]
    return any(liar in peer.convictions.convicted for peer in mates)


@cache
def without_liars(seed: int, steps: int, decoder: bool) -> Played:
    return run_virtual(play(None, seed, steps, [], decoder))


def row(name: str, options: argparse.Namespace) -> dict[str, object]:
    liars = [f"s{stage}p1" for stage in ([1] if options.liars == 1 else range(STAGES))]
    runs, clean = [], []
    for seed in range(1, options.seeds + 1):
        clean.append(without_liars(seed, options.steps, options.decoder))
        runs.append(run_virtual(play(name, seed, options.steps, liars, options.decoder)))
    sums = name in SUMS or name in ADDED
    found = [at for told in runs for at in (told.found_steps if sums else told.found_microbatches)]
    pairs = [(lied.last_loss, honest.last_loss) for lied, honest in zip(runs, clean, strict=True)]
    ratios = [abs(lied - honest) / abs(honest) for lied, honest in pairs]
    return {
        "lie": name,
        "liars": f"{len(liars)} of {STAGES * REPLICAS}",
        "unit": "steps" if sums else "microbatches",
        "mean": round(statistics.mean(found), 1) if found else None,
        "median": statistics.median(found) if found else None,
        "most": max(found, default=None),
        "not_found": sum(told.not_found for told in runs),
        "falsely": sum(told.accused_falsely for told in (*runs, *clean)),
        "audits": sum(told.audited for told in (*runs, *clean)),
        "contributions": sum(told.contributions for told in (*runs, *clean)),
        "loss": f"{100 * statistics.median(ratios):.2g} %" if ratios else None,
        "time": round(statistics.median(r.took_s / c.took_s for r, c in zip(runs, clean, strict=True)), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*ANSWERS, *SUMS, *ADDED]
    parser.add_argument("--lie", choices=names, action="append", help="this one; may be repeated")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each (%(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="of each run (%(default)s)")
    parser.add_argument("--liars", type=int, choices=(1, 3), default=1, help="3: one of each stage")
    parser.add_argument("--decoder", action="store_true", help="train a small decoder on text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for name in options.lie or names:
        try:
            rows.append(row(name, options))
        except (SwarmError, AssertionError) as error:
            rows.append({"lie": name, "failed": str(error).splitlines()[-1][:200]})
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"rows": rows}))
    return int(any(one.get("failed") or one.get("falsely") for one in rows))


if __name__ == "__main__":
    sys.exit(main())
