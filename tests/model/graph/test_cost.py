"""What operators take, by the kernels that they come to: products, views, lookups, backwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from peers.programs.graph import timed_s
from swarm.model.graph.cost import BYTE_S, CALL_S, OPERATION_S, operations, reckoned_s
from swarm.model.graph.trace import trace
from tests.model.graph.parity import whole
from tests.seeds import some


class Lookup(nn.Module):
    """A row of a table that is not trained, and a product."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 64)
        self.table.requires_grad_(False)
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, tokens_B: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens_B)).view(-1, 4).sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x_BNTD: torch.Tensor) -> torch.Tensor:
        x_BNTD = x_BNTD * self.scale
        return nn.functional.scaled_dot_product_attention(x_BNTD, x_BNTD, x_BNTD).sum()


def costs(model: nn.Module, *sample: torch.Tensor) -> dict[str, float]:
    traced = trace(model.train(), sample)
    by_name = zip(traced.graph.operators, reckoned_s(traced), strict=True)
    return {op.target.split(".")[1]: seconds for op, seconds in by_name}


def test_a_product_costs_its_operations_and_bytes_forward_and_backward() -> None:
    found = costs(Lookup(10), torch.zeros(8, dtype=torch.int64))
    # Backward only for the weight: what comes in needs no gradient. Both are products of the same sizes.
    operations, nbytes = 2 * 8 * 64 * 32, 4 * (8 * 64 + 64 * 32 + 8 * 32)
    assert found["linear"] == pytest.approx(2 * (CALL_S + OPERATION_S * operations + BYTE_S * nbytes))


def test_a_view_costs_nothing_and_a_lookup_reads_no_more_than_it_gives() -> None:
    few, many = (costs(Lookup(rows), torch.zeros(8, dtype=torch.int64)) for rows in (10, 100_000))
    assert few["view"] == 0 and few["embedding"] == many["embedding"] > 0


def test_attention_costs_the_operations_of_its_scores() -> None:
    found = costs(Attention(), torch.ones(2, 3, 128, 16))
    scores = 2 * 2 * 3 * 128 * 128 * 16
    # Two products forward, five backward: the scores are computed once more.
    assert found["scaled_dot_product_attention"] > OPERATION_S * 7 * scores
    traced = trace(Attention().train(), (torch.ones(2, 3, 128, 16),))
    assert sum(operations(traced)) == 7 * scores


@pytest.mark.parametrize(
    "name", some(["resnet", "gpt2", "llama", "unet", "encoder_decoder"], quick=["llama"])
)
def test_each_operator_of_a_model_can_be_reckoned_and_timed(name: str) -> None:
    traced = whole(name).traced
    reckoned, timed = reckoned_s(traced), timed_s(traced)
    assert len(reckoned) == len(timed) == len(traced.graph.operators)
    assert min(reckoned) >= 0 and sum(reckoned) > 0 and min(timed) > 0
