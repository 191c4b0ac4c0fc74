"""What a member may do to its messages: lies at random, and a message of which a field is altered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from peers.sim.dice import Dice
from swarm.errors import Busy, Leaving, NotReady, Refused, Stale, SwarmError
from swarm.ids import PeerId

Said: TypeAlias = tuple[bytes, Sequence[bytes]]
"""Header and body."""
RECORD = "record"
"""What a member announces of itself: nobody is asked, and nobody answers."""
KINDS = {
    "report": 14, "directive": 10, "summary": 10, "run": 5, "watch": 5, "work": 8, "locate": 3, "part": 6,
    "reveal": 6, "products": 2, "show": 2, "audit": 1, "evidence": 1, "convicted": 2, "kept": 2, "state": 2,
    "held": 3, "chunk": 1, "status": 9, RECORD: 9,
}  # fmt: skip
"""Kinds of messages, and how often a lie is about each."""
ACTS = {"drops": 4, "delays": 4, "doubles": 1, "replays": 4, "mixes up": 3, "alters": 8, "refuses": 4}
"""*Replays*: sends an old one of its own. *Mixes up*: sends what another one asked it."""
INVENTS = "invents"
"""Says what could be true: `scripts/bench/common/inventions.py`."""
REFUSALS: tuple[Callable[[], SwarmError], ...] = (
    partial(Refused, "no"),
    *(partial(Stale, "no", version=version) for version in (0, 10**9)),
    *(partial(kind, "no", retry_after_s=after_s) for kind in (Busy, Leaving) for after_s in (0.0, 60.0)),
    *(partial(NotReady, "no", version=version, retry_after_s=1.0) for version in (-1, 0, 10**9)),
)


class Lie(NamedTuple):
    """What a member does to its messages of a kind."""

    kind: str
    answers: bool
    """To those that it answers with, and not to those that it asks with."""
    act: str
    chance: float
    share: float
    """Of all others: to whom."""
    since_s: float
    lasts_s: float
    by_s: float
    number: int
    """Of its dice."""

    def words(self) -> str:
        what = f"{self.act} {'answers to ' * self.answers}{self.kind}"
        by = f" by {self.by_s} s" * (self.act == "delays")
        often = f", {self.chance:.0%} of them" * (self.chance < 1) + ", to half of all" * (self.share < 1)
        until = f" for {self.lasts_s:.0f} s" * math.isfinite(self.lasts_s)
        return f"{what}{by}{often}, from {self.since_s:.2f} s on{until}"


TRUTH = Lie("", False, "tells the truth", 0.0, 0.0, 0.0, 0.0, 0.0, 0)


def drawn(dice: Dice) -> Lie:
    """One lie at random."""
    return _drawn(dice, dice.pick([kind for kind, weight in KINDS.items() for _ in range(weight)]))


def inventing(dice: Dice, forms: Iterable[tuple[str, bool]]) -> Lie:
    """One at random that says what could be true. `forms`: of which questions and answers there are such."""
    forms = {form: KINDS.get(form[0], 2) for form in forms}
    kind, answers = dice.pick([form for form, weight in forms.items() for _ in range(weight)])
    return _drawn(dice, kind)._replace(act=INVENTS, answers=answers)


def _drawn(dice: Dice, kind: str) -> Lie:
    return Lie(
        kind, answers=kind != RECORD and dice.chance(0.5),
        act=dice.pick([act for act, weight in ACTS.items() for _ in range(weight)]),
        chance=dice.pick((1.0, 1.0, 0.5, 0.2)), share=dice.pick((1.0, 1.0, 1.0, 0.5)),
        since_s=dice.between(0.25, 1.2), lasts_s=dice.pick((2.0, 10.0, math.inf, math.inf)),
        by_s=dice.pick((0.3, 1.0, 2.5, 4.5, 9.0)), number=dice.below(1 << 30),
    )  # fmt: skip


def altered(value: Any, dice: Dice, names: Sequence[PeerId]) -> Any:
    """What was read from a message, but for one field, which has another value of its type."""
    fields = [name for name in value if name not in ("run", "signature")] if isinstance(value, dict) else []
    if fields:
        said = [name for name in fields if value[name]]
        key = dice.pick(said if said and dice.chance(0.8) else fields)
        return {**value, key: altered(value[key], dice, names)}
    if isinstance(value, list) and value and dice.chance(0.75):
        at = dice.below(len(value))
        return [*value[:at], altered(value[at], dice, names), *value[at + 1 :]]
    others: Sequence[Any] = (value,)
    if isinstance(value, bool):
        others = (not value,)
    elif isinstance(value, (int, float)):
        others = (value + 1, value + 1, value - 1, value + 1000, 2 * value, 0 * value)
    elif isinstance(value, str):
        others = names if value in names or dice.chance(0.2) else ("", value[::-1], "0" * len(value))
    elif isinstance(value, bytes):
        others = (flipped(value, dice),)
    elif isinstance(value, list):
        others = ([], value[1:], value[:-1], value[::-1], value + value[:1])
    return dice.pick(others)


def flipped(data: bytes, dice: Dice) -> bytes:
    """One bit is another one."""
    at = dice.below(len(data))
    return data[:at] + bytes([data[at] ^ 1 << dice.below(8)]) + data[at + 1 :] if data else data
