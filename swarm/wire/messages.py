"""Headers of every call between peers: msgpack, schema-checked, bounded. Tensors follow as raw buffers.

    work      trainer or stage s → stage s+1 Work + tensors         → WorkDone + gradient
    eval      trainer or stage s → stage s+1 Evaluate + tensors     → EvalDone
    evaluated trainer → stage-0 peer         Evaluated              → Ack
    locate    peer → next stage's peer       Locate                 → Located
    report    replica → its coordinator      ReplicaReport + losses → Directive
    directive coordinator → replica          Directive              → Ack
    summary   coordinator → run coordinator  StageSummary           → RunStatus
    run       run coordinator → coordinator  RunStatus              → Ack
    watch     trainer → any stage-0 peer     Watch                  → Watched (held until a change)
    part      replica → owner of a part      Part + contribution    → PartDone + reduced part
    reveal    member → member of a round     Reveal                 → Revealed (evidence.py)
    show      member → member of a round     ShowChunk              → ShownChunk + contribution (evidence.py)
    products  auditor → member of a round    AskProducts            → Products (evidence.py)
    audit     caller of a peer → its replica AuditAnswer            → Audited (evidence.py)
    kept      neighbour → replica            AskKept                → KeptTensors + tensors (evidence.py)
    convicted peer → replica of a stage      AskConvicted           → Convicted (evidence.py)
    evidence  anyone → peer                  ShowEvidence + data    → Heard (evidence.py)
    state     newcomer → replica             OpenState              → Opened + hashes
    held      replica → replica              OpenHeld               → Opened + hashes
    chunk     its reader → source            FetchChunk             → Ack + bytes
    close     its reader → source            CloseLease             → Ack
    block     trainer → trainer, keeper      AskBlock               → Ack + bytes
    saved     anyone → peer, keeper          AskSaved               → Saved
    status    anyone → peer                  AskStatus              → PeerStatus
    trail     anyone → peer                  AskTrail               → Trail
    voucher   trainer → peer                 GiveVoucher            → Ack

Every request names the run by its hash, so that runs never mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from swarm.digest import Digest
from swarm.errors import MALFORMED, BadAnswer, Refused
from swarm.ids import PeerId, Stage
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import MAX_LEFT_OUT, Positioned, RunStatus
from swarm.protocol.rounds import Commit, Prepared
from swarm.protocol.statements import Signature
from swarm.protocol.sums import PartProof, ReducedProof
from swarm.records import Voucher
from swarm.wire.buffers import Buffer
from swarm.wire.receipts import Link, Receipt
from swarm.wire.tensor_meta import TensorMeta
from swarm.wire.trails import TookSteps, Word

MAX_HEADER_BYTES = 1 << 16
"""The framing's limit."""
MAX_LONG_BYTES = 1 << 20
"""Of a message that does not fit into a header: see `say`. What 256 stages lack of two steps of 8192
microbatches takes 0.5 MB at most, the plan of a reduce of 1,000 replicas 0.1 MB."""
MAX_HOPS = 256
"""Of those in an answer: 31 kB. What the others spent is not told."""
MAX_ROUND_TRIPS = 32
"""Of those in an answer, as room is left. Links further behind are priced, and limit no share."""
MAX_RECEIPTS = 60
"""Of those in an answer, or in a request: 12 kB. Those further behind are checked by their callers only."""
UNFOLDED_BYTES = 1 << 20
"""Bytes of bitmaps that a header may say in short: those of a plan with 1,000 members. A body: twice that."""

T = TypeVar("T")
Loss: TypeAlias = Annotated[float, msgspec.Meta(gt=-1e30, lt=1e30)]
"""Finite, and so far from the largest number that a mean is, too."""


class RunMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a peer of a run."""

    run: str


class Ticket(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What travels of a trainer's `Asked`, with the microbatch, from stage to stage."""

    trainer: PeerId
    inputs: Digest
    to: PeerId
    signature: Signature


class Work(RunMessage, frozen=True, kw_only=True):
    """Run microbatch `(t, m)` with weights of `version`; the route names suggested peers of later stages."""

    t: int
    m: int
    version: int
    attempt: int = 0
    """Retries so far, at any level: from the first on, callees look for a peer that already has it."""
    deepest: Stage = -1
    """For a recompute: stages before this one pass the microbatch on even if they have it."""
    route: tuple[PeerId, ...] = ()
    tensors: tuple[TensorMeta, ...] = ()
    ticket: Ticket | None = None
    """In a run that names trainers."""
    fed: Receipt | None = None
    """The caller's, for what it sends on: in such a run, from a stage peer."""
    through: tuple[Link, ...] = ()
    """Where answers are audited: the peers that the microbatch came through before, from the caller's feeder
    back to the first whose word counts, or to stage 0."""


class Evaluate(RunMessage, frozen=True, kw_only=True):
    """The loss of microbatch `e` of the evaluation before step `t`, by these peers of later stages."""

    t: int
    e: int
    route: tuple[PeerId, ...] = ()
    tensors: tuple[TensorMeta, ...] = ()


class EvalDone(msgspec.Struct, frozen=True, kw_only=True):
    loss: Loss


class Evaluated(RunMessage, frozen=True, kw_only=True):
    """What an evaluation of the weights of `version` came to, for those that ask for the run's status."""

    version: int
    loss: Loss


class Hop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one stage's peer spent on a microbatch, in seconds, for the caller's router; and its receipt."""

    stage: Stage
    peer: PeerId
    own_s: float
    """From request to answer, without the calls behind it."""
    compute_s: float
    """The part of it in which its device worked."""
    latency_s: float = 0.0
    """Time on the line from its caller and back, as the caller measured it; 0 = not known."""
    rtt_s: float = 0.0
    """The part of it that any message takes, however small; 0 = not known."""
    upload_s: float = 0.0
    """How long its upload is busy with a microbatch, if its owner limits that."""
    receipt: Receipt | None = None
    """In a run that names trainers."""

    @property
    def device_s(self) -> float:
        """Its device's time, if that can be true: not more than `own_s`, and more than nothing."""
        return self.compute_s if 0.0 < self.compute_s <= self.own_s else self.own_s

    @property
    def work_s(self) -> float:
        """The time of its device or of its upload, whichever is busy longer: its share follows from it."""
        return max(self.device_s, self.upload_s) if 0.0 < self.upload_s < math.inf else self.device_s


def with_latency(hops: tuple[Hop, ...], took_s: float, rtt_s: float) -> tuple[Hop, ...]:
    """The hops that a caller passes on: the time of its call that no peer spent is the first hop's latency.

    If the work was already done, only the answer was waited for: then nothing is known.
    """
    if not hops:
        return hops
    latency_s = took_s - sum(hop.own_s for hop in hops) - sum(hop.latency_s for hop in hops[1:])
    latency_s = latency_s if 0.0 < latency_s <= took_s else 0.0
    first = msgspec.structs.replace(hops[0], latency_s=latency_s, rtt_s=rtt_s)
    middle = (msgspec.structs.replace(hop, rtt_s=0.0) for hop in hops[MAX_ROUND_TRIPS:MAX_RECEIPTS])
    short = {"receipt": None, "upload_s": 0.0, "rtt_s": 0.0}
    behind = (msgspec.structs.replace(hop, **short) for hop in hops[MAX_RECEIPTS:MAX_HOPS])
    return (first, *hops[1:MAX_ROUND_TRIPS], *middle, *behind)


class WorkDone(msgspec.Struct, frozen=True, kw_only=True):
    """The loss, and the gradient with respect to what was sent (none for stage 0)."""

    loss: Loss
    tensors: tuple[TensorMeta, ...] = ()
    hops: tuple[Hop, ...] = ()


class GiveVoucher(RunMessage, frozen=True, kw_only=True):
    """A trainer's word for the work of the peer that it is given to."""

    voucher: Voucher


class Locate(RunMessage, frozen=True, kw_only=True):
    """The question whether a peer has `(t, m)`, or is computing it."""

    t: int
    m: int


class Located(msgspec.Struct, frozen=True, kw_only=True):
    has: bool
    left_out: Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=MAX_LEFT_OUT)] = ()
    """Peers of its stage that take part in no round for now, as its coordinator says."""


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool = True


class Watch(Positioned, frozen=True, kw_only=True):
    """A request that is answered when the run's status differs from revision `seen`, or after a second.

    The position is where the trainer knows the run to be.
    """

    run: str
    version: int = 0
    seen: int = -1


class Watched(Positioned, frozen=True, kw_only=True):
    revision: int
    status: RunStatus


class Part(RunMessage, frozen=True, kw_only=True):
    """One chunk of a contribution to an all-reduce; the answer is the same chunk, reduced."""

    t: int
    round: str
    start: int
    """First element, in the flat gradient."""
    numel: int
    crc: int = 0
    """CRC-32 of the body."""
    tensors: tuple[TensorMeta, ...] = ()
    """Empty: nothing to contribute (an empty ledger)."""
    proof: PartProof | None = None
    """Where sums are checked: what its member signed; then there is no CRC."""


class PartDone(msgspec.Struct, frozen=True, kw_only=True):
    crc: int
    tensors: tuple[TensorMeta, ...]
    proof: ReducedProof | None = None
    """Where sums are checked: with the last chunk of a part, what its owner signed."""


START = -2
"""As a version: not a state, but the tensors that a stage starts with."""


class OpenState(RunMessage, frozen=True, kw_only=True):
    """A request for a consistent snapshot of weights and optimizer."""

    stage: Stage
    version: int = -1
    """A saved version (a checkpoint), or `START`; negative: the newest, as it is now."""


class OpenHeld(RunMessage, frozen=True, kw_only=True):
    """A request for the reduced gradient of step `t`; `round` empty: of any round.

    `shared_with`: only the weights that this stage shares with that one; -1: all.
    `shared_of`: instead, what that stage gave to this one.

    Of a meeting of islands `shared_with` is the stage itself, and `part` which part is wanted of what its
    island has changed; -1: all. `shared_of` is an island that gave it to this one, or their count and the
    number of the part of which the sum is wanted.
    """

    t: int
    round: str = ""
    shared_with: Stage = -1
    shared_of: Stage = -1
    part: int = -1


class TensorForm(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    numel: int
    dtype: str


class Opened(Positioned, frozen=True, kw_only=True):
    """A lease of tensors, to be read chunk by chunk.

    Body: the digest of each chunk of each tensor, 32 bytes each, in the order of `tensors`.
    """

    lease: str
    tensors: tuple[TensorForm, ...]
    """Sorted by name."""
    last_commit: Commit | None = None
    """What made the version, or took the step; None: not known, or not yet."""
    prepared: Prepared | None = None
    """Of a reduced gradient."""


class FetchChunk(RunMessage, frozen=True, kw_only=True):
    """A request for the bytes of one chunk, counted over all tensors of a lease."""

    lease: str
    index: int


class CloseLease(RunMessage, frozen=True, kw_only=True):
    lease: str


class AskBlock(RunMessage, frozen=True, kw_only=True):
    """A request for a block of the data whose Merkle tree has this root."""

    root: str
    number: int


class AskSaved(RunMessage, frozen=True, kw_only=True):
    """The question which checkpoints a peer can give out."""


class SavedStage(msgspec.Struct, frozen=True, kw_only=True):
    stage: Stage
    versions: tuple[int, ...]
    """Ascending."""
    signed: tuple[Word, ...] = ()
    """What peers signed of the step that left one of these: of the newest."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    stages: tuple[SavedStage, ...] = ()


class AskTrail(RunMessage, frozen=True, kw_only=True):
    """The question for the trail of a replica, from step `since` to before `until`."""

    since: int
    until: int


class Trail(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The steps of those that were asked for, from the first on that it knows without a gap. Perhaps none."""

    steps: TookSteps
    signature: Signature


class AskStatus(RunMessage, frozen=True, kw_only=True):
    after: int = -1
    """Tell of the steps to later versions than this one; -1: of none."""


class PastStep(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A step that a peer took."""

    version: int
    """What it made."""
    took_s: float
    """Since the step before, at that peer; 0: not known."""
    loss: float | None = None


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers counted from the ledgers of the rounds that were applied, not from what should be."""

    steps: int = 0
    missing: int = 0
    duplicated: int = 0
    undone: int = 0
    """Duplicates that were found and subtracted before their round."""


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic with one other peer, in bytes, frames and heartbeats included, and its speed."""

    peer: PeerId
    bytes_in: int
    bytes_out: int
    rtt_s: float = 0.0
    """Round trip; 0 = not measured."""
    bandwidth_bps: float = 0.0
    """Bits per second that came from it; 0 = not measured."""
    memory_bytes: int = 0
    """Handed over in memory, both ways: it is on the same machine."""


class PeerStatus(Positioned, frozen=True, kw_only=True):
    peer: PeerId
    stage: Stage
    state: str
    device: str
    done: int = 0
    """Microbatches of the current step in its sum."""
    inflight: int = 0
    max_inflight: int = 0
    speed: float = 0.0
    """Microbatches per second of its device when it is busy."""
    computed: int = 0
    """Microbatches computed since it joined."""
    coordinator: PeerId = ""
    audit: LedgerCounts = LedgerCounts()
    since: float
    up_s: float = 0.0
    """Seconds since its program started; 0: not said."""
    bytes_in: int = 0
    bytes_out: int = 0
    links: tuple[LinkStatus, ...] = ()
    """The busiest links."""
    rebalance: str = ""
    """The last decision on which peers move, and why."""
    busy_s: float = 0.0
    """Seconds that its device worked."""
    taken: int = 0
    """Microbatches whose tensors were received, from a trainer or the stage before."""
    answered: int = 0
    """Microbatches that were answered, with a gradient if there is a stage before."""
    digest: str = ""
    """Digest of the weights of `version`; empty while it is being computed."""
    kind: str = ""
    """Kind of device: only devices of one kind need to have the same digest."""
    trainers: tuple[PeerId, ...] = ()
    """Trainers that asked it for the run's status lately."""
    past: tuple[PastStep, ...] = ()
    """Steps that were asked for, ascending; of many not all."""
    eval_loss: float | None = None
    """Of the newest evaluation that it was told of, of version `eval_version`."""
    eval_version: int = -1


_ENCODER = msgspec.msgpack.Encoder(enc_hook=Bitmap.packed)


def _decoder(most_unfolded: int) -> Callable[[type, object], Bitmap]:
    left_bytes = most_unfolded

    def decode(kind: type, value: object) -> Bitmap:
        nonlocal left_bytes
        if kind is not Bitmap:
            raise NotImplementedError(f"a {kind.__name__} does not travel")
        bitmap = Bitmap.unpacked(value)
        assert isinstance(value, bytes)
        left_bytes -= max(0, bitmap.bit_length() // 8 - len(value))
        if left_bytes < 0:
            raise ValueError(f"its bitmaps take more than {most_unfolded} bytes")
        return bitmap

    return decode


def pack(message: msgspec.Struct) -> bytes:
    """The wire form of a header."""
    return _ENCODER.encode(message)


def say(message: msgspec.Struct) -> tuple[bytes, tuple[bytes, ...]]:
    """Header and body of a message of any size: of one too large for a header, the header is empty."""
    packed = pack(message)
    return (packed, ()) if len(packed) <= MAX_HEADER_BYTES else (b"", (packed,))


def hear(header: bytes, body: Sequence[Buffer], kind: type[T]) -> T:
    """What was said, in the header or in the body. Raises Refused: as `unpack`."""
    if header or len(body) != 1:
        return unpack(header, kind)
    return _unpacked(memoryview(body[0]), kind, MAX_LONG_BYTES, 2 * UNFOLDED_BYTES, "message")


def unpack(data: bytes, kind: type[T], *runs: str) -> T:
    """The header of a request, which has to name one of `runs`, if there are any: see `check_run`.

    Raises:
        Refused: too large, malformed, of another shape, or for another run; the text names the field.
    """
    found = _unpacked(memoryview(data), kind, MAX_HEADER_BYTES, UNFOLDED_BYTES, "header")
    if runs:
        check_run(found.run, *runs)  # type: ignore[attr-defined]
    return found


def _unpacked(data: memoryview, kind: type[T], most: int, most_unfolded: int, what: str) -> T:
    if data.nbytes > most:
        raise Refused(f"the {what} has {data.nbytes} bytes; at most {most} are read")
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decoder(most_unfolded))
    except MALFORMED as error:
        raise Refused(f"malformed {kind.__name__} header: {error}") from None


def check_run(named: str, serves: str, *others: str) -> None:
    """Check the run that a request names: what this peer serves, or one of `others` that will do.

    Raises:
        Refused: it is for another one.
    """
    if named not in (serves, *others):
        raise Refused(f"this peer serves run {serves}, not {named[:40]!r}")


@contextmanager
def as_bad_answer(peer: PeerId) -> Iterator[None]:
    """What is refused in the block came with an answer of `peer`. Raises BadAnswer: in the same words."""
    try:
        yield
    except Refused as refused:
        raise BadAnswer(peer, refused.text) from None


def unpack_answer(peer: PeerId, header: bytes, kind: type[T], said: Sequence[Buffer] = ()) -> T:
    """The header of an answer; `said`: the body of one that may be too large for it.

    Raises:
        BadAnswer: it is not a `kind`.
    """
    with as_bad_answer(peer):
        return hear(header, said, kind)
