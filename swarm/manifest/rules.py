"""What a key of a manifest may be: rules for one value, and the base of the tables."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

from typing_extensions import dataclass_transform

from swarm.codecs import KNOWN, parse_codec
from swarm.errors import SetupError
from swarm.ids import PEER_ID


class Rule(NamedTuple):
    """The values that a key may have."""

    allowed: str
    """In words, for errors."""
    accepts: Callable[[Any], Any]
    canonical: Callable[[Any], Any] = lambda value: value

    def check(self, value: Any) -> Any:
        """The value in its canonical type and form; raises ValueError if the key cannot have it."""
        if not self.accepts(value):
            raise ValueError
        return self.canonical(value)


def integer(low: int, high: int) -> Rule:
    # type() and not isinstance(): `true` is an int to Python and a typo to us.
    return Rule(f"an integer from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def number(low: float, high: float, *, above: bool = False, below: bool = False) -> Rule:
    def accepts(v: Any) -> bool:
        if type(v) not in (int, float) or not low <= v <= high:  # NaN fails here as well
            return False
        return not ((above and v == low) or (below and v == high))

    low_text = f"above {low:g}" if above else f"at least {low:g}"
    allowed = f"a number {low_text} and {'below' if below else 'at most'} {high:g}"
    return Rule(allowed, accepts, lambda v: float(v) + 0.0)  # one zero of -0.0 and 0.0


FLAG = Rule("true or false", lambda v: type(v) is bool)


def choice(*choices: Any, told: Sequence[Any] = ()) -> Rule:
    """`told`: what an error offers; more than the choices, if others make it another table."""
    return Rule(one_of(told or choices), lambda v: any(type(v) is type(c) and v == c for c in choices))


def matches(pattern: str) -> Callable[[Any], bool]:
    """Whether a value is a text of that form."""
    known = re.compile(pattern)
    return lambda v: type(v) is str and known.fullmatch(v) is not None


def text(pattern: str, allowed: str) -> Rule:
    """No character that needs an escape in TOML may match `pattern`, so that `to_toml` is trivial."""
    return Rule(allowed, matches(pattern))


def _canonical_json(value: str) -> str:
    """Sorted keys, no spaces, ASCII only, and no single quote: a literal string of TOML."""
    if not value:
        return value
    try:
        found = json.loads(value)
        text = json.dumps(found, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise ValueError from None
    if type(found) is not dict:
        raise ValueError
    return text.replace("'", "\\u0027")


JSON = Rule(
    'a JSON object as text, such as \'{"model_type":"gpt2"}\', without NaN or infinite numbers',
    lambda v: type(v) is str,
    _canonical_json,
)


def _is_cut(value: Any) -> bool:
    if type(value) is not str:
        return False
    runs = [re.fullmatch(r"(0|[1-9][0-9]{0,3})\*([1-9][0-9]{0,6})", run) for run in value.split(" ") if value]
    return all(runs) and all(a[1] != b[1] for a, b in itertools.pairwise(runs) if a and b)


CUT = Rule(
    "the stage of each operator, runs of one stage as stage*count, such as 0*120 1*44; or empty", _is_cut
)


MAX_SOURCES = 64
_SOURCE = r"[1-9][0-9]{0,5}\*[1-9][0-9]{0,14}"
MIXTURE = text(
    rf"({_SOURCE}( {_SOURCE}){{0,{MAX_SOURCES - 1}}})?",
    f"weight*tokens of each source, at most {MAX_SOURCES}, such as 7*1200000 3*50000; or empty",
)


def list_of(accepts: Callable[[Any], bool], most: float) -> Callable[[Any], bool]:
    """Whether a value is a list of at most so many, each of which is accepted."""
    return lambda v: type(v) in (list, tuple) and len(v) <= most and all(map(accepts, v))


def set_of(accepts: Callable[[Any], bool], most: int, allowed: str) -> Rule:
    """A list without duplicates. A set has no order: the same elements are the same text."""
    are = list_of(accepts, most)
    allowed = f"a list of at most {most} different {allowed}"
    return Rule(allowed, lambda v: are(v) and len(set(v)) == len(v), lambda v: tuple(sorted(v)))


is_name = matches(r"[A-Za-z0-9_.*?]{1,200}")
NAMES = set_of(is_name, 64, "names of weights, in which * and ? stand for other characters, such as embed.*")


_SIZES = r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6}){0,6}"
_are_inputs = list_of(matches(rf"[A-Za-z_][A-Za-z0-9_]{{0,99}} (true|(int|float|bool)( {_SIZES})?)"), 16)
INPUTS = Rule(
    'a list of at most 16 of the form "NAME int SIZES", with int, float or bool and the sizes of one sample, '
    'such as "pixel_values float 3x224x224" or "labels int"; or "NAME true"',
    lambda v: _are_inputs(v) and len({one.partition(" ")[0] for one in v}) == len(v),
    tuple,
)


CODECS = Rule(
    f"one of {KNOWN}, where R, the part kept, is between 0 and 1, such as 0.05; or a list of them, one for "
    "each of the boundaries between stages, in order",
    lambda v: all(type(c) is str and parse_codec(c) for c in (v if type(v) in (list, tuple) else (v,))),
    lambda v: v if type(v) is str else tuple(v),
)
"""A codec, or one for each boundary; the number of boundaries is not known here."""


def peers(most: int) -> Rule:
    return set_of(matches(PEER_ID.pattern), most, "peer ids (12D3KooW…, 52 characters each)")


DIGEST = text(r"([0-9a-f]{64})?", "64 lower-case hex digits, or empty: not pinned yet")
DIGESTS = Rule(
    "a list of 64 lower-case hex digits each, one for each stage; or empty: not pinned yet",
    list_of(matches("[0-9a-f]{64}"), math.inf),
    tuple,
)


def setting(rule: Rule, default: Any = MISSING, *, later: bool = False) -> Any:
    """A field with its rule. `later`: the key is younger than published manifests; at its default it is left
    out of the text.
    """
    return field(default=default, metadata={"rule": rule, "later": later})


def shown(value: Any) -> str:
    """`value` for an error message: short and printable, although a stranger wrote it."""
    if isinstance(value, (bool, str, int)) and not (type(value) is int and value.bit_length() > 200):
        text = toml(value)
    else:
        try:
            text = " ".join(repr(value).split())
        except ValueError:  # Python refuses to print an integer of more than 4300 digits
            text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def toml(value: Any) -> str:
    """`value` as TOML; strings must need no escape for the result to be canonical (see `text`)."""
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is str:
        if not value.isprintable():
            return repr(value)
        return f"'{value}'" if '"' in value or "\\" in value else f'"{value}"'
    if type(value) in (tuple, list):
        return "[" + "".join(f"\n  {toml(item)}," for item in value) + ("\n]" if value else "]")
    return repr(value)


def one_of(choices: Sequence[Any]) -> str:
    return "one of " + ", ".join(toml(choice) for choice in choices)


def wrong(key: str, value: Any, allowed: str) -> SetupError:
    return SetupError(f"{key} = {shown(value)} in the run's manifest: it must be {allowed}")


Rules: TypeAlias = Iterator[tuple[object, str, str]]
"""Whether a value cannot be beside the others, its key, and what it must be; one at a time, in order."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Spec:
    """Base of the tables, frozen dataclasses: every field is checked and normalised by its rule, and then all
    of them `_together`."""

    section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for item in fields(cast(Any, self)):
            rule = item.metadata.get("rule")
            if rule is None:
                continue
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, rule.check(value))
            except ValueError:
                raise wrong(self._key(item.name), value, rule.allowed) from None
        for cannot_be, name, allowed in self._together():
            if cannot_be:
                value = attrgetter(name)(self)
                raise wrong(self._key(name), list(value) if type(value) is tuple else value, allowed)

    def _together(self) -> Rules:
        """The rules for values that are possible each but not together."""
        yield from ()

    @classmethod
    def _key(cls, name: str) -> str:
        return f"{cls.section}.{name}" if cls.section else name


def values_of(spec: Spec) -> list[tuple[str, Any]]:
    """The keys and values of the text: without derived fields, and without later keys at their defaults."""
    return [
        (item.name, value)
        for item in fields(cast(Any, spec))
        if item.init
        and ((value := getattr(spec, item.name)) != item.default or not item.metadata.get("later"))
    ]
