"""A cut model computes what the whole one computes: loss and every gradient, in float64, in any cut."""

from __future__ import annotations

import pytest

from tests.model.graph.parity import check_parity, whole


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("resnet101", 7, marks=pytest.mark.further),
        ("resnet", 7),
        ("gpt2", 14),
        ("llama", 7),
        pytest.param("unet", 14, marks=pytest.mark.further),
        pytest.param("encoder_decoder", 7, marks=pytest.mark.further),
    ],
)
def test_every_gradient_is_that_of_one_process(name: str, count: int) -> None:
    check_parity(whole(name), count)
