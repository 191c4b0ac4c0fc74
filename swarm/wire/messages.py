"""Headers of every call between peers: msgpack, schema-checked, bounded. Tensors follow as raw buffers.

    work      trainer or stage s → stage s+1   Work + tensors      → WorkDone + gradient
    locate    peer → next stage's peer         Locate              → Located
    report    member → its coordinator         Report + losses     → Brief
    brief     coordinator → member             Brief               → Ack
    summary   coordinator → conductor          Summary             → RunBrief
    run       conductor → coordinator          RunBrief            → Ack
    watch     trainer → any stage-0 peer       Watch               → Watched (held until news)
    part      member → owner of a part         Part + contribution → PartDone + reduced part
    held      member → member                  FetchVector         → VectorChunk + elements
    offer     leaving member → mate            OfferSum            → OfferedSum
    give      leaving member → mate            GiveSum + elements  → Ack
    take      leaving member → mate            TakeSum + losses    → Ack
    state     joiner → member                  OpenState           → StateOpened
    chunk     joiner → member                  FetchChunk          → VectorChunk + elements
    close     joiner → member                  CloseState          → Ack
    saved     anyone → peer, keeper            AskSaved            → Saved
    status    anyone → peer                    AskStatus           → PeerStatus

Every request names the run by its hash, so that runs never mix.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from swarm.errors import BadAnswer, Refused
from swarm.ids import Era, PeerId, Stage, Standing
from swarm.wire.meta import TensorMeta

MAX_HEADER_BYTES = 1 << 16
"""The framing's limit. The largest header is the plan of a reduce: 1 kB of ledger (8192 microbatches, the
most that a manifest allows) for each of up to 50 members."""

T = TypeVar("T")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Run microbatch `(t, m)` with weights of `version`; the route names later stages' suggested peers."""

    run: str
    t: int
    m: int
    version: int
    attempt: int = 0
    """Retries so far, at any level: from the first on, callees look for a peer that already has it."""
    deepest: Stage = -1
    """Replay: stages before this one pass the microbatch on even if they have it."""
    route: tuple[PeerId, ...] = ()
    tensors: tuple[TensorMeta, ...] = ()


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage's peer spent on a microbatch, for the caller's router. Seconds."""

    stage: Stage
    peer: PeerId
    own_s: float
    """From request to answer, without the calls behind it."""
    compute_s: float
    """Of that, its device worked."""
    way_s: float = 0.0
    """On the line from its caller and back, as the caller says; 0 = not known."""

    @property
    def work_s(self) -> float:
        """What its device worked, if that can be true: not more than the whole, and not nothing at all."""
        return self.compute_s if 0.0 < self.compute_s <= self.own_s else self.own_s


def with_way(hops: tuple[Hop, ...], took_s: float) -> tuple[Hop, ...]:
    """What a caller passes on: of what its call took, what no peer spent was the line to the first.

    Of work that was done before only the answer was waited for: of that nothing is known.
    """
    if not hops:
        return hops
    way_s = took_s - sum(hop.own_s for hop in hops) - sum(hop.way_s for hop in hops[1:])
    first = msgspec.structs.replace(hops[0], way_s=way_s if 0.0 < way_s <= took_s else 0.0)
    return (first, *hops[1:])


class WorkDone(msgspec.Struct, frozen=True, kw_only=True):
    """The loss, and the gradient with respect to what was sent (none for stage 0)."""

    loss: float
    tensors: tuple[TensorMeta, ...] = ()
    hops: tuple[Hop, ...] = ()


class Locate(msgspec.Struct, frozen=True, kw_only=True):
    """Do you have `(t, m)`, or are you computing it?"""

    run: str
    t: int
    m: int


class Located(msgspec.Struct, frozen=True, kw_only=True):
    has: bool


class HeldWire(msgspec.Struct, frozen=True, kw_only=True):
    round: str
    sqnorm: float
    digest: str


class GoWire(msgspec.Struct, frozen=True, kw_only=True):
    t: int
    total_sqnorm: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """A member's ledger of one step."""

    t: int
    done: bytes
    doing: bytes
    frozen_for: str = ""
    held: HeldWire | None = None
    failed_round: str = ""
    fixed: bytes = b""
    """Of `done`, what cannot be undone: it was handed over by a member that left. Empty: nothing."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that a coordinator needs to know of a member. State, not events.

    The last stage adds a body: per step, the float64 losses of the microbatches in `done`, ascending.
    """

    run: str
    stage: Stage
    era: Era = Era()
    version: int
    digest: str = ""
    """Of the weights of `version`; empty while it is being computed."""
    kind: str = ""
    """Kind of device: digests of different kinds are compared only where the run realigns."""
    steps: tuple[StepReport, ...] = ()
    goes: tuple[GoWire, ...] = ()
    """The last that it took: whoever conducts next says the same."""
    farewell: bool = False
    """The last one: do not count on this member any more."""
    bandwidth_bps: float = 0.0


class PlanWire(msgspec.Struct, frozen=True, kw_only=True):
    round: str
    number: int
    members: tuple[PeerId, ...]
    ledgers: tuple[bytes, ...]
    parts: tuple[int, ...]


class AdoptWire(msgspec.Struct, frozen=True, kw_only=True):
    round: str
    sources: tuple[PeerId, ...]


class StepBrief(msgspec.Struct, frozen=True, kw_only=True):
    """What the stage does about step `t`. At most one of plan, adopt and undo is set."""

    t: int
    plan: PlanWire | None = None
    adopt: AdoptWire | None = None
    undo: bytes = b""
    """Microbatches that this member subtracts."""


class StepLacking(msgspec.Struct, frozen=True, kw_only=True):
    """For trainers: per stage, the microbatches of step `t` that nobody has or computes."""

    t: int
    by_stage: tuple[bytes, ...]


class RunBrief(msgspec.Struct, frozen=True, kw_only=True):
    """The conductor's picture of the run."""

    run: str = ""
    era: Era = Era()
    version: int = 0
    lacking: tuple[StepLacking, ...] = ()
    goes: tuple[GoWire, ...] = ()
    """The newest, ascending. More than one: with delayed updates a stage may have to take two steps."""
    losses: tuple[tuple[int, float], ...] = ()
    """Mean loss of each of the last steps, over exactly M microbatches."""
    conductor: PeerId = ""


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator publishes to a member of its stage."""

    run: str
    stage: Stage
    coordinator: PeerId
    number: int = 0
    """Rises with each brief of this coordinator: a late one is told from a new one."""
    era: Era = Era()
    version: int
    """Newest version in the stage: a member behind it catches up from `sources`."""
    sources: tuple[PeerId, ...] = ()
    """Empty: nobody in the stage has it yet, each gets it where it can."""
    behind_s: int = 0
    """For how long the stage has been unable to follow the run; who coordinates next goes on counting."""
    digest: str = ""
    """What most members of `version` hold; empty while unknown."""
    steps: tuple[StepBrief, ...] = ()
    goes: tuple[GoWire, ...] = ()
    whole_run: RunBrief = RunBrief()


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool = True


class ProbeLine(msgspec.Struct, frozen=True, kw_only=True):
    """Send my body back: how long that takes tells what our line can do."""

    run: str


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    t: int
    lacking: bytes
    unclaimed: bytes
    ready: bool
    sqnorm: float
    loss: float | None = None
    """Last stage, once covered: the mean over the M microbatches, added in their order."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's state, from its coordinator to the conductor."""

    run: str
    stage: Stage
    era: Era = Era()
    version: int
    members: int
    steps: tuple[StepSummary, ...] = ()
    goes: tuple[GoWire, ...] = ()


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Answer when the picture differs from revision `seen`, or after a second."""

    run: str
    seen: int = -1


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    revision: int
    era: Era = Era()
    version: int
    brief: RunBrief


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of a contribution to an all-reduce; the answer is the same chunk, reduced."""

    run: str
    t: int
    round: str
    start: int
    """First element, in the flat gradient."""
    numel: int
    crc: int = 0
    """CRC-32 of the body."""
    tensors: tuple[TensorMeta, ...] = ()
    """Empty: nothing to contribute (an empty ledger)."""


class PartDone(msgspec.Struct, frozen=True, kw_only=True):
    crc: int
    tensors: tuple[TensorMeta, ...]


class FetchVector(msgspec.Struct, frozen=True, kw_only=True):
    """Elements of the reduced gradient of step `t`; `round` empty: whichever there is.

    `shared_with`: of the weights only that this stage shares with that one; -1: all.
    `shared_of`: instead, what that stage gave to this one.
    """

    run: str
    t: int
    round: str = ""
    shared_with: int = -1
    shared_of: int = -1
    start: int = 0
    numel: int = 0


class VectorChunk(msgspec.Struct, frozen=True, kw_only=True):
    crc: int
    total_numel: int
    tensors: tuple[TensorMeta, ...]
    round: str = ""
    sqnorm: float = 0.0
    digest: str = ""
    total_sqnorm: float = -1.0
    """Of the go, once the step was applied; negative before."""


class OfferSum(msgspec.Struct, frozen=True, kw_only=True):
    """I leave: will you take my sum of step `t`, with these microbatches in it?"""

    run: str
    era: Era = Era()
    t: int
    done: bytes


class OfferedSum(msgspec.Struct, frozen=True, kw_only=True):
    overlap: bytes
    """What the mate has as well: to be undone before the sum is given."""


class GiveSum(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of a sum that is handed over."""

    run: str
    t: int
    start: int
    numel: int
    crc: int
    tensors: tuple[TensorMeta, ...]


class TakeSum(msgspec.Struct, frozen=True, kw_only=True):
    """All chunks were given: count these microbatches as yours. Body at the last stage: their losses."""

    run: str
    era: Era = Era()
    t: int
    done: bytes
    digest: str


class OpenState(msgspec.Struct, frozen=True, kw_only=True):
    """Take a consistent snapshot of weights and optimizer for me.

    The answer's body: the SHA-256 of each chunk of each tensor, 32 bytes each, in order.
    """

    run: str
    stage: Stage
    version: int = -1
    """A saved version (a checkpoint); negative: the newest, as it is now."""


class StateTensor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    numel: int
    dtype: str
    sha256: str


class StateOpened(msgspec.Struct, frozen=True, kw_only=True):
    lease: str
    version: int
    era: Era = Era()
    weights_digest: str
    last_go: GoWire | None
    tensors: tuple[StateTensor, ...]


class FetchChunk(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    lease: str
    name: str
    start: int
    numel: int


class CloseState(msgspec.Struct, frozen=True, kw_only=True):
    """I have what I want of this lease."""

    run: str
    lease: str


class AskSaved(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoints can you give out?"""

    run: str


class SavedStage(msgspec.Struct, frozen=True, kw_only=True):
    stage: Stage
    versions: tuple[int, ...]
    """Ascending."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    stages: tuple[SavedStage, ...] = ()


class AskStatus(msgspec.Struct, frozen=True, kw_only=True):
    run: str


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Counted from the ledgers of the rounds that were applied, not from what should be."""

    steps: int = 0
    missing: int = 0
    duplicated: int = 0
    undone: int = 0
    """Duplicates that were found and subtracted before their round."""


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What went to and came from one other peer, in bytes, frames and heartbeats included, and how fast."""

    peer: PeerId
    bytes_in: int
    bytes_out: int
    rtt_s: float = 0.0
    """Round trip; 0 = not measured."""
    bandwidth_bps: float = 0.0
    """Bits per second that came from it; 0 = not measured."""


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    peer: PeerId
    stage: Stage
    version: int
    state: str
    era: Era = Era()
    device: str
    done: int
    """Microbatches of the current step in its sum."""
    inflight: int
    max_inflight: int
    speed: float
    """Microbatches per second of its device when it is busy."""
    computed: int
    """Microbatches computed since it joined."""
    coordinator: PeerId
    audit: Audit
    since: float
    first_audited_step: int = 0
    loss: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    links: tuple[LinkStatus, ...] = ()
    """The busiest."""
    rebalance: str = ""
    """What it last decided about who moves, and why."""
    busy_s: float = 0.0
    """Seconds that its device worked."""
    taken: int = 0
    """Microbatches whose tensors were received, from a trainer or the stage before."""
    answered: int = 0
    """Microbatches that were answered, with a gradient if there is a stage before."""
    digest: str = ""
    """Of the weights of `version`; empty while it is being computed."""
    kind: str = ""
    """Kind of device: only those of one kind have to have the same digest."""
    trainers: tuple[PeerId, ...] = ()
    """Who asked it for news of the run lately."""
    loss_step: int = -1
    """The step that `loss` is of."""

    @property
    def standing(self) -> Standing:
        """How far that peer is."""
        return Standing(self.era, self.version)


def pack(message: msgspec.Struct) -> bytes:
    """The wire form of a header."""
    return msgspec.msgpack.encode(message)


def unpack(data: bytes, kind: type[T]) -> T:
    """A request's header.

    Raises:
        Refused: too large, malformed, or of another shape; the text names the field.
    """
    if len(data) > MAX_HEADER_BYTES:
        raise Refused(f"the header has {len(data)} bytes; at most {MAX_HEADER_BYTES} are read")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refused(f"malformed {kind.__name__} header: {error}") from None


def check_run(named: str, serves: str) -> None:
    """Every request names its run.

    Raises:
        Refused: it is for another one.
    """
    if named != serves:
        raise Refused(f"this peer serves run {serves}, not {named[:40]!r}")


def unpack_answer(peer: PeerId, data: bytes, kind: type[T]) -> T:
    """An answer's header.

    Raises:
        BadAnswer: it is not a `kind`.
    """
    try:
        return unpack(data, kind)
    except Refused as refused:
        raise BadAnswer(peer, refused.text) from None
