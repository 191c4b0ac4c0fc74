"""How many devices are up, over time: spot traces read as peers that come and vanish.

Two forms are read. JSON, as published with "Can't Be Late" (NSDI 24): `{"metadata": {"gap_seconds": g},
"data": [counts]}`, a count every g seconds. CSV, as published with Bamboo (NSDI 23): lines of
`seconds,count`, one for each change, times that do not go back; with a third field, a region, the count is
of the devices there.

A trace says how many are up, not which. Here every decrease takes victims drawn evenly among those that are
up, and every increase is as many new peers; both at the time of the sample.
(The SWARM paper draws the stage of each victim instead. Instances do not know what stage they serve.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from swarm.errors import SetupError
from swarm.ids import PeerId
from swarm.sim.dice import Dice

MAX_UP = 1_000_000
"""More peers than anything here is meant for: a mistake in the file."""


class _Metadata(msgspec.Struct):
    gap_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class _Sampled(msgspec.Struct):
    metadata: _Metadata
    data: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_UP)]], msgspec.Meta(min_length=1)]


class Trace(NamedTuple):
    """How many peers are up, as steps."""

    times_s: tuple[float, ...]
    """When a count begins to hold; ascending, the first one is 0."""
    counts: tuple[int, ...]
    end_s: float
    regions: tuple[str, ...] = ()
    """Where each count is of; empty: of all devices."""


class Change(NamedTuple):
    """Peers that come and peers that vanish at one time."""

    at_s: float
    joined: tuple[PeerId, ...]
    died: tuple[PeerId, ...]
    region: str = ""
    """Where, if the trace says so."""


def read_trace(text: str, name: str = "the trace") -> Trace:
    """Either form; counts that follow one another and are equal become one.

    Raises:
        SetupError: neither form, or numbers that cannot be; says where.
    """
    lines, end_s = _json(text, name) if text.lstrip().startswith("{") else _csv(text, name)
    kept: list[tuple[float, int, str]] = []
    newest: dict[str, int] = {}
    """Region -> the place of its last line."""
    for time_s, count, region in lines:
        before = newest.get(region)
        if before is not None and kept[before][0] == time_s:
            kept[before] = (time_s, count, region)  # of several changes at one time the last one holds
        elif before is None or count != kept[before][1]:
            newest[region] = len(kept)
            kept.append((time_s, count, region))
    times_s, counts, regions = zip(*kept, strict=True)
    return Trace(times_s, counts, end_s, regions if any(regions) else ())


def changes(trace: Trace, seed: int) -> Iterator[Change]:
    """The trace with names and victims; the same for the same seed."""
    dice, everywhere, made = Dice(seed), dict[str, list[PeerId]](), 0
    regions = trace.regions or ("",) * len(trace.counts)
    for at_s, count, region in zip(trace.times_s, trace.counts, regions, strict=True):
        died, up = list[PeerId](), everywhere.setdefault(region, [])
        while len(up) > count:
            died.append(up.pop(dice.below(len(up))))
        joined = [f"p{made + i:06d}" for i in range(count - len(up))]
        made += len(joined)
        up += joined
        if joined or died:
            yield Change(at_s, tuple(joined), tuple(died), region)


def _json(text: str, name: str) -> tuple[list[tuple[float, int, str]], float]:
    try:
        found = msgspec.json.decode(text, type=_Sampled)
    except msgspec.MsgspecError as error:
        raise SetupError(f"{name}: {error}") from None
    gap_s = found.metadata.gap_seconds
    return [(i * gap_s, count, "") for i, count in enumerate(found.data)], len(found.data) * gap_s


def _csv(text: str, name: str) -> tuple[list[tuple[float, int, str]], float]:
    found: list[tuple[float, int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() in ("", "seconds,count", "seconds,count,region"):
            continue
        before_s = found[-1][0] if found else 0.0
        try:
            first, second, *more = line.split(",")
            time_s, count, region = float(first), int(second), more[0].strip() if more else ""
            if not (before_s <= time_s < math.inf and 0 <= count <= MAX_UP):
                raise ValueError
        except ValueError:
            raise SetupError(
                f"{name}, line {number}: {line.strip()[:60]!r} is not `seconds,count`, at {before_s:g} s "
                "or later"
            ) from None
        if found and bool(region) != bool(found[0][2]):
            raise SetupError(f"{name}, line {number}: either all lines name a region, or none")
        found.append((time_s, count, region))
    if not found:
        raise SetupError(f"{name} is empty: lines of `seconds,count` are needed")
    end_s = found[-1][0]
    if found[0][0] > 0:
        found.insert(0, (0.0, 0, found[0][2]))
    return found, end_s
