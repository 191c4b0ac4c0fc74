"""Under which keys of a run records lie, which of them are read, and which nodes are asked for them. Pure.

On level L the records of a stage are spread over 4^L keys. Which level a peer takes, and what a large run
changes: docs/design.md, *The directory*.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarm.ids import PeerId, Stage

FAN = 4
MAX_LEVEL = 3
"""64 keys of a stage."""
MAX_STRETCHED = 20.0
"""A record lives 400 s then, twice as long as reading 10 000 of them takes."""
_EARLY = 0.75
"""Readers go one level further before writers do: their counts differ a little."""
_SAID_BY = 1 / 8
"""Of the peers of a stage, so many have to be on a level before it is read: one liar must not add 84 keys."""


class StageKey(NamedTuple):
    """One key of a stage."""

    stage: Stage
    level: int
    number: int


def shards_at(stage: Stage, level: int) -> list[StageKey]:
    return [StageKey(stage, level, number) for number in range(FAN**level)]


@functools.lru_cache(maxsize=32768)
def homes(peer: PeerId, stage: Stage, level: int) -> tuple[StageKey, ...]:
    """Where the record of a peer that is on `level` lies: there, and perhaps above."""
    digest = hashlib.sha256(peer.encode()).digest()
    place, chance = digest[0], int.from_bytes(digest[1:9], "big")
    return tuple(
        StageKey(stage, at, place % FAN**at)
        for at in range(level, -1, -1)
        if chance % FAN ** (level - at) == 0
    )


@dataclass(frozen=True, slots=True)
class Scale:
    """What the size of a run changes."""

    full: int = 128
    """Records of a key, above which its stage is spread further: 40 kB for a first reader."""
    usual: float = 200.0
    """Peers of a run, up to which times are not stretched: reading all of it takes 12 kB a second."""

    def stretch(self, known: int) -> float:
        """How many times longer everything may take in a run of which so many peers are known.

        Deaths are noticed by calls, not by records; and for each peer there are as many more others.
        """
        return min(MAX_STRETCHED, max(1.0, known / self.usual))

    def level_for(self, members: int, before: int = 0) -> int:
        """How far a peer of a stage of so many spreads its record, which was on level `before`.

        It goes back only when the stage is half of what it was when it went there.
        """
        level = before
        while level < MAX_LEVEL and members > self.full * FAN**level:
            level += 1
        while level > 0 and members < self.full * FAN ** (level - 1) / 2:
            level -= 1
        return level

    def levels_to_read(self, said: Mapping[int, int]) -> list[int]:
        """`said`: how many known peers of the stage are on each level."""
        members = sum(said.values())
        levels = {0}
        levels |= {level for level, count in said.items() if count >= _SAID_BY * members and count}
        levels |= {lv for lv in range(1, MAX_LEVEL + 1) if members > _EARLY * self.full * FAN ** (lv - 1)}
        # A peer on a level that only its sample above shows is found when its replicas are.
        return sorted(level for level in levels if level <= MAX_LEVEL)

    def shards_to_read(self, stage: Stage, said: Mapping[int, int]) -> list[StageKey]:
        """All keys under which records of the stage may be found."""
        return [shard for level in self.levels_to_read(said) for shard in shards_at(stage, level)]


DEFAULT_SCALE = Scale()


def nodes_to_ask(
    holders: Mapping[bytes, Sequence[PeerId]], rng: random.Random, *, most: int | None = None
) -> dict[PeerId, list[bytes]]:
    """Few nodes that together hold all keys, other ones each time: node -> the keys to ask it for.

    In a small swarm every node holds nearly everything, and asking one or two does (a question costs 1 ms
    of CPU over all processes). Chance keeps a node that hides records from hiding them for long.

    Args:
        holders: the most urgent keys first.
        most: nodes. What is left has to wait.
    """
    left = {key: list(dict.fromkeys(nodes)) for key, nodes in holders.items() if nodes}
    chosen: dict[PeerId, list[bytes]] = {}
    counts = Counter(node for nodes in left.values() for node in nodes)
    while left and (most is None or len(chosen) < most):
        urgent = next(iter(left.values()))
        best = max(counts[node] for node in urgent)
        node = rng.choice([node for node in urgent if 2 * counts[node] > best])
        chosen[node] = [key for key, nodes in left.items() if node in nodes]
        for key in chosen[node]:
            counts.subtract(left.pop(key))
    return chosen
