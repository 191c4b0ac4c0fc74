"""A stage on a CUDA device: the same maths, the same bits each time, and nothing that outruns anything."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from swarm.codecs import VALUES
from swarm.errors import Refused, SetupError
from swarm.ids import Microbatch
from swarm.model.fixed_point import _fused_add, add_exact
from swarm.model.gradient_sum import Gradients
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute
from swarm.wire.codec import Encoded, decode, encode
from tests.model.chain import (
    Chain,
    backward,
    batch_of,
    farthest,
    tiny_run,
    tokens_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MB = Microbatch(0, 0)


@pytest.fixture(autouse=True)
def bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")


def test_the_kernels_of_codecs_are_there_before_threads_need_them() -> None:
    """Two that imported them at once ended the run: one of them found none, again and again."""
    program = """if True:
        import sys
        from swarm.model.stage import StageCompute
        from tests.model.chain import tiny_run
        assert "bitsandbytes" not in sys.modules
        StageCompute(tiny_run(), 0, "cuda")
        assert "bitsandbytes.functional" in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("codec", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_of_the_device_travels(codec: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    encoded = encode(x, codec)
    y = decode(*encoded, device="cuda")
    assert (y.device.type, y.dtype, y.shape) == ("cuda", dtype, x.shape)
    most = {"none": 1e-9, "bf16": 2e-3, "blockwise8": 1.3e-2, "hadamard4": 0.13}
    assert ((y.double() - x.double()).norm() / x.double().norm()).item() < most[codec]
    # The bytes mean the same on the host, where a rotation leaves nearly nothing too.
    atol = 0.0 if codec != "hadamard4" else 1e-6
    assert torch.allclose(decode(*encoded).double(), y.cpu().double(), rtol=8e-3, atol=atol)


@pytest.mark.parametrize("codec", ["topk:0.05", "topk:0.05+bf16", "topk:0.4", "hadamard4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_these_codecs_give_the_bytes_that_they_give_on_the_cpu(codec: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 1000).mul(4).round().div(4).to(dtype)  # with ties
    here, there = encode(x.to("cuda"), codec), encode(x, codec)
    assert [bytes(buffer) for buffer in here.buffers] == [bytes(buffer) for buffer in there.buffers]
    assert torch.equal(decode(*here, device="cuda").cpu(), decode(*there))


@pytest.mark.parametrize("codec", [*VALUES, "topk:0.1", "topk:0.1+blockwise8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_not_sent_from_the_device(codec: str, bad: float) -> None:
    x = torch.ones(600, device="cuda")
    x[300] = bad
    with pytest.raises(Refused, match="the output is not finite"):
        encode(x, codec, name="the output")


@pytest.mark.parametrize("changes", [{}, {"model": {"dropout": 0.2}}, {"delayed_updates": True}])
def test_the_chain_equals_the_single_process_on_the_cpu(changes: dict[str, Any]) -> None:
    """float64, codec none: to 1e-9, dropout masks included; only the order of sums differs."""
    run = tiny_run(**changes)
    chain, reference = Chain(run, "cuda"), SingleProcess(run, batch_of(run))
    for t in range(run.steps):
        assert chain.step(t) == pytest.approx(reference.step(t), abs=1e-9)
    assert farthest(chain.named_weights(), reference.named_weights()) < 1e-9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_same_microbatches_give_the_same_bits_again(dtype: str, masked: bool) -> None:
    run = tiny_run(
        dtype=dtype,
        codec={"forward": "blockwise8", "backward": "blockwise8"},
        data={"document_mask": masked, "eos": 7 if masked else -1},
    )
    digests: list[list[str]] = []
    for how in ({}, {}, {"recompute": True}, {"recompute_layers": True}):
        chain = Chain(run, "cuda", **how)
        for t in range(2):
            chain.step(t)
        digests.append([stage.state.digest() for stage in chain.stages])
    assert all(digest == digests[0] for digest in digests)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_to_long_sequences_gives_the_same_bits_each_time(dtype: str, masked: bool) -> None:
    """Its fastest backward adds what its blocks find in the order in which they end."""
    run = tiny_run(
        dtype=dtype,
        model={"hidden": 512, "heads": 8, "ffn_hidden": 1024},
        data={"sequence_length": 2048, "document_mask": masked, "eos": 7 if masked else -1},
    )
    stage = StageCompute(run, 1, "cuda")
    assert len({stage.rehearse() for _ in range(10)}) == 1


def test_what_finds_other_bits_each_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsteady(*_: Any, **__: Any) -> Any:
        return torch.bincount(torch.ones(9, dtype=torch.int64, device="cuda"), torch.ones(9, device="cuda"))

    stage = StageCompute(tiny_run(dtype="float32"), 1, "cuda")
    monkeypatch.setattr(stage, "_compute", unsteady)
    with pytest.raises(SetupError, match=r"other bits each time: .*bincount.*--device cpu"):
        stage.rehearse()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_added_as_on_the_cpu(dtype: torch.dtype) -> None:
    """By the kernel of this device, which is there, up to the largest and beyond a block of threads."""
    assert _fused_add(torch.device("cuda:0"), dtype) is not None
    term = (torch.randn(1000, 77) * torch.logspace(-12, 3, 77)).to(dtype)
    term[0, 0], term[0, 1] = 2.0**17, -(2.0**17)
    here, there = torch.arange(term.numel()), torch.arange(term.numel()).cuda()
    for _ in range(2):
        add_exact(here, term)
        add_exact(there, term.cuda())
    assert torch.equal(here, there.cpu())
    for part in (slice(None), 0), (0, slice(1)):  # a column, and one number expanded
        here, there = torch.zeros(1000, dtype=torch.int64), torch.zeros(1000, dtype=torch.int64).cuda()
        add_exact(here, term[part].expand(1000))
        add_exact(there, term.cuda()[part].expand(1000))
        assert torch.equal(here, there.cpu())


def test_a_gradient_that_overflows_on_the_device_is_refused_and_leaves_the_sum() -> None:
    chain = Chain(tiny_run(dtype="float32"), "cuda")
    chain.begin(0)
    stage = chain.stages[1]
    tokens = chain.stages[0].forward(MB, [tokens_of(chain.run, MB)]).outputs
    good, bad = stage.forward(MB, tokens), stage.forward(MB, tokens)
    zeros = torch.zeros(2, 16, 32)
    with pytest.raises(Refused, match="not finite"):
        backward(stage, bad, [encode(zeros + 3e38, "none")], add=True)
    assert not stage.sums.of(0).any()
    backward(stage, good, [encode(zeros + 1e-3, "none")], add=True)
    assert stage.sums.of(0).any()


def test_the_measured_memory_is_what_a_microbatch_takes() -> None:
    run = tiny_run(dtype="bfloat16", model={"hidden": 256, "layers": 6}, data={"sequence_length": 128})
    chain = Chain(run, "cuda")
    stage = chain.stages[1]
    tokens = chain.stages[0].forward(MB, [tokens_of(run, MB)]).outputs
    stage.forward(MB, tokens)
    before = torch.cuda.memory_allocated()
    fwd = stage.forward(MB, tokens)
    held = torch.cuda.memory_allocated() - before
    assert isinstance(fwd.outputs[0], Encoded)
    assert stage.saved_bytes() == pytest.approx(held, rel=0.3)


def test_sums_on_the_host_are_those_on_the_device() -> None:
    run = tiny_run(dtype="float32", codec={"reduce": "rounded16"})
    found = []
    for host_sums in (False, True):
        stage = StageCompute(run, run.S - 1, "cuda", host_sums=host_sums)
        stage.sums.begin(0)
        stage.sums.add(
            Gradients(
                mb=MB,
                loads=0,
                terms={name: p.detach() * 0.1 for name, p in stage._parameters[0].items()},
            )
        )
        found.append(stage.sums.of(0))
    assert [one.device.type for one in found] == ["cuda", "cpu"] and found[1].any()
    assert torch.equal(found[0].cpu(), found[1])
