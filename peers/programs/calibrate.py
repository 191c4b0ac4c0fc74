"""Times some hundred small calls on a device: what `swarm.partitioner.cost` needs to predict any stage on it.

Calls run as they do in a stage: several of a kind forward, each on its own tensors, then one backward through
all of them. So caches are as cold as they are there. Rounds over all calls are repeated, and medians taken:
another program that wants the device for a moment spoils one round of some calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from swarm.model.graph.ir import Value
from swarm.partitioner.cost import DeviceModel, Sample, fit
from swarm.partitioner.flops import Work, kind_of, work

ROUNDS = 5
COPIES = 3
"""Of each call in a round: their tensors together outgrow the near caches, as a stage's do."""
SIZES = (1 << 12, 1 << 16, 1 << 18, 3 << 19)
"""Numbers in the operands of memory-bound calls: 16 KiB, in a near cache, ... 6 MiB, in none."""
PRODUCT_S = 2e-3
"""What a product of 1024 x 1024 x 1024 should take at least: on a faster device all calls get more rows."""

Shape = tuple[int, ...]
Run = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call to be timed. `run` takes the inputs, then the weights, then the indices."""

    target: str
    run: Run
    inputs: Sequence[Shape]
    weights: Sequence[Shape] = ()
    indices: Sequence[tuple[Shape, int]] = field(default=())
    """Integer inputs: their shapes, and how many values they have."""
    kind: str = ""
    """Of the call, where its name alone does not say."""


def calibrate(
    device: str = "cpu", dtype: torch.dtype = torch.float32, *, rounds: int = ROUNDS
) -> DeviceModel:
    """The laws of this device, with the threads that torch has now. Takes some seconds."""
    calibration = Calibration(device, dtype)
    for _ in range(rounds):
        calibration.round()
    return fit(calibration.samples())


def calls(growth: int = 1) -> Iterator[Call]:
    """What is timed. `growth`: how many times more rows than a CPU core needs to be busy."""
    g, aten = growth, functional
    for m, k, n in (
        (16, 64, 128), (128, 128, 128), (1024, 64, 64), (8, 1024, 1024), (64, 2048, 512), (256, 512, 512),
        (1024, 384, 384), (1024, 256, 1024), (1024, 1024, 256), (512, 512, 4096), (2048, 128, 512),
    ):  # fmt: skip
        yield Call("aten.linear.default", aten.linear, [(m * g, k)], [(n, k), (n,)])
    for b, m, k, n in (
        (8, 32, 32, 32), (32, 128, 64, 128), (32, 256, 48, 256), (32, 256, 256, 48), (8, 128, 128, 128),
    ):  # fmt: skip
        yield Call("aten.bmm.default", torch.bmm, [(b * g, m, k), (b * g, k, n)])
    for b, c, side, o, kernel, stride in (
        (2, 3, 64, 64, 7, 2), (2, 3, 64, 32, 3, 1), (2, 16, 16, 16, 3, 1), (2, 64, 32, 64, 3, 1),
        (4, 128, 16, 128, 3, 1), (4, 128, 32, 128, 3, 2), (4, 256, 8, 256, 3, 1), (2, 512, 4, 512, 3, 1),
        (2, 64, 32, 256, 1, 1),
        (4, 512, 16, 128, 1, 1), (4, 256, 16, 1024, 1, 1), (2, 1024, 8, 256, 1, 1), (4, 256, 16, 512, 1, 2),
        (2, 2048, 4, 512, 1, 1), (2, 32, 96, 32, 3, 1), (2, 128, 48, 64, 3, 1), (1, 512, 12, 256, 3, 1),
    ):  # fmt: skip
        image, weights = (b * g, c, side, side), (o, c, kernel, kernel)
        yield Call("aten.conv2d.default", _conv(stride, kernel // 2), [image], [weights])
    for c, side in ((256, 8), (64, 32), (16, 16), (128, 24)):
        image, weights = (2 * g, c, side, side), [(c, c // 2, 2, 2), (c // 2,)]
        yield Call("aten.conv_transpose2d.input", _transposed, [image], weights)
    for b, heads, t, d in ((2, 4, 32, 32), (4, 6, 128, 64), (2, 6, 256, 64), (4, 8, 128, 32)):
        attention = aten.scaled_dot_product_attention
        yield Call("aten.scaled_dot_product_attention.default", attention, [(b * g, heads, t, d)] * 3)
    for size in SIZES:
        yield from _memory_bound(size * g)


def _memory_bound(numel: int) -> Iterator[Call]:
    """Calls whose time follows their bytes, on tensors of about `numel` numbers."""
    aten, rows, side = functional, numel // 256, max(4, round((numel / 64) ** 0.5))
    flat, tall, image = [(rows, 256)], [(rows // 4, 1024)], [(2, 32, side, side)]
    bhw = numel // 64
    yield Call("aten.add.Tensor", torch.add, flat * 2)
    yield Call("aten.mul.Tensor", torch.mul, flat * 2)
    yield Call("aten.mul.Tensor", torch.mul, flat, [(256,)])
    yield Call("aten.pow.Tensor_Scalar", lambda x: x.pow(2), flat)
    yield Call("aten.relu.default", aten.relu, flat)
    yield Call("aten.gelu.default", lambda x: aten.gelu(x, approximate="tanh"), flat)
    yield Call("aten.silu.default", aten.silu, flat)
    yield Call("aten.softmax.int", lambda x: torch.softmax(x, -1), flat)
    wide, channels = [(256,), (256,)], [(32,), (32,)]
    yield Call("aten.layer_norm.default", lambda x, w, b: aten.layer_norm(x, (256,), w, b), flat, wide)
    yield Call(
        "aten.batch_norm.default", lambda x, w, b: aten.batch_norm(x, None, None, w, b, True), image, channels
    )
    yield Call("aten.rms_norm.default", lambda x, w: aten.rms_norm(x, (256,), w), flat, [(256,)])
    yield Call("aten.upsample_nearest2d.vec", lambda x: aten.interpolate(x, scale_factor=2.0), image)
    yield Call("aten.group_norm.default", lambda x, w, b: aten.group_norm(x, 8, w, b), image, channels)
    yield Call("aten.max_pool2d.default", lambda x: aten.max_pool2d(x, 3, 2, 1), image)
    yield Call("aten.avg_pool2d.default", lambda x: aten.avg_pool2d(x, 2), image)
    yield Call("aten.mean.dim", lambda x: x.mean(-1, keepdim=True), flat)
    yield Call("aten.cat.default", lambda x, y: torch.cat((x, y), -1), flat * 2)
    yield Call("aten.clone.default", lambda x: x.view(-1, 16, 4, 64).transpose(1, 2).contiguous(), tall)
    table, words, few = [(bhw, 64)], [((numel // 64,), bhw)], max(1, rows // 8)
    yield Call("aten.embedding.default", lambda w, i: aten.embedding(i, w), [], table, words)
    labels = [((few,), 2048)]
    yield Call("aten.cross_entropy_loss.default", aten.cross_entropy, [(few, 2048)], [], labels)
    yield Call("aten.slice.Tensor", lambda x: x[:, :64], flat)


def clock_s(device: str) -> float:
    """Now, when the device has done all it was given.

    With one thread on the CPU these are CPU seconds: the turns that other programs have on the core do not
    count, and what the device can do is what is asked.
    """
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.thread_time() if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


class Calibration:
    """Calls to be timed, in rounds, so that what is predicted can be measured in between."""

    def __init__(
        self, device: str = "cpu", dtype: torch.dtype = torch.float32, wanted: Iterable[Call] | None = None
    ) -> None:
        """`wanted`: what to time, by default `calls`."""
        wanted = calls(_growth(device, dtype)) if wanted is None else wanted
        self._timed = [_Timed(call, device, dtype) for call in wanted]
        for one in self._timed:
            one.run()  # first calls choose kernels and touch memory

    def round(self) -> None:
        """Time every call once more."""
        for one in self._timed:
            one.times.append(one.run())

    def samples(self) -> list[Sample]:
        """The medians so far."""
        return [
            Sample(one.work, *map(statistics.median, zip(*one.times, strict=True))) for one in self._timed
        ]


class _Timed:
    """A call with its tensors."""

    def __init__(self, call: Call, device: str, dtype: torch.dtype) -> None:
        self._call, self._device = call, device
        self.times: list[tuple[float, float]] = []
        """Seconds of each round, (forward, backward)."""
        generator = torch.Generator().manual_seed(0)

        def number(shape: Shape) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(True)

        def index(shape: Shape, below: int) -> torch.Tensor:
            return torch.randint(below, shape, generator=generator).to(device)

        self._weights = [number(shape) for shape in call.weights]
        self._copies = [
            ([number(shape) for shape in call.inputs], [index(*one) for one in call.indices])
            for _ in range(COPIES)
        ]
        inputs, indices = self._copies[0]
        y = call.run(*inputs, *self._weights, *indices)
        self._gradients = [torch.randn_like(y) for _ in range(COPIES)]
        kind = call.kind or kind_of(call.target)
        self.work: Work = work(kind, _values([*inputs, *indices]), _values(self._weights), _values([y]))

    def run(self) -> tuple[float, float]:
        """Seconds of one call, (forward, backward)."""
        began = clock_s(self._device)
        made = [self._call.run(*inputs, *self._weights, *indices) for inputs, indices in self._copies]
        between = clock_s(self._device)
        leaves = [leaf for inputs, _ in self._copies for leaf in inputs] + self._weights
        torch.autograd.grad(made, leaves, self._gradients)
        ended = clock_s(self._device)
        return (between - began) / COPIES, (ended - between) / COPIES


def _values(tensors: Sequence[torch.Tensor]) -> list[Value]:
    return [
        Value(
            name="", shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."),
            differentiable=tensor.requires_grad,
        )
        for tensor in tensors
    ]  # fmt: skip


def _growth(device: str, dtype: torch.dtype) -> int:
    if device == "cpu":
        return 1
    a = torch.randn(1024, 1024, device=device, dtype=dtype)
    taken = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(10):
            torch.mm(a, a)
        torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - began) / 10)
    return max(1, round(PRODUCT_S / statistics.median(taken)))


def _conv(stride: int, padding: int) -> Run:
    return lambda x, w: functional.conv2d(x, w, stride=stride, padding=padding)


def _transposed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.conv_transpose2d(x, w, b, stride=2)
