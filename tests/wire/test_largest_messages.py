"""The largest message of each kind that an honest peer of a legal run can have to say: all can be said.

Legal: 256 stages of 8192 microbatches, 1,000 replicas of a stage, names as long as they may be. In a run
whose sums are checked 300 replicas: an owner tells the signed contributions of all in one header.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from peers.stage.status import MAX_PAST_TOLD, MAX_WORDS
from peers.status_query import MAX_LINKS_TOLD
from peers.transfer.catalog import MAX_SIGNED, MAX_VERSIONS
from swarm.digest import DIGEST_BYTES
from swarm.errors import Refused, SetupError
from swarm.ids import SIGNATURE_BYTES, Generation, PeerId
from swarm.protocol import messages as protocol_messages
from swarm.protocol.coordinator import MAX_SOURCES
from swarm.protocol.ledger import MAX_MICROBATCHES, Bitmap
from swarm.protocol.messages import (
    LOSSES_KEPT,
    MAX_LEFT_OUT,
    MAX_STEPS,
    Directive,
    Positioned,
    ReplicaReport,
    RunStatus,
    StageSummary,
    StepDirective,
    StepLacking,
)
from swarm.protocol.replica import COMMITS_KEPT
from swarm.protocol.rounds import (
    MAX_NAME,
    PROOFS,
    Commit,
    FetchResult,
    Plan,
    Prepared,
    Proof,
    StepReport,
    StepSummary,
    round_id,
)
from swarm.protocol.sums import Contribution, PartProof, ReducedProof
from swarm.records import Voucher
from swarm.wire import messages as wire_messages
from swarm.wire.messages import (
    MAX_HEADER_BYTES,
    MAX_HOPS,
    MAX_LONG_BYTES,
    MAX_RECEIPTS,
    Evaluate,
    GiveVoucher,
    Hop,
    LedgerCounts,
    LinkStatus,
    Located,
    Opened,
    Part,
    PartDone,
    PastStep,
    PeerStatus,
    RunMessage,
    Saved,
    SavedStage,
    TensorForm,
    Ticket,
    Trail,
    Watched,
    Work,
    WorkDone,
    hear,
    pack,
    say,
    unpack,
    with_latency,
)
from swarm.wire.receipts import Link, Receipt
from swarm.wire.tensor_meta import TensorMeta
from swarm.wire.trails import MAX_STEPS as MAX_TRAIL_STEPS
from swarm.wire.trails import ROW_BYTES, Signed, TookSteps
from tests.example import example_run

M, S, REPLICAS, T = MAX_MICROBATCHES, 256, 1000, 10**9
DICE = random.Random(14)
NAME, RUN = "f" * MAX_NAME, "f" * 32
DIGEST = bytes(DIGEST_BYTES)
GENERATION = Generation(T, T, 1023, T)
HUGE = 1 << 62
SAY_LONG = {Directive, RunStatus, ReplicaReport, StageSummary, Watched, Saved}
"""Those that `say` says. The others fit into a header, whatever happens."""


def peer(number: int) -> PeerId:
    letters = random.Random(number).choices(
        "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", k=44
    )
    return "12D3KooW" + "".join(letters)


PEERS = tuple(sorted(peer(number) for number in range(REPLICAS)))


HALF = Receipt(DIGEST, DIGEST, b"", b"", bytes(SIGNATURE_BYTES))


def worst() -> Bitmap:
    """Every other microbatch, nearly: nothing says it in less than a bit for each."""
    return Bitmap(DICE.getrandbits(M) | 1 << (M - 1))


def plan() -> Plan:
    """Each microbatch at any of the replicas, whose parts all differ."""
    owned: list[list[int]] = [[] for _ in PEERS]
    for m in range(M):
        DICE.choice(owned).append(m)
    ledgers = tuple(Bitmap(sum(1 << m for m in mine)) for mine in owned)
    parts = tuple(DICE.randrange(1 << 40) for _ in PEERS)
    return Plan(round_id(RUN, 0, T, 9, PEERS, ledgers, parts), HUGE, PEERS, ledgers, parts)


def metas(count: int) -> tuple[TensorMeta, ...]:
    return (TensorMeta((1 << 20,) * 3, "float32", "topk:0.000001+blockwise8"),) * count


COMMITS = (Commit(T, 1.5),) * COMMITS_KEPT
PREPARED = Prepared(NAME, 1.5, NAME)
RUN_STATUS = RunStatus(
    run=RUN, generation=GENERATION, version=T, held_by_all=T, commits=COMMITS, run_coordinator=PEERS[0],
    losses=((T, 1.5),) * LOSSES_KEPT,
    lacking=tuple(StepLacking(t=T, by_stage=tuple(worst() for _ in range(S))) for _ in range(2)),
)  # fmt: skip
PAST = PastStep(version=T, took_s=1.5, loss=1.5)
WORD = (
    TookSteps(S, T, "\N{MAHJONG TILE EAST WIND}" * 64, bytes(ROW_BYTES)),
    Signed(PEERS[0], bytes(SIGNATURE_BYTES), Voucher(PEERS[0], HUGE, HUGE, bytes(SIGNATURE_BYTES), HUGE)),
)
LARGEST: dict[type, msgspec.Struct] = {
    Located: Located(has=True, left_out=PEERS[:MAX_LEFT_OUT]),
    ReplicaReport: ReplicaReport(
        generation=GENERATION, version=T, run=RUN, stage=S, digest=NAME, kind=NAME, commits=COMMITS,
        say_leaving=True, bandwidth_bps=1.5,
        steps=(
            StepReport(
                t=T, done=worst(), in_progress=worst(), frozen_for=NAME, prepared=PREPARED, failed_round=NAME,
            ),
        ) * MAX_STEPS,
    ),
    Directive: Directive(
        generation=GENERATION, version=T, run=RUN, stage=0, coordinator=PEERS[0], number=HUGE, behind_s=T,
        sources=PEERS[:MAX_SOURCES], digest=NAME, commits=COMMITS, run_status=RUN_STATUS,
        steps=tuple(StepDirective(t=T, plan=plan()) for _ in range(2)),
    ),
    StageSummary: StageSummary(
        generation=GENERATION, version=T, run=RUN, stage=S, members=REPLICAS, commits=COMMITS,
        steps=(StepSummary(t=T, unclaimed=worst(), ready=True, sqnorm=1.5, loss=1.5),) * MAX_STEPS,
    ),
    RunStatus: RUN_STATUS,
    Watched: Watched(generation=GENERATION, version=T, revision=HUGE, status=RUN_STATUS),
    Work: Work(
        run=RUN, t=T, m=M, version=T, attempt=1 << 30, deepest=S, route=PEERS[:MAX_HOPS], tensors=metas(400),
        ticket=Ticket(trainer=PEERS[0], inputs=DIGEST, to=PEERS[0], signature=bytes(SIGNATURE_BYTES)),
        fed=HALF, through=(Link(PEERS[0], HALF),) * MAX_RECEIPTS,
    ),
    Evaluate: Evaluate(run=RUN, t=T, e=HUGE, route=PEERS[:MAX_HOPS], tensors=metas(400)),
    WorkDone: WorkDone(
        loss=1.5, tensors=metas(300),
        hops=with_latency(tuple(
            Hop(
                stage=s, peer=PEERS[s], own_s=1.5, compute_s=1.5, latency_s=1.5, rtt_s=1.5,
                upload_s=1.5, receipt=Receipt(DIGEST, DIGEST, DIGEST, DIGEST, bytes(SIGNATURE_BYTES)),
            )
            for s in range(MAX_HOPS)
        ), 1e6, 1.5),
    ),
    GiveVoucher: GiveVoucher(run=RUN, voucher=Voucher(PEERS[0], HUGE, HUGE, bytes(SIGNATURE_BYTES))),
    Part: Part(run=RUN, t=T, round=NAME, start=HUGE, numel=HUGE, crc=1 << 31, tensors=metas(1)),
    PartDone: PartDone(
        crc=1 << 31, tensors=metas(1),
        proof=ReducedProof(
            tuple(Contribution(name, bytes(32), bytes(32), bytes(64)) for name in PEERS[:300]),
            bytes(32 * 8), bytes(64),
        ),
    ),
    Opened: Opened(
        generation=GENERATION, version=T, lease="f" * 16, last_commit=COMMITS[0], prepared=PREPARED,
        tensors=(TensorForm(name=NAME, numel=HUGE, dtype="float32"),) * 8,
    ),
    Saved: Saved(
        stages=tuple(
            SavedStage(stage=s, versions=tuple(range(T, T + MAX_VERSIONS)), signed=(WORD,))
            for s in range(MAX_SIGNED)
        )
    ),
    Trail: Trail(
        steps=TookSteps(S, T, "\N{GREEK SMALL LETTER OMEGA}" * 64, bytes(MAX_TRAIL_STEPS * ROW_BYTES)),
        signature=bytes(SIGNATURE_BYTES),
    ),
    PastStep: PAST,
    PeerStatus: PeerStatus(
        generation=GENERATION, version=T, peer=PEERS[0], stage=S, state="choosing", device=NAME, since=1.5,
        done=M, inflight=M, max_inflight=M, speed=1.5, computed=HUGE, coordinator=PEERS[1],
        links=(LinkStatus(peer=PEERS[0], bytes_in=HUGE, bytes_out=HUGE, rtt_s=1.5, bandwidth_bps=1.5),)
        * MAX_LINKS_TOLD,
        rebalance="\N{GREEK SMALL LETTER OMEGA}" * MAX_WORDS, digest=NAME, kind=NAME, trainers=PEERS[:16],
        past=(PAST,) * MAX_PAST_TOLD,
    ),
}  # fmt: skip


def kinds() -> list[type[msgspec.Struct]]:
    """All messages that are no part of another one."""
    declared = {
        kind: None
        for module in (protocol_messages, wire_messages)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    inner = {
        RunMessage,
        Positioned,
        Plan,
        Commit,
        Prepared,
        FetchResult,
        StepReport,
        StepSummary,
        StepDirective,
    }
    inner |= {
        StepLacking,
        Hop,
        Link,
        Receipt,
        Voucher,
        TensorMeta,
        TensorForm,
        SavedStage,
        LedgerCounts,
        LinkStatus,
    }
    inner |= {PartProof, ReducedProof, Contribution, Ticket, TookSteps}
    return [kind for kind in declared if kind not in inner]


def filled(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """A message of which each field is as large as it gets: those that hold no lists need no more."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        of: Any = {
            "Bitmap": worst(), "str": NAME, "int": HUGE, "float": 1.5, "Loss": 1.5, "bool": True,
            "Generation": GENERATION, "PeerId": PEERS[0], "Stage": S,
        }  # fmt: skip
        values[field.name] = of[kind_name(kind, field.name)]
    return kind(**values)


def kind_name(kind: type, name: str) -> str:
    for base in kind.__mro__:
        if name in vars(base).get("__annotations__", {}):
            return str(vars(base)["__annotations__"][name])
    raise AssertionError(name)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_the_largest_legal_message_of_each_kind_can_be_said_and_heard(kind: type[msgspec.Struct]) -> None:
    message = LARGEST[kind] if kind in LARGEST else filled(kind)
    if kind not in SAY_LONG:
        assert len(pack(message)) <= MAX_HEADER_BYTES, "it is never said in a body"
        assert unpack(pack(message), kind) == message
    header, body = say(message)
    assert len(header) <= MAX_HEADER_BYTES
    assert sum(map(len, body)) <= MAX_LONG_BYTES
    assert hear(header, body, kind) == message


def test_what_proves_the_last_commits_of_256_stages_can_be_said() -> None:
    """By each replica to its coordinator, and by that to the one of the run: a header has room for 30."""
    voucher = Voucher(PEERS[0], HUGE, HUGE, bytes(SIGNATURE_BYTES), HUGE)
    held = msgspec.structs.replace(PREPARED, signature=bytes(SIGNATURE_BYTES), voucher=voucher)
    proofs = tuple(tuple(Proof(PEERS[2 * s + i], held) for i in range(PROOFS)) for s in range(S))
    commits = tuple(Commit(t, 1.5, proofs) for t in range(COMMITS_KEPT))
    for kind in (ReplicaReport, StageSummary):
        message = msgspec.structs.replace(LARGEST[kind], commits=commits)
        header, body = say(message)
        assert (header, len(body)) == (b"", 1)
        assert len(body[0]) <= MAX_LONG_BYTES
        assert hear(header, body, kind) == message


def test_a_plan_of_1000_replicas_at_8192_microbatches_is_said_in_100_kb() -> None:
    header, body = say(Directive(run=RUN, stage=0, coordinator=PEERS[0], version=T,
                                 steps=(StepDirective(t=T, plan=plan()),)))  # fmt: skip
    assert (header, len(body)) == (b"", 1)
    assert len(body[0]) < 100_000


def test_what_nobody_has_begun_is_said_in_a_few_bytes_for_each_stage() -> None:
    lacking = StepLacking(t=0, by_stage=(Bitmap((1 << M) - 1),) * S)
    assert len(pack(lacking)) < 8 * S


def test_a_message_in_a_body_is_bounded_too() -> None:
    with pytest.raises(
        Refused, match=f"the message has {MAX_LONG_BYTES + 1} bytes; at most {MAX_LONG_BYTES}"
    ):
        hear(b"", [bytes(MAX_LONG_BYTES + 1)], Directive)


def test_short_bitmaps_do_not_unfold_to_more_than_a_megabyte() -> None:
    last = Bitmap(1 << (M - 1))
    assert len(last.packed()) < 6
    fine = StepLacking(t=0, by_stage=(last,) * 1024)
    assert unpack(pack(fine), StepLacking) == fine
    with pytest.raises(
        Refused, match="malformed StepLacking header: its bitmaps take more than 1048576 bytes"
    ):
        unpack(pack(StepLacking(t=0, by_stage=(last,) * 2048)), StepLacking)


def test_a_run_whose_stages_cannot_say_what_they_lack_is_no_run() -> None:
    run = example_run()
    model = replace(run.model, stages=512, layers=512)
    batch = replace(run.batch, microbatches_per_step=4096)
    assert replace(run, model=model, batch=batch).S == 512
    with pytest.raises(
        SetupError, match=r"batch\.microbatches_per_step = 4097 .* at most 4096 with 512 stages"
    ):
        replace(run, model=model, batch=replace(batch, microbatches_per_step=4097))


def test_more_losses_than_are_kept_are_refused_before_another_coordinator_keeps_them() -> None:
    said = RunStatus(losses=tuple((-t, 1.5) for t in range(LOSSES_KEPT + 1)))
    with pytest.raises(
        Refused, match=f"malformed RunStatus header: .* length <= {LOSSES_KEPT} - at `\\$.losses`"
    ):
        unpack(pack(said), RunStatus)
