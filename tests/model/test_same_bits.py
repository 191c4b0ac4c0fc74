"""What a stage computes does not depend on who computes it: on their threads, or where their tensors lie."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from swarm.ids import Microbatch
from swarm.manifest import BatchSpec, Run, StartSpec, demo_run
from swarm.model.layout import start_from, start_tensors
from swarm.model.reference import SingleProcess
from swarm.model.same_bits import CACHE_LINE_BYTES, aligned, use_threads_of
from swarm.model.stage import StageCompute
from swarm.wire.codec import Encoded, encode
from tests.model.chain import Chain, backward, loss_backward, tiny_run
from tests.seeds import some

MB = Microbatch(0, 0)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    yield
    torch.set_num_threads(before)
    torch.set_deterministic_debug_mode(mode)


def wide_run(hidden: int, *, threads: int = 1) -> Run:
    """A layer on each of 2 stages. At 512 three threads give other bits than one, in torch 2.13."""
    base = demo_run(stages=2, steps=4)
    return replace(
        base,
        data=replace(base.data, tokens=10_000),
        model=replace(base.model, layers=2, hidden=hidden, heads=4, ffn_hidden=4 * hidden),
        batch=BatchSpec(microbatch_size=4, microbatches_per_step=1, microbatch_threads=threads),
    )


def random_tokens(offsets: list[int]) -> np.ndarray:
    return np.random.default_rng(offsets[0]).integers(0, 256, (len(offsets), 129)).astype(np.uint8)


@pytest.mark.parametrize("hidden", some([128, 512], quick=[128]))
def test_a_step_gives_the_same_bits_whatever_threads_the_process_was_given(hidden: int) -> None:
    run = wide_run(hidden)
    found: set[tuple[str, ...]] = set()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        stages = [StageCompute(run, stage) for stage in range(2)]
        kinds = [stage.rehearse() for stage in stages]
        for stage in stages:
            stage.sums.begin(0)
        fwd = stages[0].forward(MB, [encode(torch.from_numpy(random_tokens([1, 2, 3, 4])), "none")])
        _, grads = loss_backward(stages[1], MB, fwd.outputs, add=True)
        backward(stages[0], fwd, grads, add=True)
        sums = [stage.sums.value(stage.sums.of(0)) for stage in stages]
        torch.set_num_threads(threads)
        for stage, total in zip(stages, sums, strict=True):
            stage.apply(0, total, sum(s.shared.sqnorm(t) for s, t in zip(stages, sums, strict=True)))
        found.add((*kinds, *(stage.state.digest() for stage in stages)))
    assert len(found) == 1


def test_what_is_looked_up_with_one_index_adds_up_alike_however_many_threads_do_it() -> None:
    table, rows = torch.rand(50, 64, requires_grad=True), torch.randint(0, 50, (2000,))
    weights = torch.rand(2000, 64)
    found = []
    for threads in (1, 2, 2, 2):
        use_threads_of(wide_run(128, threads=threads))
        found += torch.autograd.grad((table[rows] * weights).sum(), [table])
        found[-1] += torch.zeros(50, 64).index_copy(0, rows, weights)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.slow
def test_one_process_gives_the_same_bits_whatever_threads_it_was_given() -> None:
    run = wide_run(512)
    found: list[dict[str, torch.Tensor]] = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        single = SingleProcess(run, random_tokens)
        single.step(0)
        found.append(single.named_weights())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_manifest_says_how_many_threads_share_a_microbatch() -> None:
    torch.set_num_threads(1)
    for threads in (2, 1):
        stage = StageCompute(replace(tiny_run(), batch=wide_run(32, threads=threads).batch), 0)
        stage.rehearse()
        assert torch.get_num_threads() == threads


def test_a_stage_keeps_small_numbers_though_a_library_flushes_them_to_zero() -> None:
    stage = StageCompute(tiny_run(), 0)
    torch.set_flush_denormal(True)
    try:
        stage.rehearse()
        assert sys.float_info.min / 2 > 0
    finally:
        torch.set_flush_denormal(False)


def lying_at(sent: Encoded, offset: int) -> Encoded:
    """The same numbers, `offset` bytes behind the start of a cache line."""
    (buffer,) = sent.buffers
    data = bytes(buffer)
    space = torch.empty(len(data) + CACHE_LINE_BYTES, dtype=torch.uint8)
    assert space.data_ptr() % CACHE_LINE_BYTES == 0
    view = memoryview(space.numpy())[offset : offset + len(data)]
    view[:] = data
    return Encoded(sent.meta, [view])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_stage_gives_the_same_bits_wherever_what_came_lies(dtype: str) -> None:
    """An answer lies in a body behind others. MKL's small products differ, by where their operands begin."""
    run = tiny_run(dtype=dtype)
    run = replace(run, batch=replace(run.batch, microbatch_size=1), data=replace(run.data, sequence_length=5))
    chain = Chain(run)
    chain.begin(0)
    stage = chain.stages[1]
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1), dtype=stage.state.dtype)
    tokens = encode(torch.zeros((1, 6), dtype=torch.uint8), "none")
    found: set[tuple[bytes, ...]] = set()
    for offset in (0, 4, 8, 16, 32, 61):
        stage.sums.drop(0)
        stage.sums.begin(0)
        fwd = stage.forward(MB, [lying_at(encode(hidden, "none"), offset), tokens])
        (grad,) = backward(stage, fwd, [lying_at(encode(hidden, "none"), offset)], add=True)
        found.add(
            (bytes(fwd.outputs[0].buffers[0]), bytes(grad.buffers[0]), stage.sums.of(0).numpy().tobytes())
        )
    assert len(found) == 1


def test_only_what_does_not_begin_a_cache_line_is_copied() -> None:
    whole = torch.arange(64.0)
    assert aligned(whole) is whole
    part = whole[3:]
    copy = aligned(part)
    assert torch.equal(copy, part) and copy.data_ptr() % CACHE_LINE_BYTES == 0


def test_what_a_run_starts_with_begins_on_a_cache_line_wherever_it_was_read() -> None:
    """Frozen weights are computed with where they lie: read from a file 16 bytes off, from a peer not."""
    run = replace(tiny_run(dtype="float32"), start=StartSpec(weights="folder"))
    start_from(run, lambda _, shape: torch.ones(shape.numel() + 4)[4:].view(shape))
    found = start_tensors(run, 0)
    assert found and not any(tensor.data_ptr() % CACHE_LINE_BYTES for tensor in found.values())


def test_a_kind_is_what_a_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same for all who compute alike, and another one as soon as a bit differs."""
    run = tiny_run(dtype="float32")
    kinds = [StageCompute(run, 1).rehearse() for _ in range(2)]
    assert kinds[0] == kinds[1] and len(kinds[0]) == 32
    exact = torch.nn.functional.gelu

    def rounds_otherwise(x: torch.Tensor) -> torch.Tensor:
        return exact(x) + x.abs().amax() * 1e-7

    monkeypatch.setattr(torch.nn.functional, "gelu", rounds_otherwise)
    assert StageCompute(run, 1).rehearse() != kinds[0]
