"""Bytes that cross each boundary between two stages, ÷ the least that the codec allows.

    python scripts/bench/wire.py                      # 3 stages, hidden 512, blockwise8; about a minute
    python scripts/bench/wire.py --codec none bf16 blockwise8 --hidden 256 --steps 2

Counted by the peers themselves on their streams, in both directions: activations and labels forward,
gradients back, and all that goes along with them (frames, headers, heartbeats, the reports and briefs of a
step). The least is the payload alone: for blockwise8 a byte a number and a float32 scale a block of 256,
and the labels at a byte each. What libp2p adds below (encryption, multiplexing, TCP) is its own and not
counted.

`activations` and `gradients` are what a boundary carried for each microbatch; 1 each is all that is needed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Swarm, bench_run, machine, report

from swarm.run import Run
from swarm.wire.codec import encoded_sizes
from swarm.wire.messages import PeerStatus
from swarm.wire.tensors import gradient_meta, input_metas

COLUMNS = (
    "boundary", "hidden", "dtype", "codec", "bytes_per_microbatch", "least_bytes", "ratio", "forward_ratio",
    "backward_ratio", "activations", "gradients",
)  # fmt: skip


def least_bytes(run: Run) -> tuple[int, int]:
    """(forward, backward) payload of one microbatch at any boundary."""
    taken = input_metas(run, 1)
    forward = sum(sum(encoded_sizes(meta)) for meta in taken)
    return forward, sum(encoded_sizes(gradient_meta(run, 0, taken[0])))


def traffic(status: PeerStatus, other: str) -> tuple[int, int]:
    """(in, out) bytes of the links between this peer and `other`."""
    found = [link for link in status.links if link.peer == other]
    return sum(link.bytes_in for link in found), sum(link.bytes_out for link in found)


async def measure(run: Run, steps: int) -> list[dict[str, Any]]:
    """A row for each boundary."""
    async with Swarm(run) as swarm:
        await swarm.train(1)
        before = await swarm.statuses()
        await swarm.train(steps)
        after = await swarm.statuses()
    due = steps * run.M
    forward_least, backward_least = least_bytes(run)
    rows: list[dict[str, Any]] = []
    for stage in range(run.S - 1):
        here, there = f"stage {stage}", f"stage {stage + 1}"
        peer = after[there].peer
        then, now = traffic(before[here], peer), traffic(after[here], peer)
        back, forth = now[0] - then[0], now[1] - then[1]
        taken = after[there].taken - before[there].taken
        answered = after[there].answered - before[there].answered
        rows.append(
            {
                "boundary": f"{stage} – {stage + 1}",
                "stages": run.S,
                "hidden": run.model.hidden,
                "dtype": run.dtype,
                "codec": run.codec.forward_at(0),
                "microbatches": due,
                "bytes_per_microbatch": round((forth + back) / due),
                "least_bytes": forward_least + backward_least,
                "ratio": round((forth + back) / due / (forward_least + backward_least), 5),
                "forward_ratio": round(forth / due / forward_least, 5),
                "backward_ratio": round(back / due / backward_least, 5),
                "activations": round(taken / due, 4),
                "gradients": round(answered / due, 4),
            }
        )
    return rows


async def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for hidden in options.hidden:
        for codec in options.codec:
            run = bench_run(
                stages=options.stages, hidden=hidden, layers=options.stages, dtype=options.dtype, codec=codec,
                microbatches=options.microbatches,
            )  # fmt: skip
            rows += await measure(run, options.steps)
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    text, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=text, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=3, help="(default: 3)")
    parser.add_argument("--hidden", nargs="+", type=int, default=[512], help="(default: 512)")
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float64")
    parser.add_argument("--codec", nargs="+", default=["blockwise8"], help="none, bf16, blockwise8 (default)")
    parser.add_argument("--microbatches", type=int, default=16, help="of a step (default: 16)")
    parser.add_argument("--steps", type=int, default=2, help="to count, after one that is not (default: 2)")
    parser.add_argument("--quick", action="store_true", help="hidden 128, one step")
    options = parser.parse_args(arguments)
    if options.quick:
        options.hidden, options.steps = [128], 1
    return options


def main() -> None:
    options = parse()
    import uvloop

    rows = uvloop.run(bench(options))
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; wire.py {' '.join(sys.argv[1:])}")
    report(rows, COLUMNS, "bytes across each boundary ÷ the least possible for the codec")


if __name__ == "__main__":
    main()
