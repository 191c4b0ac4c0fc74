"""One name for one codec."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.codecs import PACKED, PPM, VALUES, Codec, packed_part, parse_codec


@given(keep_ppm=st.integers(1, PPM), values=st.sampled_from(VALUES))
def test_every_codec_has_one_name(keep_ppm: int, values: str) -> None:
    codec = Codec(keep_ppm, values)
    assert parse_codec(codec.name) == codec


@pytest.mark.parametrize(
    ("name", "values"), [("bf16", "bf16"), ("topk:0.05", "none"), ("topk:0.05+blockwise8", "blockwise8")]
)
def test_what_slow_lines_carry_is_known_of_the_values_that_a_codec_sends(name: str, values: str) -> None:
    assert packed_part(name) == PACKED[values] and set(PACKED) == set(VALUES)


@given(st.text(alphabet="topk:0.123+bf16none", max_size=20))
def test_what_is_read_as_a_codec_is_its_name(name: str) -> None:
    codec = parse_codec(name)
    assert codec is None or codec.name == name


@pytest.mark.parametrize(
    "name",
    [
        "", "zip", "topk", "topk:", "topk:1", "topk:0", "topk:0.0", "topk:0.50", "topk:.5", "topk:5e-2",
        "topk:0.0000001", "topk:0.05+none", "topk:0.05+topk:0.5", "topk:0.05+", "topk:-0.05", "topk:0.0٥",
        "none ", "bf16+bf16", "topk:0.05\n",
    ],
)  # fmt: skip
def test_other_names_are_no_codecs(name: str) -> None:
    assert parse_codec(name) is None
