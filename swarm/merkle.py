"""A Merkle tree over the tokens of a run: 32 bytes of the manifest are enough to check a few of them.

The tokens, as little-endian integers of the narrow dtype, are cut into leaves of 256 bytes; the last one may
be shorter. The tree is that of RFC 6962: a node without a sibling goes up as it is. Leaves, nodes and the
root are hashed apart, and the root covers the number of bytes.

Nodes are kept by level, as bytes: by an index those of *blocks* of 4 MiB and all above them (the upper
nodes), by the holder of a block those inside it, down to *parts* of 4 KiB. Those below are made again from a
part. A proof is what is missing of a sample's first and last leaf, and the nodes beside the way up of both.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import BinaryIO

LEAF_BYTES = 256
"""Half as much would save 128 bytes of a proof and cost 32 more for the longer ways, and twice the time."""
PART_LEVEL, BLOCK_LEVEL = 4, 14
PART_BYTES, BLOCK_BYTES = LEAF_BYTES << PART_LEVEL, LEAF_BYTES << BLOCK_LEVEL
NODE_BYTES = 32
_AT_ONCE = 1 << 20
"""Bytes of nodes from which those above are made."""

Read = Callable[[int, int], bytes]
"""The bytes from a place up to another one, fewer only at the end."""
Inside = Callable[[int], "list[bytes]"]
"""The levels inside the block with this number, as `block_levels` makes them."""


def _node(pair: bytes) -> bytes:
    return hashlib.sha256(b"\1" + pair).digest()


def _root(top: bytes, size: int) -> bytes:
    return hashlib.sha256(b"\2swarm tokens" + size.to_bytes(8, "big") + top).digest()


def _above(nodes: bytes) -> bytes:
    """The level above: pairs joined, a single last one as it is."""
    single = len(nodes) % (2 * NODE_BYTES)
    pairs = (nodes[at : at + 2 * NODE_BYTES] for at in range(0, len(nodes) - single, 2 * NODE_BYTES))
    return b"".join(map(_node, pairs)) + nodes[len(nodes) - single :]


def _leaves(data: bytes) -> bytes:
    leaves = (data[at : at + LEAF_BYTES] for at in range(0, len(data), LEAF_BYTES))
    return b"".join(hashlib.sha256(b"\0" + leaf).digest() for leaf in leaves)


def _of(nodes: bytes, index: int) -> bytes:
    return nodes[index * NODE_BYTES : (index + 1) * NODE_BYTES]


def _levels(data: bytes, top: int) -> list[bytes]:
    """All levels over some leaves, up to `top`."""
    levels = [_leaves(data)]
    while len(levels) <= top:
        levels.append(_above(levels[-1]))
    return levels


def part_node(part: bytes) -> bytes:
    """The node of a part of 4 KiB; the last one may be shorter."""
    return _levels(part, PART_LEVEL)[-1]


def block_levels(block: bytes) -> list[bytes]:
    """The levels inside a block that are kept: from that of its parts up to its own node, the last."""
    return _levels(block, BLOCK_LEVEL)[PART_LEVEL:]


def level_bytes(size: int) -> list[int]:
    """How long each of the `block_levels` of a block of so many bytes is."""
    return [NODE_BYTES * -(-size // (LEAF_BYTES << level)) for level in range(PART_LEVEL, BLOCK_LEVEL + 1)]


def block_count(size: int) -> int:
    """How many blocks so many bytes are cut into."""
    return -(-size // BLOCK_BYTES)


def upper_ends(size: int) -> list[int]:
    """0, and where each level of the upper nodes of so many bytes ends, from that of the blocks up."""
    ends, count = [0], block_count(size)
    while count:
        ends.append(ends[-1] + NODE_BYTES * count)
        count = (count + 1) // 2 if count > 1 else 0
    return ends


def tree_bytes(size: int) -> int:
    """How long the upper nodes of so many bytes are."""
    return upper_ends(size)[-1]


def grow(file: BinaryIO, size: int) -> bytes:
    """Write the other upper nodes of `size` bytes behind those of all blocks; the root of the tree."""
    ends = upper_ends(size)
    for start, end in pairwise(ends[:-1]):
        for at in range(start, end, _AT_ONCE):
            file.seek(at)
            nodes = file.read(min(_AT_ONCE, end - at))
            file.seek(0, os.SEEK_END)
            file.write(_above(nodes))
    file.seek(ends[-2])
    return _root(file.read(), size)


def _beside(size: int, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """The nodes of a proof for the bytes from `start` to `end`: (level, index, whether it is on the left)."""
    count, low, high, level = -(-size // LEAF_BYTES), start // LEAF_BYTES, -(-end // LEAF_BYTES), 0
    while count > 1:
        if low % 2:
            yield level, low - 1, True
        if high % 2 and high < count:
            yield level, high, False
        count, low, high, level = (count + 1) // 2, low // 2, (high + 1) // 2, level + 1


def _edges(size: int, start: int, end: int) -> tuple[int, int]:
    """Where the first leaf of a range starts, and the last one ends."""
    return start // LEAF_BYTES * LEAF_BYTES, min(size, -(-end // LEAF_BYTES) * LEAF_BYTES)


def proof_bytes(size: int, start: int, end: int) -> int:
    """How long the proof for some bytes of `size` is: it follows from where they are."""
    first, last = _edges(size, start, end)
    return start - first + last - end + NODE_BYTES * sum(1 for _ in _beside(size, start, end))


def most_proof_bytes(size: int) -> int:
    """The longest proof for any bytes of `size`."""
    return 2 * (LEAF_BYTES - 1) + 2 * NODE_BYTES * (-(-size // LEAF_BYTES) - 1).bit_length()


def holds(root: bytes, size: int, start: int, data: bytes, proof: bytes) -> bool:
    """Whether the tree with this root has `data` from `start` on. `proof`: a stranger's, of any content."""
    end = start + len(data)
    if not 0 <= start < end <= size or len(proof) != proof_bytes(size, start, end):
        return False
    first, last = _edges(size, start, end)
    head, tail = start - first, last - end
    nodes = _leaves(proof[:head] + data + proof[head : head + tail])
    at, level = head + tail, 0
    for beside, _, left in _beside(size, start, end):
        while level < beside:
            nodes, level = _above(nodes), level + 1
        sibling, at = proof[at : at + NODE_BYTES], at + NODE_BYTES
        nodes = sibling + nodes if left else nodes + sibling
    while len(nodes) > NODE_BYTES:
        nodes = _above(nodes)
    return _root(nodes, size) == root


class Tree:
    """The tree over some bytes: what is below the upper nodes is asked for at each proof."""

    def __init__(self, size: int, root: bytes, upper: Read, inside: Inside, read: Read) -> None:
        """`upper`: among the upper nodes, as `grow` leaves them; they are compared with `root` by `block`."""
        self.size, self.root = size, root
        self._upper, self._inside, self._read = upper, inside, read
        self._ends = upper_ends(size)

    @classmethod
    def over(cls, read: Read, size: int) -> Tree:
        """One over bytes that are at hand; what is inside a block is made again when it is asked for."""

        @lru_cache(maxsize=4)
        def inside(block: int) -> list[bytes]:
            return block_levels(read(block * BLOCK_BYTES, min(size, (block + 1) * BLOCK_BYTES)))

        file = io.BytesIO(b"".join(inside(block)[-1] for block in range(block_count(size))))
        root, nodes = grow(file, size), file.getvalue()
        return cls(size, root, lambda start, end: nodes[start:end], inside, read)

    def block(self, number: int) -> bytes:
        """The node of a block.

        Raises:
            ValueError: it, or an upper node beside its way up, is not what the root says.
        """
        found = node = self._upper(NODE_BYTES * number, NODE_BYTES * (number + 1))
        index = number
        for start, end in pairwise(self._ends[:-1]):
            at = start + NODE_BYTES * (index ^ 1)
            if at < end:
                beside = self._upper(at, at + NODE_BYTES)
                node = _node(beside + node if index & 1 else node + beside)
            index >>= 1
        if _root(node, self.size) != self.root:
            raise ValueError(f"the nodes of block {number} do not have the root")
        return found

    def prove(self, start: int, end: int) -> bytes:
        """What `holds` wants to see for the bytes from `start` to `end`."""
        first, last = _edges(self.size, start, end)
        # Of the parts in which a sample begins and ends.
        part_levels = lru_cache(maxsize=2)(self._part_levels)
        nodes = (self._at(level, index, part_levels) for level, index, _ in _beside(self.size, start, end))
        return self._read(first, start) + self._read(end, last) + b"".join(nodes)

    def _at(self, level: int, index: int, part_levels: Callable[[int], list[bytes]]) -> bytes:
        if level >= BLOCK_LEVEL:
            at = self._ends[level - BLOCK_LEVEL] + NODE_BYTES * index
            return self._upper(at, at + NODE_BYTES)
        above = max(level, PART_LEVEL)
        part = index >> (above - level)
        if level == above:
            block, within = divmod(part, 1 << (BLOCK_LEVEL - level))
            return _of(self._inside(block)[level - PART_LEVEL], within)
        return _of(part_levels(part)[level], index - (part << (PART_LEVEL - level)))

    def _part_levels(self, part: int) -> list[bytes]:
        """All levels over the leaves of a part, up to its own node."""
        at = part * PART_BYTES
        return _levels(self._read(at, min(self.size, at + PART_BYTES)), PART_LEVEL)
