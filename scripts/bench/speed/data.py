"""What data at web scale cost a trainer: opening an index, samples from the cache, proofs, fetching.

    python scripts/bench/speed/data.py                         # 10^9, 10^10 and 10^12 tokens; a minute
    python scripts/bench/speed/data.py --tokens 1e12 --samples 500

The tokens are made up: shards of 10^8 are behind a web server on this machine, which makes each block from
its number. Only the blocks that the samples need have nodes of their own; the others of the index are random
numbers, of which the root is made as of any. Each size is measured in a process of its own: `opened_mb` is by
how much its memory grows. Samples are of 2,049 tokens of 16 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from peers.programs.manifest import EXAMPLE
from peers.storage import CACHE_ENV
from peers.storage.dataset import Dataset, open_dataset
from peers.storage.index import NAME, TREE, Index, Shard, Source
from scripts.bench.common.harness import machine, report
from swarm.data import check_samples, sample_offsets
from swarm.manifest import AdmissionSpec, Run, parse_run, pin
from swarm.merkle import BLOCK_BYTES, NODE_BYTES, block_count, block_levels, grow

COLUMNS = (
    "tokens", "index_mb", "open_s", "opened_mb", "sample_ms", "sample_95_ms", "offset_ms",
    "prove_ms", "fetch_mb_s",
)  # fmt: skip
SHARD_TOKENS = 10**8
VOCABULARY = 50_257


@lru_cache(maxsize=16)
def made_up(block: int) -> bytes:
    """The tokens of a block, a function of its number."""
    seeded = np.random.Generator(np.random.Philox(block))
    return seeded.integers(0, VOCABULARY, BLOCK_BYTES // 2, dtype=np.uint16).tobytes()


def tokens_between(start: int, end: int) -> bytes:
    found = []
    while start < end:
        block = start // BLOCK_BYTES
        stop = min(end, (block + 1) * BLOCK_BYTES)
        found.append(made_up(block)[start - block * BLOCK_BYTES : stop - block * BLOCK_BYTES])
        start = stop
    return b"".join(found)


class Handler(BaseHTTPRequestHandler):
    """Ranges of shards, each of which is named by its number."""

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        base = int(self.path[1:]) * SHARD_TOKENS * 2
        data = tokens_between(base + first, base + last + 1)
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def run_of(tokens: int, root: str = "") -> Run:
    run = parse_run(EXAMPLE)
    run = replace(
        run,
        model=replace(run.built_in, vocab_size=VOCABULARY),
        data=replace(run.data, source="files", sequence_length=2048),
        batch=replace(run.batch, microbatch_size=1),
        admission=AdmissionSpec(trainers=("12D3KooW" + "A" * 44,)) if root else run.admission,
    )
    return pin(run, root or "0" * 64, tokens, root=root)


def made_index(folder: Path, tokens: int, samples: int, url: str) -> Run:
    """Write an index of so many tokens; the run that its first samples are of."""
    size, run = 2 * tokens, run_of(tokens)
    nodes = bytearray(np.random.default_rng(1).bytes(NODE_BYTES * block_count(size)))
    for m in range(samples):
        (offset,) = sample_offsets(run, 0, m)
        for block in range(2 * offset // BLOCK_BYTES, block_count(2 * offset + 4098)):
            data = tokens_between(block * BLOCK_BYTES, min(size, (block + 1) * BLOCK_BYTES))
            nodes[NODE_BYTES * block : NODE_BYTES * (block + 1)] = block_levels(data)[-1]
    with (folder / TREE).open("w+b") as tree:
        tree.write(nodes)
        root = grow(tree, size).hex()
    shards = tuple(
        Shard((f"{url}/{number}",), min(SHARD_TOKENS, tokens - number * SHARD_TOKENS))
        for number in range(-(-tokens // SHARD_TOKENS))
    )
    index = Index(2, "uint16", root, "", (Source("made up", shards),))
    (folder / NAME).write_bytes(msgspec.json.encode(index))
    return run_of(tokens, root)


def timed(times: int, job: Callable[[int], Any]) -> list[float]:
    """Milliseconds of each of so many calls."""
    found = []
    for number in range(times):
        began = time.perf_counter()
        job(number)
        found.append((time.perf_counter() - began) * 1e3)
    return found


def measured(folder: Path, run: Run, samples: int) -> dict[str, Any]:
    """The row of one size, by this process."""
    me = psutil.Process()
    os.environ[CACHE_ENV] = str(folder / "cache")
    before = me.memory_info().rss
    opened: list[Dataset] = []

    def open_it(_: int) -> None:
        opened[:] = [open_dataset(run, [folder])]

    first = timed(1, open_it)
    after = me.memory_info().rss
    open_ms = statistics.median(first + timed(4, open_it))
    (data,) = opened
    places = [sample_offsets(run, 0, m) for m in range(samples)]
    began = time.perf_counter()
    for place in places:
        data.bring(place)
    took_s = time.perf_counter() - began
    kept = sum(path.stat().st_size for path in (folder / "cache" / "blocks").rglob("??/*"))
    for m, place in enumerate(places[:20]):
        check_samples(run, 0, m, memoryview(data.batch(place).tobytes()), memoryview(data.prove(run, place)))
    data = open_dataset(run, [folder])
    read = timed(samples, lambda m: data.batch(places[m]))
    again = open_dataset(run, [folder])
    return {
        "tokens": run.data.tokens,
        "index_mb": sum((folder / name).stat().st_size for name in (NAME, TREE)) / 1e6,
        "open_s": open_ms / 1e3,
        "opened_mb": (after - before) / 1e6,
        "sample_ms": statistics.median(read),
        "sample_95_ms": sorted(read)[int(0.95 * samples)],
        "offset_ms": statistics.median(timed(samples, lambda m: sample_offsets(run, 1, m))),
        "prove_ms": statistics.median(timed(samples, lambda m: again.prove(run, places[m]))),
        "fetch_mb_s": kept / 1e6 / took_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e9, 1e10, 1e12])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        run = run_of(int(args.tokens[0]), json.loads((args.measure / "root").read_text()))
        print(json.dumps(measured(args.measure, run, args.samples)))
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = []
    for tokens in map(int, args.tokens):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run = made_index(folder, tokens, args.samples, f"http://127.0.0.1:{server.server_port}")
            (folder / "root").write_text(json.dumps(run.data.root))
            words = ["--measure", name, "--tokens", str(tokens), "--samples", str(args.samples)]
            done = subprocess.run(
                [sys.executable, __file__, *words], check=True, capture_output=True, text=True, env=os.environ
            )
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    server.shutdown()
    report(rows, COLUMNS, f"Data: {machine()}")


if __name__ == "__main__":
    main()
