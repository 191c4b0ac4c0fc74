"""What happens in a run, as data. Log lines, JSON lines and the live display are renderings of it.

An event is a frozen dataclass: `words()` says it in words, `to_json` in one line with an `event` key, and
`parse_event` reads that line back. Nothing ever parses the words.

A reader takes what it knows: unknown events and unknown fields are skipped, so that programs of different
versions can watch each other.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TextIO, TypeAlias

import msgspec

from peers.clock import unix_s
from swarm.errors import one_line, printable, short

LogFormat: TypeAlias = Literal["text", "json"]
Level: TypeAlias = Literal["info", "warning", "error"]

MAX_LINE_CHARS = 100_000
"""A longer line is not an event of ours: the largest holds a passage of text or a list of addresses."""
MAX_LOGGED = 10_000
"""Characters of a logged text: the rest of a long traceback is cut."""


def count(n: int, noun: str) -> str:
    """`1 peer`, `2 peers`, `2 microbatches`."""
    if n == 1:
        return f"1 {noun}"
    return f"{n} {noun}es" if noun.endswith(("ch", "s")) else f"{n} {noun}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    level: ClassVar[Level] = "info"

    at: float = field(default_factory=unix_s, compare=False)
    """Unix seconds, for people to read; nothing is computed from it."""

    def words(self) -> str:
        """The event as a sentence without its full stop; may hold several lines."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """A role is reachable. The first event of every process that joins a network."""

    role: str
    peer: str
    addresses: tuple[str, ...]
    """libp2p multiaddresses that end in `/p2p/PEER`."""
    run: str = ""
    pid: int = 0

    def words(self) -> str:
        return f"{self.role} {short(self.peer)} listens on {', '.join(self.addresses) or 'no address'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLine(Event):
    """The exact line that another machine pastes."""

    line: str

    def words(self) -> str:
        return f"join with:\n    {self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(Event):
    """This peer has its weights and takes calls."""

    peer: str
    stage: int
    version: int
    device: str
    max_inflight: int = 0

    def words(self) -> str:
        room = f", up to {count(self.max_inflight, 'microbatch')} at once" if self.max_inflight else ""
        return f"serving stage {self.stage} at version {self.version} on {self.device}{room}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJoined(Event):
    """Another peer appeared in the directory."""

    peer: str
    stage: int
    device: str = ""

    def words(self) -> str:
        where = f" on {one_line(self.device)}" if self.device else ""
        return f"peer {short(self.peer)} joined stage {self.stage}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLeft(Event):
    """A peer said that it leaves."""

    peer: str
    stage: int

    def words(self) -> str:
        return f"peer {short(self.peer)} left stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost(Event):
    """A peer does not answer any more."""

    level: ClassVar[Level] = "warning"

    peer: str
    stage: int
    why: str

    def words(self) -> str:
        return f"peer {short(self.peer)} of stage {self.stage} is lost: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed(Event):
    """The demo preempted one of its own processes with SIGKILL."""

    level: ClassVar[Level] = "warning"

    peer: str
    stage: int

    def words(self) -> str:
        return f"peer {short(self.peer)} of stage {self.stage} killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Event):
    """Step `t` is applied by every stage. A trainer reports the mean loss of the microbatches that it ran."""

    t: int
    steps: int
    """Steps of the whole run."""
    loss: float | None
    tokens_per_s: float
    peers: tuple[int, ...] = ()
    """Peers that serve each stage now."""
    losses: tuple[float, ...] = ()
    """Loss of each of the M microbatches, if this trainer knows all of them."""

    def words(self) -> str:
        loss = "no loss of its own" if self.loss is None else f"loss {self.loss:.4f}"
        peers = f", peers per stage {' '.join(map(str, self.peers))}" if self.peers else ""
        done = f"step {self.t} done, {max(0, self.steps - self.t - 1)} to go"
        return f"{done}: {loss}, {self.tokens_per_s:,.0f} tokens/s{peers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Event):
    """This peer applied step `t`."""

    stage: int
    t: int
    microbatches: int
    """Those of the step that were in this peer's own sum."""
    missing: int | None = None
    """Microbatches in no ledger of the round that was applied; None: its result came from a replica."""
    duplicated: int | None = None
    """Microbatches in more than one ledger of that round."""

    def words(self) -> str:
        mine = count(self.microbatches, "microbatch")
        return f"stage {self.stage}: step {self.t} applied, {mine} mine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed(Event):
    """Microbatches of step `t` run again because the sum that held them is gone."""

    level: ClassVar[Level] = "warning"

    t: int
    count: int

    def words(self) -> str:
        return f"step {self.t}: {count(self.count, 'microbatch')} run again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone(Event):
    """Microbatches taken out of this peer's sum because a replica has them too."""

    stage: int
    t: int
    count: int

    def words(self) -> str:
        return f"stage {self.stage}: step {self.t}: {count(self.count, 'duplicate')} undone"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAborted(Event):
    """An all-reduce of this stage was not whole; nothing was applied."""

    level: ClassVar[Level] = "warning"

    stage: int
    t: int
    why: str

    def words(self) -> str:
        return f"stage {self.stage}: a reduce of step {self.t} is void and starts again: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFetched(Event):
    """This peer downloaded the state of its stage."""

    stage: int
    version: int
    source: str
    """That gave most of it."""
    bytes: int
    seconds: float
    sources: int = 1

    def words(self) -> str:
        source = f"peer {short(self.source)}" if self.sources == 1 else count(self.sources, "peer")
        return (
            f"stage {self.stage}: version {self.version}, {self.bytes / 1e6:.1f} MB, "
            f"from {source} in {self.seconds:.1f} s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloading(Event):
    """How much of a stage's state is here; said every second or two, and at the end."""

    stage: int
    version: int
    done_bytes: int
    total_bytes: int
    sources: int
    """Peers that it comes from now."""

    def words(self) -> str:
        filled = min(20, max(0, 20 * self.done_bytes // max(1, self.total_bytes)))
        bar = "#" * filled + "." * (20 - filled)
        sizes = f"{self.done_bytes / 1e6:.1f} of {self.total_bytes / 1e6:.1f} MB"
        return f"stage {self.stage} [{bar}] {sizes} from {count(self.sources, 'peer')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLost(Event):
    """A stage has no member that holds its weights."""

    level: ClassVar[Level] = "warning"

    stage: int
    version: int
    """Of the rest of the run."""

    def words(self) -> str:
        return (
            f"stage {self.stage} has lost all its peers: the run pauses at version {self.version} "
            "until a peer brings the stage back from a checkpoint"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver(Event):
    """A peer that leaves gave its sum to a replica: nothing of it is run again."""

    stage: int
    t: int
    microbatches: int
    to: str

    def words(self) -> str:
        given = count(self.microbatches, "microbatch")
        return f"stage {self.stage}: step {self.t}: {given} handed to peer {short(self.to)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Event):
    """This peer leaves its stage for one that needs it more."""

    stage: int
    to_stage: int
    why: str

    def words(self) -> str:
        return f"moves from stage {self.stage} to stage {self.to_stage}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Event):
    """The device is its owner's again; the place is kept."""

    stage: int
    version: int
    """Of the state that is kept; negative: none, it had not joined yet."""
    why: str
    host_bytes: int = 0
    """That state, in host memory."""
    alone: bool = False
    """Nobody else serves the stage: the run stands still."""

    def words(self) -> str:
        kept = "nothing is kept: it had not joined yet"
        if self.version >= 0:
            kept = f"version {self.version} is kept in {self.host_bytes / 1e6:.1f} MB of host memory"
        alone = f". Nobody else serves stage {self.stage}: the run stands still" if self.alone else ""
        return f"paused at stage {self.stage}, {self.why}; the device is free, {kept}{alone}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed(Event):
    """A stage is on disk."""

    stage: int
    step: int
    path: str

    def words(self) -> str:
        return f"stage {self.stage}: checkpoint of step {self.step} in {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Event):
    """A keeper holds a version that all its stages have: the run could go on from it."""

    version: int
    stages: tuple[int, ...]

    def words(self) -> str:
        return f"keeps version {self.version} of stages {' '.join(map(str, self.stages))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(Event):
    """The run continues from a checkpoint because a stage lost all its peers."""

    level: ClassVar[Level] = "warning"

    stage: int
    """Negative: as a trainer sees it, all of them."""
    step: int

    def words(self) -> str:
        if self.stage < 0:
            return f"a stage had lost all its peers: the run goes on from version {self.step}"
        return f"stage {self.stage}: back to the checkpoint of step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopNow(Event):
    """This process was asked to stop and finishes what it has."""

    role: str

    def words(self) -> str:
        return f"{self.role} leaves: finishing what is in flight (Ctrl-C again to stop at once)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed(Event):
    """The last words of a peer."""

    microbatches: int
    steps: int

    def words(self) -> str:
        work = count(self.microbatches, "microbatch")
        return f"contributed {work} in {count(self.steps, 'step')}. Thank you"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Event):
    """Text that the trained model wrote."""

    prompt: str
    text: str

    def words(self) -> str:
        return f"the model continues {self.prompt!r}:\n{self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Event):
    """Anything worth a line that no program acts on."""

    text: str

    def words(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble(Event):
    """Something to look at; the process goes on."""

    level: ClassVar[Level] = "warning"

    text: str

    def words(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged(Event):
    """A module's warning, or a library's, about what should not be; a traceback may follow its first line."""

    level: ClassVar[Level] = "warning"

    logger: str
    text: str

    def words(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The process ends because of this."""

    level: ClassVar[Level] = "error"

    text: str

    def words(self) -> str:
        return self.text


EVENTS: tuple[type[Event], ...] = (
    Started, JoinLine, Serving, PeerJoined, PeerLeft, PeerLost, Killed, StepDone, Stepped, Replayed, Undone,
    RoundAborted, StateFetched, Downloading, StageLost, HandedOver, Moved, Paused, Checkpointed, Kept,
    RolledBack, StopNow, Contributed, Sample, Note, Trouble, Logged, Failed,
)  # fmt: skip


def kind(cls: type[Event]) -> str:
    """The `event` key of a class: its name in snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


_KINDS = {kind(cls): cls for cls in EVENTS}


def to_json(event: Event) -> str:
    """One line of JSON. Numbers that are not finite become null."""
    return msgspec.json.encode({"event": kind(type(event)), **msgspec.to_builtins(event)}).decode()


def parse_event(line: str) -> Event | None:
    """The event in a line of `to_json`, or None for any other line, unknown event or impossible field."""
    if not line.lstrip().startswith("{") or len(line) > MAX_LINE_CHARS:
        return None
    try:
        fields = msgspec.json.decode(line)
        cls = _KINDS.get(fields.get("event"))
        return None if cls is None else msgspec.convert(fields, cls)
    except (msgspec.MsgspecError, TypeError, UnicodeError):
        return None


def to_text(event: Event) -> str:
    """A log line: local time, a mark for trouble, the words."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.at))
    mark = {"info": "", "warning": "! ", "error": "error: "}[event.level]
    return f"{clock}  {mark}{printable(event.words())}"


Emit: TypeAlias = Callable[[Event], None]
"""What roles are given to say something with."""


class Emitter:
    """Writes events as lines to a stream, one write and one flush each. Any thread may call it.

    A reader that went away (closed pipe) does not stop a peer: from then on events are dropped.
    """

    def __init__(self, format: LogFormat = "text", stream: TextIO | None = None) -> None:
        self._render = to_json if format == "json" else to_text
        self._stream = stream if stream is not None else sys.stdout
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, event: Event) -> None:
        line = self._render(event) + "\n"
        with self._lock:
            if self._closed:
                return
            try:
                self._stream.write(line)
                self._stream.flush()
            except (BrokenPipeError, ValueError):  # ValueError: the stream object was closed
                self._closed = True


class _LogHandler(logging.Handler):
    def __init__(self, emit: Emit) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._emit(Logged(logger=record.name, text=self.format(record)[:MAX_LOGGED]))
        except (TypeError, ValueError):  # the call's arguments do not fit its text
            self.handleError(record)


@contextlib.contextmanager
def said_in_logs(emit: Emit) -> Iterator[None]:
    """While the block runs, warnings and errors that modules log are events: one stream has everything."""
    handler = _LogHandler(emit)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
