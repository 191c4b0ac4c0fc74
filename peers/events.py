"""What happens in a run, as data. Log lines, JSON lines and the live display are renderings of it.

An event is a frozen struct: `words()` renders it as text, `to_json` as one line with an `event` key, and
`parse_event` reads that line back. No program parses the text.

Unknown events and unknown fields are skipped, so that programs of different versions can watch each other.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import string
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, TextIO, TypeAlias, Union

import msgspec

from peers.clock import unix_s
from swarm.errors import MALFORMED, PeerFault, PeerSilent, count, one_line, printable, short

LogFormat: TypeAlias = Literal["text", "json"]
Level: TypeAlias = Literal["debug", "info", "warning", "error"]

MAX_LINE_CHARS = 100_000
"""A longer line is not an event of ours: the largest holds a passage of text or a list of addresses."""
MAX_LOGGED = 10_000
"""Characters of a logged text: the rest of a long traceback is cut."""


class _Formatter(string.Formatter):
    """Formats for `{peer:short}`, `{stages:list}` and `{n:count microbatch}`, besides Python's own."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "short":
            return short(value)
        if format_spec == "list":
            return " ".join(map(str, value))
        if format_spec.startswith("count "):
            return count(value, format_spec.removeprefix("count "))
        return super().format_field(value, format_spec)


_FORMATTER = _Formatter()


def _kind(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag_field="event", tag=_kind):
    """Base of all events. Two are equal if all but their times are equal."""

    level: ClassVar[Level] = "info"
    template: ClassVar[str] = ""
    """What `words` says, with the names of fields."""

    at: float = msgspec.field(default_factory=unix_s)
    """Unix seconds, for people to read; nothing is computed from it."""

    def words(self) -> str:
        """The event as a sentence without its full stop; may hold several lines."""
        return _FORMATTER.vformat(self.template, (), msgspec.structs.asdict(self))

    def __eq__(self, other: object) -> bool:
        def fields(event: Event) -> dict[str, Any]:
            return {**msgspec.structs.asdict(event), "at": 0.0}

        return type(other) is type(self) and fields(other) == fields(self)


class Problem(Event, frozen=True):
    """Base of events that should not happen often; the process goes on."""

    level = "warning"


class Started(Event, frozen=True):
    """A role is reachable. The first event of every process that joins a network."""

    role: str
    peer: str
    addresses: tuple[str, ...]
    """libp2p multiaddresses that end in `/p2p/PEER`."""
    run: str = ""
    pid: int = 0

    def words(self) -> str:
        return f"{self.role} {short(self.peer)} listens on {', '.join(self.addresses) or 'no address'}"


class JoinLine(Event, frozen=True):
    """The exact line that another machine pastes, and those that start what a run needs besides."""

    line: str
    stages: int = 1
    others: tuple[str, ...] = ()
    local: bool = False
    """Only programs of this machine can join."""

    def words(self) -> str:
        often = f", at least once for each of {self.stages} stages" if self.stages > 1 else ""
        lines = [f"join with{often}:", f"    {self.line}"]
        if self.others:
            lines += ["and start, once each:", *(f"    {other}" for other in self.others)]
        if self.local:
            lines.append("only programs of this machine can join; for others, add --host 0.0.0.0 here")
        return "\n".join(lines)


class Serving(Event, frozen=True):
    """This peer has its weights and takes calls."""

    peer: str
    stage: int
    version: int
    device: str
    max_inflight: int = 0

    def words(self) -> str:
        room = f", up to {count(self.max_inflight, 'microbatch')} at once" if self.max_inflight else ""
        return f"serving stage {self.stage} at version {self.version} on {self.device}{room}"


class PeerJoined(Event, frozen=True):
    """Another peer appeared in the directory."""

    peer: str
    stage: int
    device: str = ""

    def words(self) -> str:
        where = f" on {one_line(self.device)}" if self.device else ""
        return f"peer {short(self.peer)} joined stage {self.stage}{where}"


class PeerLost(Problem, frozen=True):
    """A peer does not answer any more."""

    template = "peer {peer:short} of stage {stage} is lost: {why}"
    peer: str
    stage: int
    why: str

    @classmethod
    def at_work(cls, fault: PeerFault, stage: int, stages: int) -> PeerLost:
        """`fault`: of a peer of `stage`, which answers once those of all later ones have answered."""
        waits = isinstance(fault, PeerSilent) and stage + 1 < stages
        return cls(peer=fault.peer, stage=stage, why=fault.why + "; it may wait for a later stage" * waits)


class Killed(Problem, frozen=True):
    """The demo preempted one of its own processes with SIGKILL."""

    template = "peer {peer:short} of stage {stage} killed"
    peer: str
    stage: int


class StepDone(Event, frozen=True):
    """Step `t` is applied by every stage."""

    t: int
    steps: int
    """Steps of the whole run."""
    loss: float | None
    """The mean of its M microbatches; None: this trainer ran some of them, and was told no more."""
    tokens_per_s: float
    peers: tuple[int, ...] = ()
    """Peers that serve each stage now."""
    losses: tuple[float, ...] = ()
    """Loss of each of the M microbatches, if this trainer knows all of them."""
    meeting: bool = False
    """Islands met in it: it had no microbatch."""

    def words(self) -> str:
        if self.meeting:
            return f"step {self.t} done, {max(0, self.steps - self.t - 1)} to go: all islands have met"
        loss = "its loss was not told" if self.loss is None else f"loss {self.loss:.4f}"
        peers = f", peers per stage {' '.join(map(str, self.peers))}" if self.peers else ""
        done = f"step {self.t} done, {max(0, self.steps - self.t - 1)} to go"
        return f"{done}: {loss}, {self.tokens_per_s:,.0f} tokens/s{peers}"


class Working(Event, frozen=True):
    """A step takes long; a trainer says how far it is."""

    template = "step {t}: {done} of {count:count microbatch} answered after {after_s:.0f} s"
    t: int
    done: int
    count: int
    after_s: float


class Evaluated(Event, frozen=True):
    """What the weights of a version come to on samples that are not trained on."""

    template = "version {version}: loss {loss:.4f} on {samples:count sample} held out"
    version: int
    loss: float
    samples: int


class Stepped(Event, frozen=True):
    """This peer applied step `t`."""

    template = "stage {stage}: step {t} applied, {microbatches:count microbatch} mine"
    stage: int
    t: int
    microbatches: int
    """Of the step, in this peer's own sum."""


class AddedUp(Event, frozen=True):
    """A round in which this peer took part has its result. Said before another peer can take the result
    from it: so it is heard if a peer dies before the step is applied. For programs: no line of a text log."""

    template = "stage {stage}: step {t} added up: {missing} missing, {duplicated} twice"
    level = "debug"
    stage: int
    t: int
    missing: int
    duplicated: int
    """Microbatches in no ledger of the round, and in more than one."""


class Replayed(Problem, frozen=True):
    """Microbatches of step `t` run again because the sum that held them is gone."""

    template = "step {t}: {count:count microbatch} run again"
    t: int
    count: int


class Undone(Event, frozen=True):
    """Microbatches taken out of this peer's sum because a replica has them too."""

    template = "stage {stage}: step {t}: {count:count duplicate} undone"
    stage: int
    t: int
    count: int


class RoundAborted(Problem, frozen=True):
    """An all-reduce of this stage was not whole; nothing was applied."""

    template = "stage {stage}: a reduce of step {t} is void and starts again: {why}"
    stage: int
    t: int
    why: str


class StateFetched(Event, frozen=True):
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


class Downloading(Event, frozen=True):
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


class StageLost(Problem, frozen=True):
    """No replica of a stage has its weights."""

    template = (
        "stage {stage} has lost all its peers: the run pauses at version {version} until a peer restores the "
        "stage from a checkpoint"
    )
    stage: int
    version: int
    """Of the rest of the run."""


class Moved(Event, frozen=True):
    """This peer leaves its stage for one that needs it more."""

    template = "moves from stage {stage} to stage {to_stage}: {why}"
    stage: int
    to_stage: int
    why: str


class Paused(Event, frozen=True):
    """The device is its owner's again; the place is kept."""

    stage: int
    version: int
    """Of the state that is kept; negative: none, it had not joined yet."""
    why: str
    host_bytes: int = 0
    """That state, in host memory."""
    alone: bool = False
    """No other peer serves the stage: the run stands still."""

    def words(self) -> str:
        kept = "nothing is kept: it had not joined yet"
        if self.version >= 0:
            kept = f"version {self.version} is kept in {self.host_bytes / 1e6:.1f} MB of host memory"
        alone = f". No other peer serves stage {self.stage}: the run stands still" if self.alone else ""
        return f"paused at stage {self.stage}, {self.why}; the device is free, {kept}{alone}"


class Checkpointed(Event, frozen=True):
    """A stage is on disk."""

    template = "stage {stage}: checkpoint of step {step} in {path}"
    stage: int
    step: int
    path: str


class Kept(Event, frozen=True):
    """A keeper holds a version that all its stages have: the run could go on from it."""

    template = "keeps version {version} of stages {stages:list}"
    version: int
    stages: tuple[int, ...]


class RolledBack(Problem, frozen=True):
    """The run continues from a checkpoint because a stage lost all its peers."""

    stage: int
    """Negative: as a trainer sees it, all of them."""
    step: int

    def words(self) -> str:
        if self.stage < 0:
            return f"a stage had lost all its peers: the run goes on from version {self.step}"
        return f"stage {self.stage}: back to the checkpoint of step {self.step}"


class StopNow(Event, frozen=True):
    """This process was asked to stop and finishes what it has."""

    template = "{role} leaves: finishing what is in flight (Ctrl-C again to stop at once)"
    role: str


class Contributed(Event, frozen=True):
    """A peer's last event: what it did for the run."""

    template = "contributed {microbatches:count microbatch} in {steps:count step}. Thank you"
    microbatches: int
    steps: int


class Note(Event, frozen=True):
    """Anything worth a line that no program acts on."""

    template = "{text}"
    text: str


class Trouble(Problem, frozen=True):
    """Something to look at; the process goes on."""

    template = "{text}"
    text: str


class Logged(Problem, frozen=True):
    """A module's warning, or a library's, about what should not be; a traceback may follow its first line."""

    template = "{text}"
    logger: str
    text: str


class Failed(Event, frozen=True):
    """The process ends because of this."""

    template = "{text}"
    level = "error"
    text: str


EVENTS = tuple(cls for cls in (*Event.__subclasses__(), *Problem.__subclasses__()) if cls is not Problem)

_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(
    Union[EVENTS]  # type: ignore  # noqa: UP007
)


def kind(cls: type[Event]) -> str:
    """The `event` key of a class: its name in snake case."""
    return str(cls.__struct_config__.tag)


def version_of(event: Event) -> int | None:
    """The number of steps that are in the weights, as an event tells; None: it does not."""
    if isinstance(event, StepDone | Stepped):
        return event.t + 1
    if isinstance(event, Serving | StateFetched | Kept):
        return event.version
    return event.step if isinstance(event, RolledBack) else None


def to_json(event: Event) -> str:
    """One line of JSON. Numbers that are not finite become null."""
    return msgspec.json.encode(event).decode()


def parse_event(line: str) -> Event | None:
    """The event in a line of `to_json`, or None for any other line, unknown event or impossible field."""
    if len(line) > MAX_LINE_CHARS:
        return None
    try:
        return _DECODER.decode(line)
    except MALFORMED:
        return None


def time_of_day(unix_s: float) -> str:
    """`13:47:04`, local time."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def to_text(event: Event) -> str:
    """A log line: local time, a mark for trouble, the words."""
    mark = {"warning": "! ", "error": "error: "}.get(event.level, "")
    return f"{time_of_day(event.at)}  {mark}{printable(event.words())}"


Emit: TypeAlias = Callable[[Event], None]
"""Takes each event of a program."""


class Emitter:
    """Writes events as lines to a stream, one write and one flush each. Any thread may call it.

    What cannot be written is dropped: a reader that ended, or a full disk, does not stop what a peer does.
    """

    def __init__(self, format: LogFormat = "text", stream: TextIO | None = None) -> None:
        self._render = to_json if format == "json" else to_text
        self._stream = stream if stream is not None else sys.stdout
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if event.level == "debug" and self._render is to_text:
            return
        line = self._render(event) + "\n"
        # ValueError: the stream object was closed.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._stream.write(line)
            self._stream.flush()


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


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Without the pages that torch logs of a model that it cannot trace: the error says it briefly."""

    def silent(record: logging.LogRecord) -> bool:
        return False

    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    for handler in handlers:
        handler.addFilter(silent)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(silent)
