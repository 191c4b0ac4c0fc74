"""Bytes that cross each boundary between two stages, ÷ the least that the codec allows.

    python scripts/bench/wire.py                      # 3 stages, hidden 512, blockwise8; about a minute
    python scripts/bench/wire.py --codec none bf16 blockwise8 topk:0.05 --hidden 256 --steps 2
    python scripts/bench/wire.py --speed              # of the codecs alone, on one core; half a minute

Counted by the peers themselves on their streams, in both directions: activations and tokens forward,
gradients back, and all that goes along with them (frames, headers, heartbeats, the reports and directives of
a step). The least is the payload alone: for blockwise8 a byte a number and a float32 scale a block of 256,
for a top-k its values and its places by the formula, and the tokens at a byte each. What libp2p adds below
(encryption, multiplexing, TCP) is its own and not counted.

`activations` and `gradients` are what a boundary carried for each microbatch; 1 each is all that is needed.

`--speed`: 4 MB of float32 activations, [4, 512, 512], normal. In each round every codec encodes and decodes
once, in turn, so that all have the same disturbances; `…_to_8bit` is the median of the rounds' ratios to
blockwise8.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Swarm, bench_run, machine, report

from swarm.manifest import Run
from swarm.model.stage_io import body_bytes, gradient_metas, input_metas
from swarm.wire.codec import encoded_sizes, places_of
from swarm.wire.messages import PeerStatus

COLUMNS = (
    "boundary", "hidden", "dtype", "codec", "bytes_per_microbatch", "least_bytes", "ratio", "forward_ratio",
    "backward_ratio", "activations", "gradients",
)  # fmt: skip


def least_bytes(run: Run) -> tuple[int, int]:
    """(forward, backward) payload of one microbatch at any boundary."""
    taken = input_metas(run, 1)
    return body_bytes(taken), body_bytes(gradient_metas(run, 0, taken))


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
                "hidden": run.built_in.hidden,
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


SPEED_SHAPE = (4, 512, 512)
PARTS = ("0.01", "0.05", "0.1", "0.25")
SPEED_COLUMNS = (
    "codec", "bytes", "times_smaller", "bits_a_place", "encode_ms", "decode_ms", "encode_to_8bit",
    "decode_to_8bit",
)  # fmt: skip


def measure_speed(rounds: int) -> list[dict[str, Any]]:
    """A row for each codec, of encoding and decoding on one core."""
    import torch

    from swarm.wire.codec import decode, encode

    torch.set_num_threads(1)
    x = torch.randn(SPEED_SHAPE, generator=torch.Generator().manual_seed(1))
    codecs = ["blockwise8", "none", "bf16"]
    codecs += [f"topk:{part}{values}" for part in PARTS for values in ("", "+bf16", "+blockwise8")]
    sent = {codec: encode(x, codec) for codec in codecs}
    encode_s: dict[str, list[float]] = {codec: [] for codec in codecs}
    decode_s: dict[str, list[float]] = {codec: [] for codec in codecs}
    for _ in range(rounds):
        for codec in codecs:
            began = time.perf_counter()
            encode(x, codec)
            between = time.perf_counter()
            decode(*sent[codec])
            encode_s[codec].append(between - began)
            decode_s[codec].append(time.perf_counter() - between)

    def ratio(times: dict[str, list[float]], codec: str) -> float:
        paired = zip(times[codec], times["blockwise8"], strict=True)
        return round(statistics.median(a / b for a, b in paired), 2)

    rows: list[dict[str, Any]] = []
    for codec in codecs:
        places = places_of(sent[codec])
        index_bits = 0 if places is None else 8 * encoded_sizes(sent[codec].meta)[0] / len(places)
        rows.append(
            {
                "codec": codec,
                "bytes": sent[codec].nbytes,
                "times_smaller": round(x.nbytes / sent[codec].nbytes, 1),
                "bits_a_place": round(index_bits, 2),
                "encode_ms": round(1e3 * statistics.median(encode_s[codec]), 2),
                "decode_ms": round(1e3 * statistics.median(decode_s[codec]), 2),
                "encode_to_8bit": ratio(encode_s, codec),
                "decode_to_8bit": ratio(decode_s, codec),
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
    parser.add_argument(
        "--codec", nargs="+", default=["blockwise8"], help="none, bf16, blockwise8 (default), topk:0.05"
    )
    parser.add_argument("--speed", action="store_true", help="time the codecs alone")
    parser.add_argument("--rounds", type=int, default=31, help="of --speed")
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

    rows = measure_speed(options.rounds) if options.speed else uvloop.run(bench(options))
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; wire.py {' '.join(sys.argv[1:])}")
    if options.speed:
        report(rows, SPEED_COLUMNS, "codecs on one core: 4 MB of float32 activations")
    else:
        report(rows, COLUMNS, "bytes across each boundary ÷ the least possible for the codec")


if __name__ == "__main__":
    main()
