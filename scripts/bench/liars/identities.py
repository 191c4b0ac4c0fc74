"""What a hundred identities that answer nothing cost a run, in swarms of the shipped classes in virtual time.

    python scripts/bench/liars/identities.py
    python scripts/bench/liars/identities.py --kind silent --identities 300

3 stages of 3 replicas with vouchers, 12 microbatches a step of 0.15 s a forward or backward, a named trainer.
After a minute the identities announce themselves, a third at each stage, as serving and faster than anybody.
*Silent*: they take every call and answer none; *nobody home*: they are records, and no call reaches anybody.
What counts is how many steps are taken in each minute. `adversary_processes.py` shows the same in processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from peers.ports import Answer, Request
from peers.sim.loop import run_virtual
from peers.sim.network import SimTransport
from swarm.manifest import audit_run
from swarm.records import PeerRecord
from tests.peers import loops
from tests.peers.sybils import TRAINER, admitting

KINDS = ("silent", "nobody home")
STAGES, REPLICAS, MICROBATCHES, MINUTES = 3, 3, 12, 4
JOB_S = 0.15
RENEW_S = 12.0
METHODS = (
    "work",
    "locate",
    "report",
    "held",
    "part",
    "state",
    "saved",
    "status",
    "summary",
    "trail",
    "audit",
)


async def never(request: Request) -> Answer:
    await request.accept()
    return await asyncio.get_running_loop().create_future()


async def steps_a_minute(kind: str, identities: int) -> tuple[list[int], Counter[str]]:
    """The steps of the minute before, and of each one after; and the calls that the identities had."""
    run, calls = (
        admitting(audit_run(stages=STAGES, steps=5_000, microbatches_per_step=MICROBATCHES)),
        Counter[str](),
    )
    async with loops.swarm(run, replicas=REPLICAS) as s:
        await s.until_serving()
        s.add_trainer(TRAINER)
        honest = list(s.peers.values())
        await s.until_version(25, limit_s=4_000.0)

        async def minute() -> int:
            before = honest[0].core.version
            await asyncio.sleep(60.0)
            return honest[0].core.version - before

        async def announce() -> None:
            while True:
                for number, name in enumerate(names):
                    s.network.announce(
                        PeerRecord(
                            peer=name, run=run.id, stage=number % STAGES, state="serving",
                            version=honest[0].core.version, speed=1_000.0, device="cuda", since=0.0,
                        )
                    )  # fmt: skip
                await asyncio.sleep(RENEW_S)

        call = SimTransport.call

        async def counted(self: SimTransport, peer: str, method: str, *given: Any, **options: Any) -> Answer:
            calls[method] += peer in names
            return await call(self, peer, method, *given, **options)

        taken = [await minute()]
        names = [f"z{number:03}" for number in range(identities)]
        for name in names:
            end = s.network.join(name)
            for method in METHODS if kind == "silent" else ():
                end.transport.serve(method, never, max_body_bytes=1 << 24)
            if kind != "silent":
                s.network.stop(name)
        SimTransport.call = counted  # type: ignore[method-assign]
        announcing = asyncio.create_task(announce())
        try:
            taken += [await minute() for _ in range(MINUTES)]
        finally:
            SimTransport.call = call  # type: ignore[method-assign]
            announcing.cancel()
        for name, _ in s.live():
            version, counts = await s.counted(name)
            assert list(map(round, counts)) == [version] * MICROBATCHES, counts
    return taken, +calls


def row(kind: str, identities: int) -> dict[str, object]:
    (before, *after), calls = run_virtual(steps_a_minute(kind, identities))
    return {
        "lie": f"{identities} identities: {kind}",
        "before": before,
        "after": ", ".join(map(str, after)),
        "share": round(sum(after[1:]) / (len(after) - 1) / before, 2),
        "work": calls["work"],
        "other_calls": calls.total() - calls["work"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="this one; may be repeated")
    parser.add_argument("--identities", type=int, default=100, help="how many (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loops.JOB_S = JOB_S
    rows = [row(kind, options.identities) for kind in options.kind or KINDS]
    print(json.dumps({"rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
