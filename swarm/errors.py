"""Every error that crosses a module or a wire.

    SwarmError
    ├── SetupError        the user has to change something; the text says what
    │   ├── DeviceHangs   a job of the device never ends: nor does what waits for it
    │   └── Unreachable   none of the others that are needed answers: perhaps later
    ├── PeerFault         `peer` misbehaved: nothing here is lost, back off, go elsewhere
    │   ├── PeerGone      cannot be reached, or the connection broke
    │   ├── PeerSilent    connected, but no byte within the limit, or its answer was lost
    │   └── BadAnswer     it answered nonsense (wrong shape, not finite, malformed)
    ├── NotNow            a healthy refusal: ask again after `retry_after_s`
    │   ├── Busy          as many microbatches as fit in memory are in flight
    │   ├── NotReady      its weights are at `version`, older than what was asked for
    │   └── Leaving       it is draining and will not come back: ask another
    ├── Stale             the step is over: its weights are at `version`
    └── Refused           unknown method, wrong run or shape, too large, not finite: so it would be elsewhere
        ├── NotAdmitted   by the charter that the answering peer knows; whether the newest does, is read there
        └── OtherVersion  its program speaks `version` of the protocol, which is not ours

Errors of the last four kinds travel as answers: `to_wire` and `from_wire` keep their fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
DIVERGED = "; the run diverged, or a sample is bad: begin another with a lower optimizer.lr, or other data"
MALFORMED = (ValueError, RecursionError)
"""What decoders raise for bytes that are not of their form: a stranger's may be no UTF-8, or a deep nest."""


class SwarmError(Exception):
    """Base of all errors below. `text` is a sentence for a person."""

    code: ClassVar[str] = "error"
    numbers: ClassVar[tuple[str, ...]] = ()
    """Fields that travel besides `code` and `text`, keywords of the constructor."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def to_wire(self) -> dict[str, Any]:
        """A small msgpack-able dict: code, text and the error's own numbers."""
        numbers = {name: getattr(self, name) for name in self.numbers}
        return {"code": self.code, "text": self.text[:500], **numbers}


class SetupError(SwarmError):
    code = "setup"


class DeviceHangs(SetupError): ...


class Unreachable(SetupError): ...


class PeerFault(SwarmError):
    code = "fault"
    silent: ClassVar[bool] = True
    """Nothing was heard of it: perhaps only the line is cut, and a sign of life ends its backoff."""

    def __init__(self, peer: str, text: str) -> None:
        self.peer, self.why = peer, one_line(text)
        super().__init__(f"peer {short(peer)}: {self.why}")


class PeerGone(PeerFault):
    code = "gone"


class PeerSilent(PeerFault):
    code = "silent"


class BadAnswer(PeerFault):
    code = "bad-answer"
    silent = False


class NotNow(SwarmError):
    code, numbers = "not-now", ("retry_after_s",)

    def __init__(self, text: str, *, retry_after_s: float = 0.05) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Busy(NotNow):
    code = "busy"


class Leaving(NotNow):
    code = "leaving"


class NotReady(NotNow):
    code, numbers = "not-ready", ("version", "retry_after_s")

    def __init__(self, text: str, *, version: int, retry_after_s: float = 0.05) -> None:
        super().__init__(text, retry_after_s=retry_after_s)
        self.version = version


class Stale(SwarmError):
    code, numbers = "stale", ("version",)

    def __init__(self, text: str, *, version: int) -> None:
        super().__init__(text)
        self.version = version


class Refused(SwarmError):
    code = "refused"
    by_charter: ClassVar[bool] = False

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))  # it quotes the request


class NotAdmitted(Refused):
    code, by_charter = "not-admitted", True


class OtherVersion(Refused):
    code, numbers = "other-version", ("version",)

    def __init__(self, text: str, *, version: int) -> None:
        super().__init__(text)
        self.version = version


_ANSWERS = NotNow, Busy, Leaving, NotReady, Stale, Refused, NotAdmitted, OtherVersion
_WIRE = {cls.code: cls for cls in _ANSWERS}


def from_wire(peer: str, fields: dict[str, Any]) -> SwarmError:
    """The error that `peer` answered with; anything malformed becomes `BadAnswer`."""
    code, text = fields.get("code"), fields.get("text")
    cls = _WIRE.get(code) if isinstance(code, str) else None
    if cls is None or not isinstance(text, str):
        return BadAnswer(peer, f"answered with an unknown error: {str(code)[:40]!r}: {str(text)[:200]!r}")
    version, retry = fields.get("version", 0), fields.get("retry_after_s", 0.05)
    if type(version) is not int or type(retry) not in (int, float) or not 0 <= retry <= 60:
        return BadAnswer(peer, f"answered {code!r} with impossible numbers")
    told = {"version": version, "retry_after_s": retry}
    return cls(one_line(text[:500]), **{name: told[name] for name in cls.numbers})


def did_you_mean(name: str, names: Iterable[str], places: Mapping[str, str] | None = None) -> str:
    """A hint for an unknown name: the one of `names` that is most like it, or nothing.

    `places`: of names that belong elsewhere, where; they are likely, too.
    """
    places = places or {}
    near = difflib.get_close_matches(name[:80], [*names, *places], n=1)
    return f" (did you mean {near[0]}{places.get(near[0], '')}?)" if near else ""


def count(n: int, noun: str) -> str:
    """`1 peer`, `2 peers`, `2 microbatches`."""
    if n == 1:
        return f"1 {noun}"
    return f"{n} {noun}es" if noun.endswith(("ch", "s")) else f"{n} {noun}s"


def stages_named(stages: Sequence[int]) -> str:
    """`stage 1`, `stages 0, 2`."""
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def lasting(seconds: float) -> str:
    """`0.4 s`, `40 s`, `12 min`, `3 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def short(peer: str) -> str:
    """The end of a peer id, which is the part that differs, for log lines."""
    return peer[-6:]


def printable(text: str) -> str:
    """`text` for a terminal: its lines and tabs, without control characters. It may come from a stranger."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


MAX_WORDS_CHARS = 400
"""Of a text that a stranger wrote, for people."""


def decoded(data: bytes, decode: Callable[[bytes], T], what: str, max_bytes: int) -> T:
    """What a stranger's bytes say. Raises Refused: they are too many, or say nothing of that form."""
    if len(data) > max_bytes:
        raise Refused(f"a {what} of {len(data)} bytes; at most {max_bytes} are allowed")
    try:
        return decode(data)
    except MALFORMED as error:
        raise Refused(f"a malformed {what}: {clean(str(error))}") from None


def clean(text: str, max_chars: int = MAX_WORDS_CHARS) -> str:
    """At most `max_chars` characters of `text`, all of them printable."""
    cut = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return "".join(c if c.isprintable() else "?" for c in cut)


def one_line(text: str) -> str:
    """A stranger's text as part of a log line: it must not look like another line of the log."""
    return printable(text).replace("\n", " ")
