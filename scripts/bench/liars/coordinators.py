"""By how much longer a run takes whose coordinator of a stage, with most voice, brings no step to its end.

    python scripts/bench/liars/coordinators.py --seeds 3

In virtual time: 3 stages, of which one has a coordinator that lies from step 4 on, of 8 steps of 4
microbatches of the model that counts its gradients. `--replicas`: of each stage.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from peers.sim.loop import run_virtual
from scripts.bench.liars import tarpits
from tests.peers.liars import test_lying_coordinators as lying
from tests.peers.loops import Swarm

GOAL_S = 30.0
LIES = {
    "has each retract in each round": (1, lying.retracts_in_each_round),
    "says nothing to its stage": (1, lying.says_nothing),
    "hides that its stage is ready": (1, lying.hides_that_its_stage_is_ready),
    "says that its stage is further": (1, lying.says_that_its_stage_is_further),
    "commits nothing": (0, lying.commits_nothing),
}
BESIDES: dict[str, tarpits.Way] = {
    "": lambda s, liars: None,
    ", and sends no part": tarpits.sends_no_part,
    ", and answers no work": tarpits.silent("work"),
}


@cache
def clean_s(seed: int, replicas: int) -> float:
    return run_virtual(lying.lasts_s(1, None, replicas=replicas, dtype="float32", seed=seed))


def lost_s(what: str, besides: str, seed: int, replicas: int) -> float:
    stage, lie = LIES[what]

    def begin(s: Swarm) -> None:
        name = f"s{stage}p0"
        lie(s.peers[name].coordination.protocol)
        BESIDES[besides](s, {name: s.peers[name]})

    took_s = run_virtual(lying.lasts_s(stage, begin, replicas=replicas, dtype="float32", seed=seed))
    return took_s - clean_s(seed, replicas)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--replicas", type=int, default=3, help="of each stage (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[dict[str, object]]()
    for what in LIES:
        for besides in BESIDES:
            seeds = range(1, options.seeds + 1)
            lost = [lost_s(what, besides, seed, options.replicas) for seed in seeds]
            rows.append(
                {
                    "what": what + besides,
                    "replicas": options.replicas,
                    "measured": ", ".join(f"{one_s:.1f}" for one_s in lost),
                    "missed": max(lost) > GOAL_S,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
