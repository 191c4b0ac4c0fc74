"""Under which of a run's keys a record lies, and which keys are read for a stage. Pure.

Each stage of a run has keys of its own, so that whoever works with two stages reads two. On level L the
records of a stage are spread over 4^L keys; a stage has as many as keep a key below some hundred records.
Nobody decides that: each peer takes the level from the number of replicas that it knows, says it in its
record, and is also on every level above with a chance that makes those keys equally large. So the one key of
level 0 always holds a sample of its stage, from which a newcomer learns how far the others are spread.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from swarm.ids import PeerId, Stage

FAN = 4
MAX_LEVEL = 3
"""64 keys of a stage."""
FULL = 128
"""Records of a key, above which its stage is spread further: 40 kB for who reads them for the first time."""
_EARLY = 0.75
"""Readers look one level further before writers go there: their counts differ a little."""
_SAID_BY = 1 / 8
"""Of the peers of a stage, so many have to be on a level before it is read: one liar must not add 84 keys."""


class Shard(NamedTuple):
    """One key of a stage."""

    stage: Stage
    level: int
    number: int


def shards_at(stage: Stage, level: int) -> list[Shard]:
    """All keys of one level."""
    return [Shard(stage, level, number) for number in range(FAN**level)]


def level_for(members: int, before: int = 0) -> int:
    """How far a peer of a stage of so many spreads its record, which was on level `before`.

    It goes back only when the stage is half of what it was when it went there.
    """
    level = before
    while level < MAX_LEVEL and members > FULL * FAN**level:
        level += 1
    while level > 0 and members < FULL * FAN ** (level - 1) / 2:
        level -= 1
    return level


@functools.lru_cache(maxsize=32768)
def homes(peer: PeerId, stage: Stage, level: int) -> tuple[Shard, ...]:
    """Where the record of a peer that is on `level` lies: there, and perhaps above."""
    digest = hashlib.sha256(peer.encode()).digest()
    place, chance = digest[0], int.from_bytes(digest[1:9], "big")
    return tuple(
        Shard(stage, at, place % FAN**at) for at in range(level, -1, -1) if chance % FAN ** (level - at) == 0
    )


def levels_to_read(said: Mapping[int, int]) -> list[int]:
    """`said`: how many known peers of the stage are on each level."""
    members = sum(said.values())
    levels = {0}
    levels |= {level for level, count in said.items() if count >= _SAID_BY * members and count}
    levels |= {level for level in range(1, MAX_LEVEL + 1) if members > _EARLY * FULL * FAN ** (level - 1)}
    # Whoever is on a level that only its sample above shows is found when its replicas are.
    return sorted(level for level in levels if level <= MAX_LEVEL)


def shards_to_read(stage: Stage, said: Mapping[int, int]) -> Iterable[Shard]:
    """All keys under which records of the stage may be found."""
    return [shard for level in levels_to_read(said) for shard in shards_at(stage, level)]
