"""Every message with values at the ends of their types, to live handlers: nothing ends, each counts once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from swarm.errors import SwarmError
from swarm.manifest import audit_run
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import Directive, ReplicaReport, RunStatus, StageSummary
from swarm.records import PeerRecord
from swarm.wire.messages import (
    MAX_HEADER_BYTES,
    AskSaved,
    AskStatus,
    CloseLease,
    FetchChunk,
    GiveSum,
    Locate,
    OfferSum,
    OpenHeld,
    OpenState,
    OpenSum,
    Part,
    ProbeLine,
    TakeSum,
    Watch,
    Work,
    pack,
)
from tests.peers.extremes import Extremes, bodies
from tests.peers.loops import Stranger, Swarm, swarm
from tests.peers.test_keeping import add_keeper

pytestmark = pytest.mark.virtual_time

REQUESTS: dict[str, type[msgspec.Struct]] = {
    "work": Work, "locate": Locate, "report": ReplicaReport, "directive": Directive, "summary": StageSummary,
    "run": RunStatus, "watch": Watch, "part": Part, "offer": OfferSum, "give": GiveSum, "take": TakeSum,
    "state": OpenState, "held": OpenHeld, "sum": OpenSum, "chunk": FetchChunk, "close": CloseLease,
    "saved": AskSaved, "status": AskStatus, "line": ProbeLine,
}  # fmt: skip
MOST_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def honest(kind: type[msgspec.Struct], run: str) -> msgspec.Struct:
    """A message that would be well received, now and then: lies differ from it in a few fields."""
    fields: dict[str, Any] = {
        "run": run, "stage": 1, "t": 0, "m": 1, "version": 0, "members": 1, "coordinator": "s1p0", "start": 0,
        "numel": 1, "round": "r", "done": Bitmap(1), "lease": "l", "index": 0, "revision": 0,
    }  # fmt: skip
    needed = {field.name for field in msgspec.structs.fields(kind) if field.required} | {"run", "version"}
    return kind(
        **{name: value for name, value in fields.items() if name in needed & {*kind.__struct_fields__}}
    )


async def lie(s: Swarm, liar: Stranger, method: str, callee: str, dice: random.Random) -> None:
    """Say something of that kind that cannot be true; an answer is as good as a refusal."""
    kind = REQUESTS[method]
    extremes = Extremes(dice, s.run.id, ("s0p0", "s1p1", liar.end.peer_id))
    message = extremes.of(kind, None if dice.random() < 0.5 else honest(kind, s.run.id))
    try:
        packed = pack(message)
    except (OverflowError, ValueError):  # no message says that
        return
    with contextlib.suppress(SwarmError):
        await asyncio.wait_for(liar.send(callee, method, packed[:MAX_HEADER_BYTES], next(bodies(dice))), 30.0)


@pytest.mark.parametrize("announced", [False, True], ids=["a-stranger", "a-member"])
@pytest.mark.parametrize("each", [2, pytest.param(12, marks=pytest.mark.slow)])
async def test_lies_with_extreme_values_end_no_peer_and_change_no_weight(
    announced: bool, each: int, tmp_path: Path
) -> None:
    """`each`: lies of each kind, from the liar to each peer."""
    run = replace(audit_run(stages=2, steps=3, microbatches_per_step=8), checkpoint_every=2)
    dice = random.Random(14)
    async with swarm(run) as s:
        keeper = add_keeper(s, tmp_path)
        await s.until_serving()
        liar = s.add_stranger("z")
        if announced:
            record = PeerRecord(peer="z", run=run.id, stage=1, state="joining", version=0)
            await liar.end.directory.announce(record)
        gc.collect()
        gc.freeze()  # with much that stays alive from other tests, garbage would wait for long
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        lies = [(method, callee) for method in REQUESTS for callee in ("s0p0", "s1p0", "s1p1", "keeper")]
        lies = [pair for pair in lies * each if pair[0] in s.network.transports[pair[1]].handlers]
        dice.shuffle(lies)
        s.add_trainer("trainer")
        for at in range(0, len(lies), 16):
            await asyncio.gather(
                *(lie(s, liar, method, callee, dice) for method, callee in lies[at : at + 16])
            )
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        gc.unfreeze()
        assert peak < MOST_BYTES
        await s.until_finished()
        s.assert_each_counted_once()
        await s.until(lambda: keeper.version in (2, 3))
        assert {method for method, _ in lies} == set(REQUESTS)
