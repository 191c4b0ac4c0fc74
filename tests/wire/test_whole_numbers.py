"""Exact sums on their way: nothing is lost, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarm.errors import Refused
from swarm.wire.whole_numbers import BLOCK, most_bytes, pack, unpack

EDGES = [sign * (1 << bits) + off for bits in range(63) for sign in (1, -1) for off in (-1, 0, 1)]


@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
@pytest.mark.parametrize("bits", [0, 1, 7, 8, 15, 16, 23, 24, 31, 32, 33, 39, 40, 41, 47, 48, 55, 63])
def test_what_was_packed_is_unpacked(numel: int, bits: int) -> None:
    dice = np.random.default_rng(1000 * bits + numel)
    most = (1 << bits) - 1
    values = torch.from_numpy(dice.integers(-most - 1, most, numel, endpoint=True))
    buffers = pack(values)
    sizes = [len(buffer) for buffer in buffers]
    assert sizes[0] == most_bytes(numel)[0] and sizes[1] <= most_bytes(numel)[1]
    assert torch.equal(unpack(buffers, numel), values)


def test_each_edge_of_a_width_beside_each_other() -> None:
    values = torch.tensor([*EDGES, 2**63 - 1, -(2**63)])
    for value in values:
        block = torch.zeros(BLOCK, dtype=torch.int64)
        block[7] = value
        assert torch.equal(unpack(pack(block), BLOCK), block)
    assert torch.equal(unpack(pack(values), len(values)), values)


@pytest.mark.parametrize(
    ("value", "width"),
    [
        *(
            (0, 0),
            (-1, 1),
            (127, 1),
            (-128, 1),
            (128, 2),
            (-129, 2),
            (2**15 - 1, 2),
            (-(2**15), 2),
            (2**15, 3),
            (-(2**23), 3),
            (2**23, 4),
        ),
        *((2**31 - 1, 4), (2**31, 5), (-(2**39), 5), (2**39, 6), (-(2**47), 6), (2**47, 8)),
    ],
)
def test_a_block_has_as_many_bytes_as_its_largest_needs(value: int, width: int) -> None:
    widths, data = pack(torch.tensor([3 if value else 0] * (BLOCK - 1) + [value]))
    assert bytes(widths) == bytes([width]) and len(data) == width * BLOCK


def test_other_bytes_are_refused() -> None:
    values = torch.arange(300) << 20
    widths, data = map(bytes, pack(values))
    for wrong, said in (
        ([data], "came in 1 buffers"),
        ([widths[:1], data], "has other blocks than 300 numbers"),
        ([bytes([7, widths[1]]), data], "has other blocks than 300 numbers"),
        ([widths, data[:-1]], "came in"),
        ([bytes([8, 8]), data], "came in"),
        ([widths, b"\xff" * len(data)], "numbers behind its last one"),
    ):
        with pytest.raises(Refused, match=said):
            unpack(wrong, 300)
