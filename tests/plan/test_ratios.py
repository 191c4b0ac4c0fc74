"""AdaTopK: the slowest boundary is compressed most, fast ones not at all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.codecs import PPM, parse_codec
from swarm.errors import SetupError
from swarm.manifest import CodecSpec
from swarm.plan.network import Device, Network
from swarm.plan.topk_ratios import boundary_bandwidths, boundary_codecs
from swarm.wire.tensor_meta import TensorMeta, encoded_sizes

SHAPE = (4, 512, 512)
MBPS = 1e6


def bytes_of(boundary: int, codec: str) -> tuple[float, float]:
    """As the wire has them, places included."""
    back = CodecSpec.symmetric(codec).backward_at(boundary, codec)
    forward, backward = (sum(encoded_sizes(TensorMeta(SHAPE, "float32", name))) for name in (codec, back))
    return float(forward), float(backward)


def planned(bandwidths_bps: list[float], base: str = "blockwise8", **options: Any) -> tuple[str, ...]:
    both = [(bps, bps) for bps in bandwidths_bps]
    given: dict[str, Any] = {"least": 0.01, **options}
    return boundary_codecs(lambda b, _: both[b], bytes_of, [base] * len(both), **given)


def seconds(codec: str, bps: float) -> float:
    return 8 * max(bytes_of(0, codec)) / bps


def part(codec: str) -> int:
    known = parse_codec(codec)
    assert known is not None
    return known.keep_ppm


def test_fast_boundaries_keep_their_codec_and_the_slowest_keeps_the_least() -> None:
    codecs = planned([1000 * MBPS, 8 * MBPS, 100 * MBPS, 500 * MBPS])
    assert codecs == ("blockwise8", "topk:0.01+blockwise8", "topk:0.193+blockwise8", "blockwise8")
    assert seconds(codecs[2], 100 * MBPS) == pytest.approx(seconds(codecs[1], 8 * MBPS), rel=0.02)


@pytest.mark.parametrize("base", ["none", "bf16", "blockwise8"])
@given(mbps=st.lists(st.floats(0.1, 1e5), min_size=1, max_size=6), least=st.floats(0.001, 0.9))
def test_no_boundary_takes_longer_than_the_slowest_must_and_none_is_compressed_more_than_it(
    base: str, mbps: list[float], least: float
) -> None:
    bps = [each * MBPS for each in mbps]
    codecs = planned(bps, base, least=least)
    smallest = f"topk:{round(least, 6):f}".rstrip("0") + "+blockwise8"
    limit_s = max(min(seconds(base, each), seconds(smallest, each)) for each in bps)
    for codec, each in zip(codecs, bps, strict=True):
        assert seconds(codec, each) <= limit_s
        assert (codec == base) == (seconds(base, each) <= limit_s), "what is fast enough stays bit for bit"
        if codec != base:
            assert part(codec) >= part(smallest)
            wider = part(codec) + 0.01 * part(codec) + 1
            more = f"topk:{wider / PPM:.6f}".rstrip("0") + "+blockwise8"
            assert wider >= PPM or seconds(more, each) > 0.999 * limit_s, "and what is slow keeps what it can"
    order = sorted(range(len(bps)), key=lambda i: bps[i])
    assert [part(codecs[i]) for i in order] == sorted(part(codec) for codec in codecs)


def test_what_hides_behind_the_computation_is_not_compressed() -> None:
    needed_s = seconds("blockwise8", 8 * MBPS)
    assert planned([8 * MBPS, 50 * MBPS], enough_s=needed_s) == ("blockwise8", "blockwise8")
    some, none = planned([8 * MBPS, 50 * MBPS], enough_s=needed_s / 2)
    assert part("topk:0.01+blockwise8") < part(some) < PPM and none == "blockwise8"
    assert seconds(some, 8 * MBPS) <= needed_s / 2


def test_all_numbers_in_fewer_bits_go_before_a_part_of_them() -> None:
    needed_s = seconds("none", 50 * MBPS)
    for fewer, codec in ((1.01, "bf16"), (2.01, "blockwise8"), (4.0, "hadamard4")):
        assert planned([50 * MBPS], "none", enough_s=needed_s / fewer) == (codec,)
    (some,) = planned([50 * MBPS], "none", enough_s=needed_s / 8)
    assert part("topk:0.2+blockwise8") < part(some) < PPM


def test_the_slower_direction_counts() -> None:
    for slow in ((8 * MBPS, 1000 * MBPS), (1000 * MBPS, 8 * MBPS)):
        both = (slow, (9e9, 9e9))
        found = boundary_codecs(lambda b, _, both=both: both[b], bytes_of, ["none"] * 2, least=0.02)
        assert found == ("topk:0.02+blockwise8", "none")


def test_a_manifest_takes_what_was_planned() -> None:
    codecs = planned([8 * MBPS, 70 * MBPS])
    assert CodecSpec(forward=codecs, backward="blockwise8").forward_at(1) == codecs[1]


@pytest.mark.parametrize("least", [0.0, 1e-9, math.nan])
def test_a_part_that_cannot_be_kept_is_refused(least: float) -> None:
    with pytest.raises(SetupError, match=f"a part of {least} cannot be kept: it must be above 0 and below 1"):
        planned([1e6], least=least)


# --- of a plan ----------------------------------------------------------------------------------------------


def test_the_bandwidth_of_a_boundary_is_the_mean_over_who_may_meet_there() -> None:
    def device(name: str, region: int, up_mbps: float) -> Device:
        return Device(name, region, 1e12, 1e10, upload_bps=up_mbps * MBPS, download_bps=1000 * MBPS)

    network = Network(
        (device("a", 0, 100), device("b", 1, 10), device("c", 1, 1000), device("idle", 0, 1)),
        ("here", "there"),
        np.zeros((2, 2)),
        np.array([[math.inf, 20 * MBPS], [20 * MBPS, math.inf]]),
    )
    (only,) = boundary_bandwidths(network, [0, 1, 1, -1], 2)
    assert only == pytest.approx((20 * MBPS, 2 / (1 / 10 + 1 / 20) * MBPS))
    (two,) = boundary_bandwidths(network, [0, 0, 1, 1], 2)
    assert two[0] == pytest.approx(2 * 4 / (1 / 20 + 1 / 100 + 1 / 10 + 1 / 10) * MBPS), "two at a time"
    inner, last = boundary_bandwidths(network, [2, 1, 0, -1], 3)
    assert inner == pytest.approx((500 * MBPS, 5 * MBPS)), "b's own line, up and down, is that of two"
    assert last == pytest.approx((5 * MBPS, 20 * MBPS))
    (packed,) = boundary_bandwidths(network, [0, 1, 1, -1], 2, packed_part=0.8)
    assert packed == pytest.approx((only[0] / 0.8, only[1] / 0.8))
