"""Bytes that cross each boundary between two stages, ÷ the least that the codec allows.

    python scripts/bench/wire/wire.py                      # 3 stages, hidden 512, blockwise8; about a minute
    python scripts/bench/wire/wire.py --codec none bf16 blockwise8 topk:0.05 --hidden 256 --steps 2
    python scripts/bench/wire/wire.py --speed              # of the codecs alone, on one core; half a minute
    python scripts/bench/wire/wire.py --paths              # CPU time of the transport itself; a minute

Counted by the peers themselves on their streams, in both directions: activations and tokens forward,
gradients back, and all that goes along with them (frames, headers, heartbeats, the reports and directives of
a step). The least is the payload alone: for blockwise8 a byte a number and a float32 scale a block of 256,
for a top-k its values and its places by the formula, and the tokens at a byte each. What libp2p adds below
(encryption, multiplexing, TCP) is its own and not counted.

`activations` and `gradients` are what a boundary carried for each microbatch; 1 each is all that is needed.

`--speed`: 4 MB of float32 activations, [4, 512, 512], normal. In each round every codec encodes and decodes
once, in turn, so that all have the same disturbances; `…_to_8bit` is the median of the rounds' ratios to
blockwise8.

`--paths`: CPU seconds for each GB (10^9 bytes) that one peer sends another on this machine, of both ends with
their p2pds, by calls with 8 MiB in the body, four at a time: by p2pd, by a sealed connection beside it, and
in memory. In each round all paths carry as much, in turn, and so does bare TCP: one loop writes a quarter of
a MB at a time, another reads into one buffer. `aes` is the same in pieces of 64 KiB that are sealed with
AES-256-GCM at one end and opened at the other, without anything else. `to_p2pd` is the median of the rounds'
ratios, and `to_tcp` and `to_aes` likewise.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from peers.net.identity import split_peer_id
from peers.net.node import Node
from peers.net.p2pd import DaemonOptions
from peers.ports import Answer, Request
from peers.system import tune_malloc
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import Swarm, bench_run, machine, report
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.model.stage_io import body_bytes, gradient_metas, input_metas
from swarm.wire.codec import encoded_sizes, places_of
from swarm.wire.messages import PeerStatus
from tests.net.relay import direct_links

COLUMNS = (
    "boundary", "hidden", "dtype", "codec", "bytes_per_microbatch", "least_bytes", "ratio", "forward_ratio",
    "backward_ratio", "activations", "gradients",
)  # fmt: skip


def least_bytes(run: Run) -> tuple[int, int]:
    """(forward, backward) payload of one microbatch at any boundary."""
    taken = input_metas(run, 1)
    return body_bytes(taken), body_bytes(gradient_metas(run, 0))


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


PATH_COLUMNS = (
    "path", "cpu_s_per_gb", "python_s_per_gb", "p2pd_s_per_gb", "to_p2pd", "to_tcp", "to_aes", "gb_per_s",
)  # fmt: skip
BODY_BYTES, AT_ONCE = 8 << 20, 4
AES, NONCE, PIECE_BYTES = AESGCM(bytes(32)), bytes(12), 1 << 16


class Sink(asyncio.BufferedProtocol):
    """Reads, and answers each body with a byte."""

    def __init__(self) -> None:
        self._buffer, self._came = bytearray(1 << 18), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._came += nbytes
        while self._came >= BODY_BYTES:
            self._came -= BODY_BYTES
            self._transport.write(b".")


class SealedSink(Sink):
    """Opens each piece, and answers each body with a byte."""

    def __init__(self) -> None:
        super().__init__()
        self._sealed, self._at = memoryview(bytearray(PIECE_BYTES + 16)), 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._sealed[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at == len(self._sealed):
            self._at = 0
            super().buffer_updated(len(AES.decrypt(NONCE, self._sealed, None)))


async def serve_bodies() -> None:
    """The end that receives: says where, and takes bodies until it is ended."""

    async def take(request: Request) -> Answer:
        await request.accept()
        return Answer(b"")

    async with Node() as node:
        node.transport.serve("take", take, max_body_bytes=BODY_BYTES)
        loop = asyncio.get_running_loop()
        sinks = [await loop.create_server(sink, "127.0.0.1", 0) for sink in (Sink, SealedSink)]
        ports = [sink.sockets[0].getsockname()[1] for sink in sinks]
        print(node.daemon.pid, *ports, *node.addresses, flush=True)
        await asyncio.get_running_loop().create_future()


async def measure_paths(callee: subprocess.Popen[str], rounds: int, gigabytes: float) -> list[dict[str, Any]]:
    """A row for p2pd, and one for each kind of direct connection."""
    assert callee.stdout is not None
    p2pd_pid, port, sealed_port, *addresses = callee.stdout.readline().split()
    peer, pythons = split_peer_id(addresses[0])[1], (os.getpid(), callee.pid)
    async with (
        Node(join=addresses, options=DaemonOptions(direct=False)) as plain,
        Node(join=addresses, options=DaemonOptions(memory=False)) as direct,
        Node(join=addresses) as memory,
    ):
        for node in (plain, direct, memory):
            node.transport.addresses.learn(peer, addresses)
        for node in (direct, memory):
            while direct_links(node.transport) != (1, 0):
                await send_bodies(node, peer, AT_ONCE)
                await asyncio.sleep(0.1)
        bare = await asyncio.open_connection("127.0.0.1", int(port))
        sealed = await asyncio.open_connection("127.0.0.1", int(sealed_port))
        senders: dict[str, Callable[[int], Awaitable[None]]] = {
            "tcp": lambda calls: send_bare(*bare, calls),
            "aes": lambda calls: send_sealed(*sealed, calls),
            "p2pd": lambda calls: send_bodies(plain, peer, calls),
            "direct": lambda calls: send_bodies(direct, peer, calls),
            "memory": lambda calls: send_bodies(memory, peer, calls),
        }
        p2pds = [int(p2pd_pid), *(cast(int, node.daemon.pid) for node in (plain, direct, memory))]
        spent: dict[str, list[tuple[float, float, float]]] = {path: [] for path in senders}
        calls = round(gigabytes * 1e9 / BODY_BYTES)
        gb = calls * BODY_BYTES / 1e9
        for _ in range(rounds):
            for path, send in senders.items():
                before, began = (cpu_of(pythons), cpu_of(p2pds)), time.monotonic()
                await send(calls)
                took_s = time.monotonic() - began
                used = cpu_of(pythons) - before[0], cpu_of(p2pds) - before[1]
                spent[path].append((used[0] / gb, used[1] / gb, gb / took_s))
        assert direct_links(direct.transport) == direct_links(memory.transport) == (1, 0), "it broke"
        moved = [node.transport.lines[peer].memory_bytes for node in (direct, memory)]
        assert moved[0] == 0 < gb * rounds <= moved[1] / 1e9, "they took another path"
        bare[1].close()
        sealed[1].close()

    def ratio(path: str, to: str) -> float:
        pairs = zip(spent[path], spent[to], strict=True)
        return round(statistics.median(sum(one[:2]) / sum(other[:2]) for one, other in pairs), 3)

    return [
        {
            "path": path,
            "cpu_s_per_gb": round(statistics.median(sum(row[:2]) for row in rows), 3),
            "python_s_per_gb": round(statistics.median(row[0] for row in rows), 3),
            "p2pd_s_per_gb": round(statistics.median(row[1] for row in rows), 3),
            "to_p2pd": ratio(path, "p2pd"),
            "to_tcp": ratio(path, "tcp"),
            "to_aes": ratio(path, "aes"),
            "gb_per_s": round(statistics.median(row[2] for row in rows), 3),
        }
        for path, rows in spent.items()
    ]


async def send_bare(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, calls: int) -> None:
    chunk = bytes(1 << 18)
    for _ in range(calls):
        for _ in range(BODY_BYTES // len(chunk)):
            writer.write(chunk)
            await writer.drain()
    await reader.readexactly(calls)


async def send_sealed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, calls: int) -> None:
    piece = bytes(PIECE_BYTES)
    for _ in range(calls):
        for _ in range(BODY_BYTES // PIECE_BYTES):
            writer.write(AES.encrypt(NONCE, piece, None))
            await writer.drain()
    await reader.readexactly(calls)


async def send_bodies(node: Node, peer: PeerId, calls: int) -> None:
    body, left = [bytes(BODY_BYTES)], iter(range(calls))

    async def some() -> None:
        for _ in left:
            await node.transport.call(peer, "take", b"", body)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


def cpu_of(pids: Iterable[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


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
    parser = parser_of(__doc__)
    parser.add_argument("--stages", type=int, default=3, help="(default: 3)")
    parser.add_argument("--hidden", nargs="+", type=int, default=[512], help="(default: 512)")
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float64")
    parser.add_argument(
        "--codec", nargs="+", default=["blockwise8"], help="none, bf16, blockwise8 (default), topk:0.05"
    )
    parser.add_argument("--speed", action="store_true", help="time the codecs alone")
    parser.add_argument("--paths", action="store_true", help="time the transport alone, on both paths")
    parser.add_argument("--serve-bodies", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=31, help="of --speed and --paths")
    parser.add_argument("--gigabytes", type=float, default=0.25, help="of a round of --paths (default: 0.25)")
    parser.add_argument("--microbatches", type=int, default=16, help="of a step (default: 16)")
    parser.add_argument("--steps", type=int, default=2, help="to count, after one that is not (default: 2)")
    parser.add_argument("--quick", action="store_true", help="hidden 128, one step")
    options = parser.parse_args(arguments)
    if options.quick:
        options.hidden, options.steps = [128], 1
    return options


def main() -> None:
    options = parse()
    tune_malloc()  # as peers do: where freed bodies go back to the kernel, a GB costs a quarter more
    import uvloop

    if options.serve_bodies:
        uvloop.run(serve_bodies())
    if options.paths:
        command = [sys.executable, __file__, "--serve-bodies"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as callee:
            try:
                rows = uvloop.run(measure_paths(callee, options.rounds, options.gigabytes))
            finally:
                callee.terminate()
    else:
        rows = measure_speed(options.rounds) if options.speed else uvloop.run(bench(options))
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; wire.py {' '.join(sys.argv[1:])}")
    if options.paths:
        report(rows, PATH_COLUMNS, "CPU seconds a GB, both ends, through the transport of a peer")
    elif options.speed:
        report(rows, SPEED_COLUMNS, "codecs on one core: 4 MB of float32 activations")
    else:
        report(rows, COLUMNS, "bytes across each boundary ÷ the least possible for the codec")


if __name__ == "__main__":
    main()
