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

from peers.events import Evaluated as Done
from swarm.errors import SwarmError
from swarm.manifest import audit_run
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import Directive, ReplicaReport, RunStatus, StageSummary
from swarm.protocol.statements import sign
from swarm.records import PeerRecord, Voucher
from swarm.wire.evidence import (
    AskConvicted,
    AskKept,
    AskProducts,
    AuditAnswer,
    Reveal,
    ShowChunk,
    ShowEvidence,
    WrongAnswer,
)
from swarm.wire.messages import (
    MAX_HEADER_BYTES,
    AskSaved,
    AskStatus,
    AskTrail,
    CloseLease,
    Evaluate,
    Evaluated,
    FetchChunk,
    GiveVoucher,
    Locate,
    OpenHeld,
    OpenState,
    Part,
    Watch,
    Work,
    pack,
)
from swarm.wire.receipts import Answered
from tests.model.chain import batch_of
from tests.peers.admitted import TRAINER, admitting
from tests.peers.extremes import Extremes, bodies
from tests.peers.loops import Stranger, Swarm, swarm
from tests.peers.stage.test_evaluation import Text, eval_run, expected
from tests.peers.transfer.test_keeping import add_keeper

pytestmark = pytest.mark.virtual_time

REQUESTS: dict[str, type[msgspec.Struct]] = {
    "work": Work, "locate": Locate, "report": ReplicaReport, "directive": Directive, "summary": StageSummary,
    "run": RunStatus, "watch": Watch, "part": Part,
    "state": OpenState, "held": OpenHeld, "chunk": FetchChunk, "close": CloseLease,
    "saved": AskSaved, "status": AskStatus, "eval": Evaluate, "evaluated": Evaluated,
    "evidence": ShowEvidence, "convicted": AskConvicted, "audit": AuditAnswer, "kept": AskKept,
    "reveal": Reveal, "show": ShowChunk, "products": AskProducts, "trail": AskTrail, "voucher": GiveVoucher,
}  # fmt: skip
LIES = 4
"""Of each kind, from the liar to each peer."""
MOST_BYTES = 96 << 20
"""At once: half of it is bodies on their way, and garbage that waits for its collection."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


OF_EVALUATIONS = {"eval", "evaluated"}
ANSWERED = Answered(1, 0, 1, b"", b"", b"", b"", 1.0)
EVIDENCE = WrongAnswer(
    accused="s1p1", statement=ANSWERED, signature=b"", inputs=(), output_grads=(), outputs=(), input_grads=()
)


def honest(kind: type[msgspec.Struct], run: str) -> msgspec.Struct:
    """A message that would be well received, now and then: lies differ from it in a few fields."""
    fields: dict[str, Any] = {
        "run": run, "stage": 1, "t": 0, "m": 1, "version": 0, "members": 1, "coordinator": "s1p0", "start": 0,
        "numel": 1, "round": "r", "done": Bitmap(1), "lease": "l", "index": 0, "revision": 0, "e": 0,
        "loss": 1.0, "peer": "s1p1", "member": "s1p1", "made": True, "nonces": (bytes(16),) * 3, "place": 0,
        "since": 0, "until": 1, "statement": ANSWERED, "signature": b"", "evidence": EVIDENCE,
        "voucher": Voucher(TRAINER, 20, 20, bytes(64)),
    }  # fmt: skip
    needed = {field.name for field in msgspec.structs.fields(kind) if field.required} | {"run", "version"}
    return kind(
        **{name: value for name, value in fields.items() if name in needed & {*kind.__struct_fields__}}
    )


def owned(message: msgspec.Struct, run: str, liar: Stranger) -> msgspec.Struct:
    """The same lie with a signature that is right: of an accuser that accuses itself."""
    signer, me = liar.end.transport.signer, liar.end.peer_id
    if isinstance(message, ShowEvidence):
        signature = sign(signer, run, message.evidence.statement)
        mine = msgspec.structs.replace(message.evidence, accused=me, signature=signature)
        return msgspec.structs.replace(message, evidence=mine)
    if isinstance(message, AuditAnswer):
        signature = sign(signer, run, message.statement)
        return msgspec.structs.replace(message, peer=me, signature=signature)
    return message


async def lie(s: Swarm, liar: Stranger, method: str, callee: str, dice: random.Random) -> None:
    """Say something of that kind that cannot be true; an answer is as good as a refusal."""
    kind = REQUESTS[method]
    extremes = Extremes(dice, s.run.id, ("s0p0", "s1p1", liar.end.peer_id))
    message = extremes.of(kind, None if dice.random() < 0.5 else honest(kind, s.run.id))
    try:
        if dice.random() < 0.5:
            message = owned(message, s.run.id, liar)
        packed = pack(message)
    except (OverflowError, ValueError):  # no message says that
        return
    with contextlib.suppress(SwarmError):
        await asyncio.wait_for(liar.send(callee, method, packed[:MAX_HEADER_BYTES], next(bodies(dice))), 30.0)


@pytest.mark.slow
@pytest.mark.parametrize("announced", [False, True], ids=["a-stranger", "a-member"])
async def test_lies_with_extreme_values_end_no_peer_and_change_no_weight(
    announced: bool, tmp_path: Path
) -> None:
    run = replace(audit_run(stages=2, steps=3, microbatches_per_step=8), dtype="float32", checkpoint_every=2)
    run = admitting(run, TRAINER)
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
        usual = gc.get_threshold()
        gc.set_threshold(700, 10, 10)  # as in a program
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        lies = [(method, callee) for method in REQUESTS for callee in ("s0p0", "s1p0", "s1p1", "keeper")]
        lies = [pair for pair in lies * LIES if pair[0] in s.network.transports[pair[1]].handlers]
        dice.shuffle(lies)
        s.add_trainer(TRAINER)
        for at in range(0, len(lies), 16):
            await asyncio.gather(
                *(lie(s, liar, method, callee, dice) for method, callee in lies[at : at + 16])
            )
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        gc.unfreeze()
        gc.set_threshold(*usual)
        assert peak < MOST_BYTES
        await s.until_finished()
        s.assert_each_counted_once()
        await s.until(lambda: keeper.version in (2, 3))
        asked = {method for method, _ in lies}
        served = (s.network.transports[peer].handlers for peer in ("s0p0", "s1p0", "keeper"))
        assert asked == set(REQUESTS) - OF_EVALUATIONS == set().union(*served)


@pytest.mark.slow
async def test_extreme_questions_of_an_evaluation_end_no_peer_and_change_no_loss() -> None:
    run, dice = eval_run(), random.Random(14)
    losses, held_out = expected(run)[0], Text(batch_of(run))
    async with swarm(run, batches=held_out) as s:
        await s.until_serving()
        liar = s.add_stranger("z")
        await liar.end.directory.announce(
            PeerRecord(peer="z", run=run.id, stage=1, state="joining", version=0)
        )
        s.add_trainer("trainer", held_out=held_out)
        for _ in range(24):
            lies = [(method, callee) for method in OF_EVALUATIONS for callee in ("s0p0", "s1p1", "s2p0")]
            lies = [pair for pair in lies if pair[0] in s.network.transports[pair[1]].handlers]
            await asyncio.gather(*(lie(s, liar, method, callee, dice) for method, callee in lies))
        await s.until_finished()
        assert {(event.version, event.loss) for event in s.seen(Done)} <= set(losses.items())
        assert set(s.network.transports["s0p0"].handlers) >= OF_EVALUATIONS
