"""A cut model computes what the whole one computes: loss and every gradient, in float64, in any cut."""

from __future__ import annotations

import pytest

from tests.model.graph.parity import check_parity, whole
from tests.seeds import some


@pytest.mark.parametrize(
    ("name", "count"),
    some(
        [("resnet101", 7), ("resnet", 7), ("gpt2", 14), ("llama", 7), ("unet", 14), ("encoder_decoder", 7)],
        quick=[("resnet", 7), ("gpt2", 14), ("llama", 7)],
    ),
)
def test_every_gradient_is_that_of_one_process(name: str, count: int) -> None:
    check_parity(whole(name), count)
