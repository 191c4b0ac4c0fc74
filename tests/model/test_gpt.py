"""The model and its cut into stages."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.bench.common.model_sizes import parameter_count
from swarm.ids import Microbatch
from swarm.manifest import PRESETS, ModelSpec, demo_run
from swarm.model.evaluate import given_decoder, with_weights
from swarm.model.gpt import (
    Widen,
    _rotate,
    _rotations,
    layer_flops,
    layer_split,
    stage_skeleton,
)
from swarm.model.layout import shared_terms
from swarm.model.seeded_random import dropped, initial_normal, seed_of
from swarm.model.stage_io import boundary_bytes
from tests.model.chain import build_stage, tiny_run


@given(
    layers=st.integers(1, 40),
    stages=st.integers(1, 12),
    vocab=st.sampled_from([256, 5000, 50_257]),
    hidden=st.sampled_from([32, 256, 1024]),
)
@settings(max_examples=60)
def test_the_layers_are_cut_into_stages_in_order_with_nothing_left_out(
    layers: int, stages: int, vocab: int, hidden: int
) -> None:
    stages = min(stages, layers)
    run = demo_run(stages=1)
    model = replace(
        run.model, layers=layers, stages=stages, vocab_size=vocab, hidden=hidden, ffn_hidden=4 * hidden
    )
    run = replace(run, model=model)
    split = layer_split(run)
    assert [i for part in split for i in part] == list(range(layers))
    assert len(split) == stages and all(len(part) >= 1 for part in split)
    block, head = layer_flops(model, run.data.sequence_length)
    costs = [len(part) * block for part in split]
    costs[-1] += head
    # No stage could be relieved by a neighbour: that one would then be as dear.
    for dear in range(stages):
        for neighbour in {dear - 1, dear + 1} & set(range(stages)):
            if len(split[dear]) > 1 and costs[dear] == max(costs):
                assert costs[neighbour] + block >= costs[dear]


def test_the_head_counts_as_the_layers_it_is_worth() -> None:
    """GPT-2's head is worth 5 of its layers: on two stages the last has 5 layers fewer, or 6."""
    run = demo_run(stages=2)
    run = replace(
        run, model=ModelSpec(**PRESETS["gpt2"], stages=2), data=replace(run.data, sequence_length=1024)
    )
    first, last = layer_split(run)
    assert (len(first), len(last)) == (9, 3) or (len(first), len(last)) == (8, 4)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"norm": "layernorm", "positions": "learned"},
        {"mlp": "swiglu", "kv_heads": 2},
        {"mlp": "swiglu", "kv_heads": 1, "qk_norm": True},
    ],
)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_split_has_the_same_weights_under_the_same_names(model: dict[str, Any], stages: int) -> None:
    def weights(stages: int) -> dict[str, torch.Tensor]:
        run = tiny_run(model={**model, "stages": stages})
        parts = [dict(build_stage(run, stage).named_parameters()) for stage in range(stages)]
        names = [name for part in parts for name in part]
        assert len(names) == len(set(names))
        return {name: p.detach() for part in parts for name, p in part.items()}

    whole, cut = weights(1), weights(stages)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    run = tiny_run(model=model)
    expected = parameter_count(run.model, sequence_length=run.data.sequence_length)
    assert sum(w.numel() for w in whole.values()) == expected


def test_a_tied_head_is_the_matrix_of_the_embedding_on_the_first_and_the_last_stage() -> None:
    run = tiny_run(model={"head": "tied", "mlp": "swiglu"})
    first, middle, last = (dict(build_stage(run, stage).named_parameters()) for stage in range(3))
    assert torch.equal(first["tokens.weight"], last["tokens.weight"]) and "tokens.weight" not in middle
    names = {2: ("tokens.weight",)}, {}, {0: ("tokens.weight",)}
    assert tuple(shared_terms(run, stage) for stage in range(3)) == names
    assert sum(w.numel() for w in {**first, **middle, **last}.values()) == parameter_count(run.built_in)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_crosses_a_bottleneck_is_narrow_and_of_all_stages_comes_one_decoder(dtype: str) -> None:
    run = tiny_run(model={"bottleneck": 4}, dtype=dtype)
    weights = {name: w.detach() for s in range(3) for name, w in build_stage(run, s).named_parameters()}
    assert sum(w.numel() for w in weights.values()) == parameter_count(run.built_in)
    stages = [
        with_weights(run, stage_skeleton(run, stage), weights, torch.device("cpu")) for stage in range(3)
    ]
    ids_BT = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    x = ids_BT
    with torch.no_grad():
        for stage, takes in zip(stages, [(2, 9), (2, 9, 4), (2, 9, 4)], strict=True):
            assert x.shape == takes
            x = stage(x, ids_BT=ids_BT)
        assert torch.equal(given_decoder(run, weights, torch.device("cpu"))(ids_BT), x)
        # What the tokens are is known behind a cut, whatever crosses it.
        other_BT = ids_BT.roll(1, 0)
        nothing = torch.zeros(2, 9, 4)
        assert not torch.equal(stages[2](nothing, ids_BT=ids_BT), stages[2](nothing, ids_BT=other_BT))


@pytest.mark.parametrize("eos", [False, True])
def test_behind_a_bottleneck_a_token_sees_those_just_before_it_of_its_document(eos: bool) -> None:
    run = tiny_run(model={"bottleneck": 4}, data={"eos": 7, "document_mask": True} if eos else {})
    widen = Widen(run.built_in)
    for weight in widen.parameters():
        weight.data = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1))
    ids_BT = torch.tensor([[1, 2, 7, 3, 4, 5, 6, 8]])

    def told(ids_BT: torch.Tensor) -> torch.Tensor:
        return widen(torch.zeros(*ids_BT.shape, 4), ids_BT, run.data.eos if eos else None)

    with torch.no_grad():
        for place in range(8):
            other_BT = ids_BT.clone()
            other_BT[0, place] = 7 if place == 2 else 9  # the end of the document stays
            seen = (told(other_BT) != told(ids_BT)).any(-1)[0].nonzero().flatten().tolist()
            last = 2 if eos and place <= 2 else 7
            assert seen == ([] if place == 2 else [*range(place, min(place + 3, last) + 1)])
        torch.testing.assert_close(told(ids_BT[:, :2]), told(ids_BT)[:, :2])


def test_a_run_begins_with_the_first_channels_crossing_as_they_are() -> None:
    wide, narrow = tiny_run(), tiny_run(model={"bottleneck": 4})
    ids_BT = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(build_stage(wide, 0)(ids_BT)[..., :4], build_stage(narrow, 0)(ids_BT))


def test_a_bottleneck_64_times_narrower_sends_64_times_less() -> None:
    run = tiny_run(model={"hidden": 256}, dtype="float32", codec={"backward": "blockwise8"})
    narrow = replace(run, model=replace(run.built_in, bottleneck=4))
    wide_bytes, _ = boundary_bytes(run, 0, "none")
    narrow_bytes, _ = boundary_bytes(narrow, 0, "none")
    assert wide_bytes == 64 * narrow_bytes == 4 * 2 * 16 * 256
    assert boundary_bytes(narrow, 1, "blockwise8") == (2 * 16 * 4 + 4,) * 2, "and a scale"


def test_rotary_positions_are_scaled_as_llama_does_it() -> None:
    """Pairs that turn more than 4 times in 64 tokens turn as before, those below once 8 times slower."""
    base = {"rotary_base": 500.0, "hidden": 64, "heads": 1}

    def rates(scaling: str) -> torch.Tensor:
        model = tiny_run(model={**base, "rotary_scaling": scaling}).built_in
        return _rotations(model, 2, "float64")[1].angle()

    plain, scaled = rates(""), rates("llama3 8 1 4 64")
    turns = 64 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4]) and (turns > 4).any()
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (scaled < plain)[between].all() and (scaled > plain / 8)[between].all()
    torch.testing.assert_close(rates("linear 2"), plain / 2)


def test_embedding_and_head_are_not_tied() -> None:
    run = tiny_run(model={"stages": 1})
    stage = build_stage(run, 0)
    weights = dict(stage.named_parameters())
    assert not torch.equal(weights["tokens.weight"], weights["head.weight"])
    assert weights["tokens.weight"].data_ptr() != weights["head.weight"].data_ptr()


def test_weights_follow_from_seed_and_name_alone() -> None:
    a = initial_normal(1, "layers.0.qkv.weight", (8, 8), 0.02)
    assert torch.equal(a, initial_normal(1, "layers.0.qkv.weight", (8, 8), 0.02))
    assert not torch.equal(a, initial_normal(2, "layers.0.qkv.weight", (8, 8), 0.02))
    assert not torch.equal(a, initial_normal(1, "layers.1.qkv.weight", (8, 8), 0.02))
    # A change here changes every run that exists.
    assert seed_of("weights", 1, "layers.0.qkv.weight") == 6366437227399389465
    assert hashlib.sha256(a.numpy().tobytes()).hexdigest()[:16] == "db1b0f9232131d8f"


def test_initial_weights_are_bell_shaped() -> None:
    x = initial_normal(3, "w", (1000, 1000), 0.5).double()
    assert x.mean().item() == pytest.approx(0.0, abs=2e-3)
    assert x.std().item() == pytest.approx(0.5, rel=2e-3)
    for sigmas, share in [(1.0, 0.6827), (2.0, 0.9545)]:
        assert (x.abs() < 0.5 * sigmas).double().mean().item() == pytest.approx(share, abs=0.015)


def test_the_branches_end_with_smaller_weights() -> None:
    run = tiny_run(model={"stages": 1, "hidden": 64})
    weights = dict(build_stage(run, 0).named_parameters())
    assert weights["layers.0.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["layers.0.down.weight"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.1)
    assert bool((weights["layers.0.norm1.weight"] == 1).all())


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_token_sees_what_came_before_it_and_its_place_and_nothing_after(positions: str) -> None:
    run = tiny_run(model={"stages": 1, "positions": positions})
    model = build_stage(run, 0)
    tokens = torch.arange(16).view(1, 16) % 7
    later = tokens.clone()
    later[0, 10] = 99
    a, b = model(tokens), model(later)
    assert torch.equal(a[:, :10], b[:, :10])
    assert not torch.equal(a[:, 11], b[:, 11])
    swapped = tokens.clone()
    swapped[0, 0], swapped[0, 1] = tokens[0, 1], tokens[0, 0]
    assert not torch.allclose(a[:, 5], model(swapped)[:, 5], rtol=0, atol=1e-9)


def test_rotary_attention_depends_on_distance_only() -> None:
    """The same two tokens three places later give the same scores: their logits do not change."""
    run = tiny_run(model={"stages": 1, "layers": 1})
    model = build_stage(run, 0)
    assert torch.allclose(model(torch.tensor([[5, 9]])), model(torch.tensor([[5, 9, 1]]))[:, :2])
    q = torch.randn(1, 1, 2, 8, dtype=torch.float64)
    turn = _rotations(run.built_in, 16, "float64")
    near, far = _rotate(q, turn[:2]), _rotate(q, turn[3:5])
    assert torch.allclose(near[0, 0, 0] @ near[0, 0, 1], far[0, 0, 0] @ far[0, 0, 1])


@pytest.mark.parametrize(
    "model", [{}, {"positions": "learned"}, {"mlp": "swiglu", "kv_heads": 2, "qk_norm": True}]
)
@pytest.mark.parametrize("stages", [1, 3])
def test_with_a_document_mask_each_document_of_a_window_gets_what_it_gets_alone(
    model: dict[str, Any], stages: int
) -> None:
    run = tiny_run(model={**model, "stages": stages}, data={"document_mask": True, "eos": 7})
    parts = [build_stage(run, stage) for stage in range(stages)]
    documents = [
        [[3, 1, 4, 7], [7], [1, 5, 9, 2, 6, 7], [5, 3, 5]],
        [[2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 7]],
    ]
    rows = torch.tensor([[token for document in row for token in document] for row in documents])
    assert rows.shape == (2, 14)

    def logits(ids_BT: torch.Tensor) -> torch.Tensor:
        x = ids_BT
        for part in parts:
            x = part(x, ids_BT=ids_BT)
        return x

    alone = [torch.cat([logits(torch.tensor([one])) for one in row], 1) for row in documents]
    torch.testing.assert_close(logits(rows), torch.cat(alone), rtol=0, atol=1e-12)
    # The first token of a document has its loss as all others: it is foretold from the end of the one before.
    labels = rows.roll(-1, 1)
    whole = logits(rows).flatten(0, 1)
    x = rows
    for part in parts[:-1]:
        x = part(x, ids_BT=rows)
    loss = parts[-1](x, labels, ids_BT=rows)
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(whole, labels.flatten()).item())


def test_a_window_without_an_end_is_one_document() -> None:
    plain, masked = tiny_run(), tiny_run(data={"document_mask": True, "eos": 7})
    ids_BT = torch.arange(8, 24).view(1, 16)
    for positions in ("rotary", "learned"):
        runs = [replace(r, model=replace(r.model, stages=1, positions=positions)) for r in (plain, masked)]
        a, b = (build_stage(run, 0)(ids_BT) for run in runs)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_no_weight_is_drawn_to_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw one without memory torch imports its compiler: most of a second of each process that starts."""
    monkeypatch.setattr(torch.nn.init, "normal_", lambda *_: pytest.fail("drawn"))
    build_stage(tiny_run(model={"positions": "learned"}), 0)


def test_there_is_no_stage_beyond_the_last() -> None:
    with pytest.raises(ValueError, match="no stage 3 in a run of 3"):
        build_stage(tiny_run(), 3)


# --- dropout -----------------------------------------------------------------------------------


def test_dropout_zeroes_its_share_and_keeps_the_mean() -> None:
    x = torch.ones(500, 500)
    y = dropped(x, "layers.0.mlp", p=0.25, seed=1, mb=Microbatch(0, 0))
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=3e-3)
    assert y.mean().item() == pytest.approx(1.0, abs=4e-3)
    assert y.max().item() == pytest.approx(1 / 0.75)
    # No pattern along rows or columns either: 500 draws have a standard deviation of 0.019.
    assert (y == 0).float().mean(0).std().item() == pytest.approx(0.0194, rel=0.2)
    assert (y == 0).float().mean(1).std().item() == pytest.approx(0.0194, rel=0.2)


def test_dropout_is_a_function_of_seed_microbatch_and_place() -> None:
    x = torch.ones(50, 50)

    def kept(seed: int, t: int, m: int, site: str) -> torch.Tensor:
        return dropped(x, site, p=0.5, seed=seed, mb=Microbatch(t, m))

    first = kept(1, 2, 3, "layers.0.mlp")
    assert torch.equal(first, kept(1, 2, 3, "layers.0.mlp"))
    others = [kept(9, 2, 3, "layers.0.mlp"), kept(1, 9, 3, "layers.0.mlp"), kept(1, 2, 9, "layers.0.mlp")]
    for other in [*others, kept(1, 2, 3, "layers.1.mlp")]:
        # Independent: half of 2500 places agree, give or take 1 %.
        assert (first == other).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_no_dropout_is_the_identity() -> None:
    x = torch.ones(3)
    assert dropped(x, "a", p=0.0, seed=1, mb=Microbatch(0, 0)) is x
