"""A Merkle tree over the tokens of a run: 32 bytes of the manifest are enough to check a few of them.

The tokens, as the bytes that `data.sha256` is of, are cut into leaves of 256 bytes; the last one may be
shorter. The tree is that of RFC 6962: a node without a sibling goes up as it is. Leaves, nodes and the root
are hashed apart, and the root covers the number of bytes. What is kept of a tree are the nodes of its blocks
of 4 KiB and above, 1.6 % of the tokens; those below are made again from a block when they are needed.

A sample starts and ends inside of leaves. Its proof is what is missing of the first and the last leaf, and
the nodes beside the way up of both: for 1 GB of tokens 1.0 kB on average, for 1 TB 1.3 kB, and at most 2.6 kB
where a sample lies across the middle of so many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

LEAF_BYTES = 256
"""Half as much would save 128 bytes of a proof and cost 32 more for the longer ways, and twice the time."""
BLOCK_LEVEL = 4
BLOCK_BYTES = LEAF_BYTES << BLOCK_LEVEL
NODE_BYTES = 32

Read = Callable[[int, int], bytes]
"""The bytes from a place up to another one, fewer only at the end."""


def _leaf(data: bytes) -> bytes:
    return hashlib.sha256(b"\0" + data).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _root(top: bytes, size: int) -> bytes:
    return hashlib.sha256(b"\2swarm tokens" + size.to_bytes(8, "big") + top).digest()


def _above(nodes: list[bytes]) -> list[bytes]:
    """The level above: pairs joined, a single last one as it is."""
    pairs = [_node(nodes[at], nodes[at + 1]) for at in range(0, len(nodes) - 1, 2)]
    return pairs + nodes[len(nodes) - len(nodes) % 2 :]


def _leaves(data: bytes) -> list[bytes]:
    return [_leaf(data[at : at + LEAF_BYTES]) for at in range(0, len(data), LEAF_BYTES)]


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
    """Whether `data` is what the tree with this root has from `start` on.

    `proof`: from a stranger, of any content.
    """
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
        nodes = [sibling, *nodes] if left else [*nodes, sibling]
    while len(nodes) > 1:
        nodes = _above(nodes)
    return _root(nodes[0], size) == root


class Tree:
    """The tree over some bytes, which are read again for each proof."""

    def __init__(self, read: Read, size: int, told: Callable[[int], object] = lambda _: None) -> None:
        """`told`: of the number of bytes of each block that was read."""
        self._read, self.size = read, size
        nodes = []
        for at in range(0, size, BLOCK_BYTES):
            block = read(at, min(size, at + BLOCK_BYTES))
            nodes.append(self._levels(block)[-1][0])
            told(len(block))
        self._blocks = [nodes]
        """Level by level, from that of the blocks up."""
        while len(self._blocks[-1]) > 1:
            self._blocks.append(_above(self._blocks[-1]))
        self.root = _root(self._blocks[-1][0], size)

    @staticmethod
    def _levels(block: bytes) -> list[list[bytes]]:
        """The nodes of one block, up to its own."""
        levels = [_leaves(block)]
        while len(levels) <= BLOCK_LEVEL:
            levels.append(_above(levels[-1]))
        return levels

    def prove(self, start: int, end: int) -> bytes:
        """What `holds` wants to see for the bytes from `start` to `end`."""
        first, last = _edges(self.size, start, end)
        nodes = (self._at(level, index) for level, index, _ in _beside(self.size, start, end))
        return self._read(first, start) + self._read(end, last) + b"".join(nodes)

    def _at(self, level: int, index: int) -> bytes:
        if level >= BLOCK_LEVEL:
            return self._blocks[level - BLOCK_LEVEL][index]
        block = index >> (BLOCK_LEVEL - level)
        at = block * BLOCK_BYTES
        levels = self._levels(self._read(at, min(self.size, at + BLOCK_BYTES)))
        return levels[level][index - (block << (BLOCK_LEVEL - level))]
