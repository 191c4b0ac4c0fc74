"""The loss of a swarm whose peers are killed, beside that of one process: the picture in the README.

    python scripts/bench/loss/loss_curve.py        # train both, write the data and the picture; eight minutes
    python scripts/bench/loss/loss_curve.py --draw  # the picture only, from the data of the last run
    python scripts/bench/loss/loss_curve.py --alone  # one process, as `swarm demo` shows it; three minutes

The swarm is that of `swarm demo`: real processes, two peers for each of three stages, blockwise8 between
stages. Peers are killed with SIGKILL in the middle of a step and replaced. Then one process trains the same
manifest, and every loss of every microbatch is compared.

The data are `docs/benchmarks/loss-curve.json`, the picture is `docs/loss-curve.svg`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

DATA = ROOT / "docs" / "benchmarks" / "loss-curve.json"
PICTURE = ROOT / "docs" / "loss-curve.svg"


# --- the run ---


def measure(steps: int, kills: int, peers: int) -> dict[str, Any]:
    """Train in a swarm, then in one process."""
    from peers.api.run import Run
    from peers.api.steps import reference
    from peers.events import Event, Killed, StepDone
    from peers.programs.demo import DemoOptions, EventLines, play
    from scripts.bench.common.harness import machine
    from swarm.manifest import demo_run

    run = Run.of(demo_run(steps=steps))
    options = DemoOptions(stages=run.terms.S, peers=peers, steps=steps, preempt=kills)
    killed: list[dict[str, int]] = []

    class Recorder(EventLines):
        taken = 0

        def __call__(self, event: Event) -> None:
            if isinstance(event, StepDone):
                self.taken = max(self.taken, event.t + 1)
            elif isinstance(event, Killed):
                killed.append({"step": self.taken, "stage": event.stage})
            super().__call__(event)

    title = f"{run.terms.S} stages × {peers} peers, {kills} kills"
    began = time.monotonic()
    result = play(run, options, Recorder(title, sys.stderr))
    swarm_s = time.monotonic() - began
    theirs: Any = result["_losses"]
    alone, largest = [], 0.0
    for step in reference(run):
        alone.append(step.loss)
        largest = max(largest, *(abs(a - b) for a, b in zip(step.losses, theirs[step.t], strict=True)))
        if (step.t + 1) % 10 == 0:
            print(f"one process: step {step.t + 1} of {steps}", file=sys.stderr)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "command": " ".join(["scripts/bench/loss/loss_curve.py", *sys.argv[1:]]),
        "commit": commit(),
        "stages": run.terms.S,
        "peers_per_stage": peers,
        "codec": "blockwise8",
        "kills": killed,
        "replayed": result["replayed"],
        "missing": result["missing"],
        "counted_twice": result["duplicated"],
        "largest_difference_of_a_loss": largest,
        "swarm_s": round(swarm_s, 1),
        "swarm": [sum(theirs[t]) / len(theirs[t]) for t in range(steps)],
        "one_process": alone,
    }


def alone() -> str:
    """What `peers.programs.demo` has of the demo in one process."""
    from peers.api.run import Run
    from peers.api.steps import reference
    from peers.programs.demo import ALONE, STEPS
    from swarm.manifest import demo_run

    run, losses = Run.of(demo_run(steps=STEPS)), list[float]()
    for step in reference(run):
        assert step.loss is not None
        losses.append(step.loss)
    often = STEPS // (len(ALONE.split()) - 3)
    means = [sum(losses[t : t + often]) / often for t in range(0, STEPS, often)]
    numbers = " ".join(f"{loss:.3f}" for loss in (losses[0], losses[-1], *means))
    return f"{run.id} {numbers}"


def commit() -> str:
    """The version that was measured."""
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return told.stdout.strip()


# --- the picture ---

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 64, 44


def draw(found: dict[str, Any]) -> str:
    """The picture as SVG: the swarm's loss as a thin line on the thick one of the single process."""
    swarm, alone = found["swarm"], found["one_process"]
    low = int(min(*swarm, *alone))
    high = int(max(*swarm, *alone)) + 1

    def x(step: float) -> float:
        return LEFT + step / (len(swarm) - 1) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def curve(losses: Sequence[float], style: str) -> str:
        points = " ".join(f"{x(t):.1f},{y(loss):.1f}" for t, loss in enumerate(losses))
        return f'<polyline fill="none" stroke-linejoin="round" {style} points="{points}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="13" fill="#24292f">',
        "<title>Loss by step: one process, and a swarm with peers killed</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
    ]
    for loss in range(low, high + 1):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" '
            'stroke="#d8dee4" stroke-width="1"/>'
        )
        parts.append(f'<text x="{LEFT - 10}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    every = max(1, len(swarm) // 50) * 10
    for step in range(0, len(swarm) + 1, every):
        if step < len(swarm):
            parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step</text>')
    parts.append(f'<text x="{LEFT - 10}" y="{TOP - 12}" text-anchor="end">loss</text>')
    parts.append(curve(alone, 'stroke="#f2b36f" stroke-width="8"'))
    parts.append(curve(swarm, 'stroke="#0550ae" stroke-width="2"'))
    for kill in found["kills"]:
        at = f"{x(kill['step']):.1f}"
        parts.append(
            f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#cf222e" '
            'stroke-width="1.5" stroke-dasharray="4 3"/>'
        )
        parts.append(
            f'<text x="{at}" y="{TOP - 6}" text-anchor="middle" fill="#cf222e">'
            f"SIGKILL, stage {kill['stage']}</text>"
        )
    legend = [
        ("#f2b36f", 8, "one process"),
        ("#0550ae", 2, f"swarm of {found['stages']} × {found['peers_per_stage']} processes"),
    ]
    at = LEFT
    for colour, thick, text in legend:
        parts.append(
            f'<line x1="{at}" x2="{at + 28}" y1="22" y2="22" stroke="{colour}" stroke-width="{thick}"/>'
        )
        parts.append(f'<text x="{at + 36}" y="26">{text}</text>')
        at += 60 + 7 * len(text)
    difference = found["largest_difference_of_a_loss"]
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="26" text-anchor="end" font-weight="600">'
        f"largest difference of a loss: {difference:.1g}</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="(default: 100)")
    parser.add_argument("--kills", type=int, default=3, help="(default: 3)")
    parser.add_argument("--peers", type=int, default=2, help="peers of each stage (default: 2)")
    parser.add_argument("--draw", action="store_true", help="draw the data that are there")
    parser.add_argument("--alone", action="store_true", help="only print what the demo's source has of this")
    options = parser.parse_args()
    if options.alone:
        print(alone())
        return
    if not options.draw:
        found = measure(options.steps, options.kills, options.peers)
        DATA.write_text(json.dumps(found, indent=1) + "\n")
    PICTURE.write_text(draw(json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
