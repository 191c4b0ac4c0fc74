"""The tree over a run's tokens: what is proven is there, and nothing else can be."""

from __future__ import annotations

import hashlib
import io
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.merkle import (
    BLOCK_BYTES,
    LEAF_BYTES,
    Tree,
    grow,
    holds,
    most_proof_bytes,
    proof_bytes,
    tree_bytes,
    upper_ends,
)

SIZES = (1, 255, 256, 257, 4095, 4096, 4097, 5 * 4096, 33 * 4096 + 777, 200_000, 2 * BLOCK_BYTES + 5000)


@cache
def bytes_of(size: int) -> bytes:
    return hashlib.shake_128(size.to_bytes(4, "big")).digest(size)


def tree_of(data: bytes) -> Tree:
    return Tree.over(lambda start, end: data[start:end], len(data))


TREES = {size: tree_of(bytes_of(size)) for size in SIZES}


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int]:
    size = draw(st.sampled_from(SIZES))
    start = draw(st.integers(0, size - 1))
    return size, start, draw(st.integers(start + 1, min(size, start + 5000)))


@given(ranges())
def test_what_is_there_is_proven(where: tuple[int, int, int]) -> None:
    size, start, end = where
    data, tree = bytes_of(size), TREES[size]
    proof = tree.prove(start, end)
    assert len(proof) == proof_bytes(size, start, end) <= most_proof_bytes(size)
    assert holds(tree.root, size, start, data[start:end], proof)


@given(ranges(), st.data())
def test_nothing_else_is(where: tuple[int, int, int], dice: st.DataObject) -> None:
    size, start, end = where
    data, tree = bytes_of(size), TREES[size]
    proof, there = tree.prove(start, end), data[start:end]
    at = dice.draw(st.integers(0, len(there) - 1))
    wrong = bytearray(there)
    wrong[at] ^= 1 << dice.draw(st.integers(0, 7))
    assert not holds(tree.root, size, start, bytes(wrong), proof)
    if proof:
        bent = bytearray(proof)
        bent[dice.draw(st.integers(0, len(proof) - 1))] ^= 1
        assert not holds(tree.root, size, start, there, bytes(bent))
    elsewhere = dice.draw(st.integers(-1, size))
    if there != data[elsewhere : elsewhere + len(there)]:
        given_there = proof
        if 0 <= elsewhere <= size - len(there):
            given_there = tree.prove(elsewhere, elsewhere + len(there))
        assert not holds(tree.root, size, elsewhere, there, given_there)


@given(ranges(), st.binary(max_size=3000))
def test_a_made_up_proof_proves_nothing(where: tuple[int, int, int], proof: bytes) -> None:
    size, start, end = where
    assert not holds(TREES[size].root, size, start, bytes(end - start), proof)
    length = proof_bytes(size, start, end)
    assert not holds(TREES[size].root, size, start, bytes(end - start), (proof + bytes(length))[:length])


def test_the_root_covers_the_length_and_where_leaves_and_nodes_are() -> None:
    data = bytes_of(4096)
    whole = TREES[4096]
    top = whole.block(0)
    assert whole.root != top and tree_of(data + b"\0").root != whole.root
    left, right = data[:LEAF_BYTES], data[LEAF_BYTES : 2 * LEAF_BYTES]
    hashed = [hashlib.sha256(b"\0" + half).digest() for half in (left, right)]
    inner = b"\1" + hashed[0] + hashed[1]
    assert tree_of(inner).root != tree_of(left + right).root, "a node is no leaf"
    assert not holds(whole.root, 4097, 0, data[:256], whole.prove(0, 256))
    # RFC 6962 without its root: two leaves.
    two = hashlib.sha256(b"\2swarm tokens" + (512).to_bytes(8, "big") + hashlib.sha256(inner).digest())
    assert tree_of(left + right).root == two.digest()


def test_where_blocks_are_cut_changes_nothing() -> None:
    """The tree over the leaves alone, as it is written down: largest power of two to the left."""

    def top(leaves: list[bytes]) -> bytes:
        if len(leaves) == 1:
            return leaves[0]
        half = 1 << (len(leaves) - 1).bit_length() - 1
        return hashlib.sha256(b"\1" + top(leaves[:half]) + top(leaves[half:])).digest()

    for size in SIZES:
        data = bytes_of(size)
        leaves = [
            hashlib.sha256(b"\0" + data[at : at + LEAF_BYTES]).digest() for at in range(0, size, LEAF_BYTES)
        ]
        root = hashlib.sha256(b"\2swarm tokens" + size.to_bytes(8, "big") + top(leaves)).digest()
        assert TREES[size].root == root


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 11])
def test_a_node_of_a_block_is_believed_with_all_beside_its_way_up(blocks: int) -> None:
    size = blocks * BLOCK_BYTES - 7
    file = io.BytesIO(bytes_of(32 * blocks))
    root, nodes = grow(file, size), bytearray(file.getvalue())
    assert len(nodes) == tree_bytes(size)
    tree = Tree(size, root, lambda start, end: bytes(nodes[start:end]), lambda _: [], lambda *_: b"")
    believed = [tree.block(block) for block in range(blocks)]
    assert b"".join(believed) == bytes_of(32 * blocks)
    for at in range(0, len(nodes), 32):
        nodes[at] ^= 1
        wrong = []
        for block in range(blocks):
            try:
                assert tree.block(block) == believed[block]
            except ValueError:
                wrong.append(block)
        nodes[at] ^= 1
        alone = at + 32 in upper_ends(size)  # the last of its level may be: then it counts a level above
        assert wrong or alone, f"the node at {at} is beside no way up"
        if at < 32 * blocks:
            assert {at // 32, min(at // 32 ^ 1, blocks - 1)} <= set(wrong)


@pytest.mark.parametrize(
    ("size", "sample", "most", "mean"), [(10**9, 2050, 1900, 1000), (10**12, 2050, 2600, 1350)]
)
def test_a_proof_has_some_hundred_bytes(size: int, sample: int, most: int, mean: int) -> None:
    starts = [(size - sample) * i // 997 for i in range(998)]
    lengths = [proof_bytes(size, start, start + sample) for start in starts]
    assert max(lengths) <= most and sum(lengths) / len(lengths) <= mean
    assert proof_bytes(size, size // 2 - 7, size // 2 + sample) <= most
    assert proof_bytes(BLOCK_BYTES, 0, BLOCK_BYTES) == 0
