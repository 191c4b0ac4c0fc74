"""Pieces of a cut model: chance, batch norm, shared weights, and what the runtime does with a piece."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional

from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.gpt import replace_parameters
from swarm.model.graph.kernels import KINDS, SeededRandom
from swarm.model.graph.partition import shared_parameters
from swarm.model.graph.stage_module import StageModule
from swarm.model.graph.trace import trace
from swarm.model.same_bits import CACHE_LINE_BYTES
from swarm.model.seeded_random import dropped
from tests.model.graph import zoo
from tests.model.graph.parity import Gradients, cut, gradients, random_cuts, whole

MB = Microbatch(3, 1)
X = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def same(got: Gradients, expected: Gradients) -> None:
    assert torch.equal(got.loss, expected.loss)
    assert set(got.parameters) == set(expected.parameters)
    for name, grad in expected.parameters.items():
        torch.testing.assert_close(got.parameters[name], grad, rtol=1e-9, atol=1e-18)


# --- chance -------------------------------------------------------------------------------------------------


class Drops(nn.Module):
    """Every kind of dropout, two of them in one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.drop, self.whole = nn.Conv2d(4, 4, 1), nn.Dropout(0.3), nn.Dropout2d(0.4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.whole(self.drop(self.conv(x))).flatten(2)
        mask = torch.ones((25, 25), dtype=torch.bool).triu(-3)
        y = functional.scaled_dot_product_attention(y.mT, y.mT, y.mT, mask, 0.2, scale=0.5)
        return functional.dropout(self.drop(y), 0.1).square().sum()

    def by_hand(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        def drop(x: torch.Tensor, p: float, site: str) -> torch.Tensor:
            return dropped(x, site, p=p, seed=seed, mb=MB)

        y = drop(self.conv(x), 0.3, "drop")
        y = y * drop(torch.ones(6, 4, 1, 1, dtype=y.dtype), 0.4, "whole")
        y = y.flatten(2).mT
        scores = (0.5 * (y @ y.mT)).masked_fill(torch.ones(25, 25).tril(-4).bool(), float("-inf"))
        y = drop(scores.softmax(-1), 0.2, "") @ y
        return drop(drop(y, 0.3, "drop#1"), 0.1, "#1").square().sum()


def test_dropout_is_drawn_of_run_microbatch_and_place_and_of_nothing_else() -> None:
    model = Drops().train()
    traced = trace(model, (X,))
    model.by_hand(X, seed=7).backward()
    for assignment in [[0] * len(traced.graph.operators), *random_cuts(traced.graph, 7, seed=1)]:
        pieces = cut(traced, assignment, seed=7)
        for _ in range(2):  # a second time for a replay
            got = gradients(pieces, {"x": X}, MB)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(got.parameters[name], parameter.grad, rtol=1e-9, atol=0)
    other = gradients(cut(traced, assignment, seed=7), {"x": X}, Microbatch(3, 2))
    assert other.loss != got.loss
    assert gradients(cut(traced, assignment, seed=8), {"x": X}, MB).loss != got.loss


def test_dropout_of_everything_and_of_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0), nn.Linear(4, 1), nn.Dropout(0.0))
    x = torch.ones(2, 4)
    traced = trace(model, (x,), loss=torch.sum)
    assert [op.target for op in traced.graph.operators].count("aten.dropout.default") == 1
    got = gradients(cut(traced, [0, 0, 1, 1], seed=0), {"input": x}, MB)
    bias = model.get_parameter("2.bias").detach()
    torch.testing.assert_close(got.loss, 2 * bias.sum())
    assert not got.parameters["0.weight"].any()
    assert "aten.dropout.default" not in {
        op.target for op in trace(model.eval(), (x,), loss=torch.sum).graph.operators
    }


class Draws(nn.Module):
    """Random numbers of each kind, made and written in place, also through a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.drop = nn.Linear(5, 5), nn.Linear(5, 5), nn.Dropout(0.3, inplace=True)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        path = x.new_empty((6, 1, 1, 1)).bernoulli_(0.8).div_(0.8)  # stochastic depth, as timm has it
        y = self.one(x) * path
        kept = (0.7 + torch.rand((6, 1, 1, 1), dtype=x.dtype)).floor_()  # and as BEiT has it
        y = self.two(y.div(0.7) * kept) + torch.randn_like(y) * x
        y = y * torch.bernoulli(x.sigmoid()) + torch.normal(1.0, 2.0, (5,), dtype=x.dtype)
        y = y * torch.randint(2, 9, (4, 1, 1)) + torch.empty(5, dtype=x.dtype).uniform_(-1.0, 3.0)
        y = y / (1.0 + torch.empty(5, dtype=x.dtype).exponential_(2.0))
        y[1:3].normal_(0.0, 0.1)
        self.drop(y.view(6, -1))
        y = functional.dropout2d(y, 0.4, True, True)
        return (y.square() + torch.randint_like(x, 9) * torch.randint_like(y, 2, 5)).sum()

    def by_hand(self, x: torch.Tensor, chance: SeededRandom) -> torch.Tensor:
        def drawn(kind: str, number: int, *others: object, shape: tuple[int, ...] = (5,)) -> torch.Tensor:
            site = f"#{number}" if number else ""
            return KINDS[kind](chance, torch.empty(shape, dtype=x.dtype), *others, site=site)

        rows = (6, 1, 1, 1)
        y = self.one(x) * drawn("bernoulli", 0, 0.8, shape=rows) / 0.8
        kept = (0.7 + drawn("uniform", 1, shape=rows)).floor()
        y = self.two(y / 0.7 * kept) + drawn("normal", 2, shape=x.shape) * x
        y = y * drawn("bernoulli", 3, x.sigmoid(), shape=x.shape) + drawn("normal", 4, 1.0, 2.0)
        y = y * drawn("integers", 5, 2, 9, shape=(4, 1, 1)) + drawn("uniform", 6, -1.0, 3.0)
        y = y / (1.0 + drawn("exponential", 7, 2.0))
        y = torch.cat([y[:1], drawn("normal", 8, 0.0, 0.1, shape=(2, 4, 5, 5)), y[3:]])
        y = chance.drop(y, 0.3, "drop")
        y = y * chance.drop(torch.ones(6, 4, 1, 1, dtype=y.dtype), 0.4, "#9")
        whole = drawn("integers", 10, 0, 9, shape=x.shape) * drawn("integers", 11, 2, 5, shape=x.shape)
        return (y.square() + whole).sum()


def test_random_numbers_are_drawn_of_run_microbatch_and_place_and_of_nothing_else() -> None:
    model = Draws().train()
    traced = trace(model, (X,))
    expected = model.by_hand(X, SeededRandom(7, MB))
    expected.backward()
    every = range(len(traced.graph.operators))
    for assignment in [[0] * len(every), every, *random_cuts(traced.graph, 7, seed=1)]:
        pieces = cut(traced, assignment, seed=7)
        for _ in range(2):
            got = gradients(pieces, {"x": X}, MB)
            torch.testing.assert_close(got.loss, expected.detach(), rtol=1e-12, atol=0)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(got.parameters[name], parameter.grad, rtol=1e-12, atol=1e-12)
    assert gradients(cut(traced, assignment, seed=7), {"x": X}, Microbatch(3, 2)).loss != got.loss
    assert gradients(cut(traced, assignment, seed=8), {"x": X}, MB).loss != got.loss


class Fills(nn.Module):
    """Makes room first, and writes to it later."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = torch.empty_like(x), x.new_empty(2, 5), torch.empty(3, 5, dtype=x.dtype)
        one.copy_(x * self.weight)
        two[0], two[1] = 2.0, x[0, 0, 0] * self.weight
        return (one.sum() + two.sum() + three.normal_().square().sum()) * self.weight.sum()


def test_room_that_is_yet_to_be_written_to_is_zeros_when_a_cut_comes_before() -> None:
    traced = trace(Fills(), (X,))
    operators = range(len(traced.graph.operators))
    torch.use_deterministic_algorithms(True)  # torch fills such room with what is no number then
    try:
        for end in operators[1:]:
            piece = cut(traced, [int(number >= end) for number in operators], seed=7)[0]
            assert all(value.isfinite().all() for value in piece(*[X] * len(piece.plan.inputs), mb=MB).values)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_evaluation_draws_the_same_each_time_and_drops_no_path() -> None:
    model = Draws().train()
    traced = trace(model, (X,))
    pieces = cut(traced, [0] * len(traced.graph.operators), seed=7)
    first, second = (pieces[0](X, mb=None).values[0] for _ in range(2))
    torch.testing.assert_close(first, model.by_hand(X, SeededRandom(7, None)), rtol=1e-12, atol=0)
    assert torch.equal(first, second)
    form = torch.empty(9)
    assert bool((KINDS["bernoulli"](SeededRandom(7, None), form, 0.8, site="") == 0.8).all())


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"dropout", "feature_dropout"}))
def test_a_single_number_is_drawn_as_the_first_of_a_row_of_one(kind: str) -> None:
    others = {"bernoulli": (0.5,), "integers": (0, 1000)}.get(kind, ())
    row = KINDS[kind](SeededRandom(7, MB), torch.empty(1), *others, site=kind)
    assert torch.equal(KINDS[kind](SeededRandom(7, MB), torch.empty(()), *others, site=kind), row[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_drawn_is_distributed_as_asked(dtype: torch.dtype) -> None:
    form = torch.empty((400, 500), dtype=dtype)

    def drawn(kind: str, *others: object) -> torch.Tensor:
        found = KINDS[kind](SeededRandom(7, MB), form, *others, site=kind)
        assert found.dtype == dtype and found.shape == form.shape
        return found.double()

    even = drawn("uniform")
    assert 0.0 <= even.min() < 0.01 and 0.99 < even.max() < 1.0
    assert even.mean().item() == pytest.approx(0.5, abs=4e-3)
    assert even.var().item() == pytest.approx(1 / 12, abs=1e-3)
    bell = drawn("normal", 1.0, 2.0)
    assert bell.mean().item() == pytest.approx(1.0, abs=0.02) and bell.std().item() == pytest.approx(
        2, abs=0.02
    )
    assert ((bell - 1.0).abs() < 4.0).double().mean().item() == pytest.approx(0.9545, abs=3e-3)
    assert ((bell - 1.0).abs() > 6.0).double().mean().item() == pytest.approx(0.0027, abs=1e-3)
    late = drawn("exponential", 2.0)
    assert late.min() > 0.0 and late.mean().item() == pytest.approx(0.5, abs=5e-3)
    assert (late > 1.0).double().mean().item() == pytest.approx(math.exp(-2.0), abs=3e-3)
    assert drawn("bernoulli", 0.3).mean().item() == pytest.approx(0.3, abs=4e-3)
    assert drawn("bernoulli", 1.0).all() and not drawn("bernoulli", 0.0).any()
    whole = drawn("integers", -2, 3)
    assert whole.unique().tolist() == [-2.0, -1.0, 0.0, 1.0, 2.0]
    assert torch.bincount((whole + 2).long().flatten()).double().std().item() < 500
    # The same numbers in another precision, and no two places alike.
    wide = KINDS["normal"](SeededRandom(7, MB), form.double(), 1.0, 2.0, site="normal")
    torch.testing.assert_close(bell, wide.to(dtype).double(), rtol=0, atol=0)
    assert drawn("uniform").flatten()[:1000].unique().numel() > 100


# --- batch norm ---------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A batch norm with a momentum of its own, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.one = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=0.3)
        self.two, self.free = nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.one(self.conv(x)).relu())
        return self.free(self.two(y.exp())).square().mean(0).sum().exp()


def test_the_statistics_of_a_step_are_the_mean_over_its_microbatches() -> None:
    model = Normed().train()
    parts = X.split(2)
    traced = trace(model, (parts[0],))
    with torch.no_grad():
        seen = {"one": [], "two": []}
        for x in parts:
            y = model.conv(x)
            seen["one"].append(y)
            y = functional.batch_norm(y, None, None, model.one.weight, model.one.bias, True).relu()
            seen["two"].append(y)
            y = functional.batch_norm(y, None, None, model.two.weight, model.two.bias, True).exp()
            seen["two"].append(y)
    for assignment in random_cuts(traced.graph, 5, seed=2):
        pieces = cut(traced, assignment, seed=0)
        results = [gradients(pieces, {"x": x}, Microbatch(0, m)) for m, x in enumerate(parts)]
        assert set(results[0].statistics) == {
            "one.running_mean", "one.running_var", "two.running_mean", "two.running_var"
        }  # fmt: skip
        means = {
            name: sum(result.statistics[name] for result in results) / len(parts)
            for name in results[0].statistics
        }
        for name, mean in means.items():
            layer = name[:3]
            if name.endswith("mean"):
                now = torch.stack([y.mean((0, 2, 3)) for y in seen[layer]]).mean(0)
            else:
                now = torch.stack([y.var((0, 2, 3)) for y in seen[layer]]).mean(0)
            torch.testing.assert_close(mean, now, rtol=1e-9, atol=1e-12)
    told = {told.buffer: told.momentum for found in traced.statistics.values() for told in found}
    assert {name[:3]: momentum for name, momentum in told.items()} == {"one": 0.3, "two": 0.1}
    assert model.one.num_batches_tracked == 0, "stages do not touch the model"


def test_one_microbatch_of_one_step_gives_torchs_own_statistics() -> None:
    one = whole("resnet")
    model = zoo.resnet()[0].double().train()
    model.load_state_dict(one.traced.parameters, strict=False)
    pieces = cut(one.traced, next(random_cuts(one.traced.graph, 1, seed=3)), seed=0)
    means = gradients(pieces, one.inputs, MB).statistics
    model(**one.inputs)
    buffers = dict(model.named_buffers())
    for name, mean in means.items():
        old = float(name.endswith("var"))
        torch.testing.assert_close(0.9 * old + 0.1 * mean, buffers[name], rtol=1e-9, atol=1e-15)
    assert means.keys() == {name for name in buffers if not name.endswith("num_batches_tracked")}


def test_batch_norm_in_evaluation_reads_its_buffers_and_changes_nothing() -> None:
    model = Normed().eval()
    traced = trace(model, (X,))
    (piece,) = cut(traced, [0] * len(traced.graph.operators), seed=0)
    (loss,), statistics = piece(X, mb=MB)
    assert not statistics
    torch.testing.assert_close(loss, model(X))


# --- shared weights -----------------------------------------------------------------------------------------


def test_a_tied_weight_is_on_each_stage_that_reads_it_and_gradients_are_summed() -> None:
    one = whole("gpt2")
    graph = one.traced.graph
    assert graph.tied == (("tokens.weight", "head.weight"),)
    half = [2 * i // len(graph.operators) for i in range(len(graph.operators))]
    pieces = cut(one.traced, half, seed=0)
    assert shared_parameters([piece.plan for piece in pieces]) == {"tokens.weight": (0, 1)}
    own = [dict(piece.named_parameters())["tokens.weight"] for piece in pieces]
    got = gradients(pieces, one.inputs, MB).parameters["tokens.weight"]
    assert all(parameter.grad is None for parameter in own)
    torch.testing.assert_close(got, one.gradients["tokens.weight"], rtol=1e-9, atol=0)


# --- what the runtime does with a piece ---------------------------------------------------------------------


def flat_copy(piece: StageModule, values: Mapping[str, torch.Tensor]) -> tuple[StageModule, torch.Tensor]:
    """A deep copy whose parameters are views of one vector, as a stage makes it."""
    twin = copy.deepcopy(piece)
    flat = torch.cat([values[name].detach().flatten() for name, _ in twin.named_parameters()])
    ends = iter(flat.split([p.numel() for p in twin.parameters()]))
    replace_parameters(twin, lambda _, old: next(ends).view(old.shape))
    return twin, flat


def test_a_piece_can_be_copied_and_its_weights_laid_in_one_vector() -> None:
    one = whole("llama")
    pieces = cut(one.traced, next(random_cuts(one.traced.graph, 1, seed=4)), seed=0)
    doubled = {name: 2 * p for name, p in one.traced.parameters.items()}
    twins, vectors = zip(*(flat_copy(piece, doubled) for piece in pieces), strict=True)
    same(gradients(pieces, one.inputs, MB), gradients(pieces, one.inputs, MB))
    changed = gradients(list(twins), one.inputs, MB)
    assert changed.loss != one.loss
    for flat in vectors:
        flat.mul_(0.5)
    same(gradients(list(twins), one.inputs, MB), gradients(pieces, one.inputs, MB))


def test_names_of_parameters_are_the_models() -> None:
    one = whole("resnet")
    pieces = cut(one.traced, next(random_cuts(one.traced.graph, 1, seed=5)), seed=0)
    names = [name for piece in pieces for name, _ in piece.named_parameters()]
    assert sorted(names) == sorted(one.traced.parameters)


def test_tables_that_the_model_keeps_out_of_autocast_stay_exact_in_a_bfloat16_run() -> None:
    model, sample = zoo.llama()
    traced = trace(model.train(), sample)
    (piece,) = cut(traced, [0] * len(traced.graph.operators), seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (loss,), _ = piece(*sample, mb=MB)
        expected = model(*sample)
    assert torch.equal(loss, expected)
    assert {call.plain for call in traced.calls} == {True, False}


class Shifted(nn.Linear):
    """Has a buffer that lies where numpy may put one: on no cache line."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("by", torch.arange(8.0)[4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * self.by).sum()


def test_a_buffer_begins_on_a_cache_line_wherever_the_code_has_put_it() -> None:
    (stage,) = cut(trace(Shifted(), (torch.ones(2, 4),)), [0] * 3, seed=0)
    by = stage.get_buffer("by")
    assert by.data_ptr() % CACHE_LINE_BYTES == 0 and by.tolist() == [4.0, 5.0, 6.0, 7.0]


def test_a_model_whose_part_is_called_as_one_of_a_stage_is_refused() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plan = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.plan(x).sum()

    traced = trace(Clash(), (torch.ones(2, 4),))
    with pytest.raises(SetupError, match="the model has a part called 'plan', as a stage has: rename it"):
        cut(traced, [0, 0], seed=0)


@pytest.mark.parametrize("name", ["plan", "_held"])
def test_nor_may_a_weight_be_called_so(name: str) -> None:
    class Clash(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * getattr(self, name)).sum()

    model = Clash()
    model.register_parameter(name, nn.Parameter(torch.ones(4)))
    traced = trace(model, (torch.ones(2, 4),))
    with pytest.raises(SetupError, match=f"the model has a part called '{name}', as a stage has: rename it"):
        cut(traced, [0] * len(traced.graph.operators), seed=0)


def test_a_model_may_take_nothing() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self) -> torch.Tensor:
            return self.linear.weight.square().sum()

    model = Alone()
    traced = trace(model, ())
    (piece,) = cut(traced, [0] * len(traced.graph.operators), seed=0)
    ((loss,), _) = piece(mb=Microbatch(0, 0))
    assert torch.equal(loss, model())
