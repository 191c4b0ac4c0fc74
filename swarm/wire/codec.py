"""How a tensor travels: a small `TensorMeta` for the header, and raw buffers.

A codec is deterministic and has no memory: the same tensor gives the same bytes.

    none         the bytes of the tensor
    bf16         each number rounded to bfloat16: half the bytes of float32
    blockwise8   bitsandbytes' dynamic blockwise quantization, blocks of 256: a byte a number, and a
                 float32 scale (the largest magnitude) a block. 3.94 times smaller than float32.
    hadamard4    4 bits a number after a rotation of blocks of 256, see `swarm.wire.hadamard`. 7.75 times
                 smaller than float32.
    topk:R       the part R of each row that is largest, with its places: see `swarm.wire.topk`. The values as
                 they are, or as one of the others has them (`topk:R+blockwise8`), in the order of their
                 places. topk:0.05+blockwise8 is 44 times smaller than float32: 1.8 bytes a value, of them
                 0.8 its place.

Whole numbers (tokens) always travel as `none`. `decode(encode(x))` gives the dtype of `x` back.

blockwise8 on the CPU is our own, bit-identical to bitsandbytes 0.50 there (tested) at a quarter of its time,
and without its import, which costs seconds. On CUDA bitsandbytes quantizes on the device; it rounds to the
nearest code, where its CPU algorithm first rounds to one of 65536 steps. The bytes of the two kinds of device
so differ for numbers under a thousandth of their block's largest, by less than the codec's own error.

What a stranger sends is refused before anything of its size is allocated: `encoded_sizes` says how
many bytes each buffer of an honest tensor has, from the meta alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from swarm.codecs import PPM, Codec, parse_codec
from swarm.digest import digest_of
from swarm.errors import Refused
from swarm.wire import hadamard
from swarm.wire.buffers import Buffer
from swarm.wire.tensor_meta import BLOCK, ITEM_BYTES, TensorMeta, encoded_sizes, kept_of
from swarm.wire.topk import largest, pack_places, unpack_places

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Encoded(NamedTuple):
    """One tensor as it travels. With codec `none` the buffers are the tensor's own memory."""

    meta: TensorMeta
    buffers: Sequence[Buffer]


def split(metas: Sequence[TensorMeta], buffers: Sequence[Buffer]) -> list[Encoded]:
    """The buffers of a body, tensor by tensor."""
    left = iter(buffers)
    return [Encoded(meta, list(islice(left, len(encoded_sizes(meta))))) for meta in metas]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype on the wire, such as `bfloat16`."""
    return _NAMES[dtype]


def encode(
    tensor: torch.Tensor, codec: str, *, name: str = "a tensor", places: torch.Tensor | None = None
) -> Encoded:
    """Turn a tensor of any device into bytes in host memory.

    `name` is what messages call it. `places`: those of another tensor of this shape that came with a top-k of
    the same part (`places_of`); a top-k then keeps these places instead of the largest. With codec `none` on
    the CPU nothing is copied: the buffers see later changes of the tensor.

    Raises:
        Refused: a number that is not finite, or that is too large for the codec.
    """
    return start_encode(tensor, codec, name=name, places=places)()


def start_encode(
    tensor: torch.Tensor, codec: str, *, name: str = "a tensor", places: torch.Tensor | None = None,
    infinite: bool = False,
) -> Callable[[], Encoded]:  # fmt: skip
    """As `encode`, but does not wait for CUDA: the function that it returns does, and is to be called once.
    `infinite`: numbers may be, which have codec `none`; none may be NaN.

    All of it, the copies to pinned memory included, is on the current stream, so nothing can overtake
    anything. On CUDA a number that is not finite is only found by the function.
    """
    tensor = tensor.detach()
    meta = TensorMeta(tuple(tensor.shape), _NAMES[tensor.dtype], codec)
    encoded_sizes(meta)
    what = _codec_of(meta)
    limit = math.inf if infinite and tensor.is_floating_point() else _encodable(tensor.dtype, what.values)

    def check(low: float, high: float) -> None:
        if limit is not None and not (-limit <= low and high <= limit):
            raise Refused(f"{name} is not finite")

    on_cuda = tensor.device.type == "cuda"
    # bitsandbytes' kernel finds its scales with comparisons, which skip NaN; this one passes it on.
    checked = limit is not None and tensor.numel() and (on_cuda or codec != "blockwise8")
    extremes = torch.aminmax(tensor) if checked else None
    if extremes is not None and not on_cuda:
        check(extremes.min.item(), extremes.max.item())
    if what.keep_ppm < PPM:
        places = _largest(tensor, what.keep_ppm) if places is None else to_device(places, tensor.device)
        values = tensor.contiguous().view(-1)[places]
    else:
        assert places is None, "only a top-k has places"
        values = tensor
    parts = _parts(values, what.values)
    if what.values == "blockwise8" and not on_cuda and values.numel():
        check(*_range(parts[1]))
    if places is not None:
        parts.insert(0, places)

    def encoded(hosts: Sequence[torch.Tensor]) -> Encoded:
        if places is None:
            return Encoded(meta, [bytes_of(host) for host in hosts])
        packed = pack_places(hosts[0].numpy(), tensor.numel())
        return Encoded(meta, [packed, *(bytes_of(host) for host in hosts[1:])])

    if not on_cuda:
        result = encoded(parts)
        return lambda: result
    if extremes is not None:
        parts.append(torch.stack(extremes).double())
    hosts = [_start_copy(part) for part in parts]
    done = torch.cuda.Event(blocking=True)  # else a core spins meanwhile
    done.record(torch.cuda.current_stream(tensor.device))

    def finish() -> Encoded:
        done.synchronize()
        if extremes is not None:
            check(*hosts.pop().tolist())
        return encoded(hosts)

    return finish


def _parts(values: torch.Tensor, codec: str) -> list[torch.Tensor]:
    """What a codec without top-k makes of a tensor, on its device."""
    if codec == "none":
        return [values]
    if codec == "bf16":
        return [values.to(torch.bfloat16)]
    if codec == "hadamard4":
        return list(hadamard.quantize(values.reshape(-1)))
    flat = values.contiguous().view(-1)
    return list(_quantize_cuda(flat) if flat.is_cuda else _quantize(flat.cpu()))


def decode(
    meta: TensorMeta, buffers: Sequence[Buffer], *, device: str | torch.device = "cpu",
    expected: TensorMeta | None = None, name: str = "a tensor", infinite: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The tensor that was encoded, on `device`, checked. `expected`: what it must be; None: anything.
    `infinite`: numbers of codec `none` or `bf16` may be; none may be NaN.

    With codec `none` on the CPU the tensor may share memory with a writable buffer.

    Raises:
        Refused: not what is expected, buffers of the wrong size, a number that is not finite. The text
            says which.
    """
    if expected is not None and meta != expected:
        raise Refused(f"{name} is {meta.words}; expected {expected.words}")
    sizes = encoded_sizes(meta)
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    if [view.nbytes for view in views] != sizes:
        raise Refused(f"{name} came in buffers of {[v.nbytes for v in views][:4]} bytes; expected {sizes}")
    dtype, device = _DTYPES[meta.dtype], torch.device(device)
    if not math.prod(meta.shape):
        return torch.empty(meta.shape, dtype=dtype, device=device)
    what = _codec_of(meta)
    if what.keep_ppm < PPM:
        places = _places(meta, views[0], name)
        kept = TensorMeta((len(places),), meta.dtype, what.values)
        values = decode(kept, views[1:], device=device, name=name)
        dense = torch.zeros(math.prod(meta.shape), dtype=dtype, device=device)
        dense[to_device(places, device)] = values
        return dense.view(meta.shape)
    if what.values in ("blockwise8", "hadamard4"):
        scales = _tensor_of(views[1], torch.float32)
        low, high = _range(scales)
        most = hadamard.MAX_SCALE if what.values == "hadamard4" else torch.finfo(dtype).max
        if not 0.0 <= low <= high <= most:
            raise Refused(f"{name} has scales that are not finite")
        quantized = _tensor_of(views[0], torch.uint8)
        if what.values == "hadamard4":
            numbers, by_block = to_device(quantized, device), to_device(scales, device)
            return hadamard.dequantize(numbers, by_block, math.prod(meta.shape)).to(dtype).view(meta.shape)
        if device.type == "cuda":
            return _dequantize_cuda(quantized, scales, dtype, device).view(meta.shape)
        return _dequantize(quantized, scales, dtype).view(meta.shape).to(device)
    flat = _tensor_of(views[0], torch.bfloat16 if what.values == "bf16" else dtype)
    if flat.dtype.is_floating_point:
        (low, high), most = _range(flat), torch.finfo(dtype).max
        if not (low <= high if infinite else -most <= low <= high <= most):
            raise Refused(f"{name} is not finite")
    return to_device(flat, device).to(dtype).view(meta.shape)


def round_trip(tensor: torch.Tensor, codec: str, *, places: torch.Tensor | None = None) -> torch.Tensor:
    """What the receiver gets: `decode(encode(tensor))`, on the same device."""
    return decode(*encode(tensor, codec, places=places), device=tensor.device)


def places_of(encoded: Encoded) -> torch.Tensor | None:
    """The places of the numbers that a top-k kept: ascending, int64 on the CPU. None for codecs that keep
    all.

    Raises:
        Refused: places that no honest peer sends.
    """
    if _codec_of(encoded.meta).keep_ppm == PPM:
        return None
    return _places(encoded.meta, memoryview(encoded.buffers[0]).cast("B"), "a tensor")


def _places(meta: TensorMeta, packed: memoryview, name: str) -> torch.Tensor:
    rows, keep = kept_of(meta.shape, _codec_of(meta).keep_ppm)
    return torch.from_numpy(unpack_places(packed, math.prod(meta.shape), rows, keep, name=name))


def dynamic_code() -> torch.Tensor:
    """The 256 numbers in [-1, 1] that a byte of blockwise8 stands for, ascending; float32.

    For each of seven powers of ten the middles of 1, 2, 4, … 64 equal parts of [0.1, 1], with both
    signs; and 0 and 1. Bit-identical to bitsandbytes' signed dynamic map (tested).
    """
    values = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1.0, 2**power + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (power - 6)
        values += middles.tolist() + (-middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    """Least and greatest; NaN if any number is NaN. One pass, a twelfth of the time of isfinite().all()."""
    low, high = torch.aminmax(tensor)
    return low.item(), high.item()


def _codec_of(meta: TensorMeta) -> Codec:
    """The codec of a meta that `encoded_sizes` has accepted."""
    codec = parse_codec(meta.codec)
    assert codec is not None
    return codec


@functools.cache
def _encodable(dtype: torch.dtype, values: str) -> float | None:
    """The largest magnitude that can be carried; None for whole numbers, which need no check."""
    if not dtype.is_floating_point:
        return None
    if values == "hadamard4":
        return hadamard.MAX_NUMBER
    on_the_wire = {"none": dtype, "bf16": torch.bfloat16, "blockwise8": torch.float32}[values]
    return min(torch.finfo(dtype).max, torch.finfo(on_the_wire).max)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _largest(tensor: torch.Tensor, keep_ppm: int) -> torch.Tensor:
    """Ascending places (int64) in the flat tensor of what a top-k keeps, on its device.

    Does not wait for CUDA: there a stable sort also finds the first of equal numbers.
    """
    rows, keep = kept_of(tuple(tensor.shape), keep_ppm)
    flat = tensor.contiguous().view(-1)
    if not flat.numel():
        return torch.empty(0, dtype=torch.int64, device=flat.device)
    bits = flat.view(_BITS[flat.element_size()]).view(rows, -1)
    if flat.device.type == "cuda":
        magnitudes = bits & torch.iinfo(bits.dtype).max
        order = torch.sort(magnitudes, dim=1, descending=True, stable=True).indices[:, :keep]
        starts = torch.arange(rows, device=flat.device)[:, None] * bits.shape[1]
        return (torch.sort(order, dim=1).values + starts).view(-1)
    return torch.from_numpy(largest(bits.cpu().numpy(), keep))


def host_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory from and to which a tensor of `device` is copied at the speed of its bus."""
    if device.type != "cuda":
        return torch.empty(shape, dtype=dtype)
    with torch.cuda.device(device):  # or the first GPU, whatever uses it, would keep a context for us
        return torch.empty(shape, dtype=dtype, pin_memory=True)


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    return host_empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor of any device; of a contiguous one on the CPU its own memory."""
    host = tensor.detach().contiguous().reshape(-1).cpu()
    return host.view(torch.uint8).numpy().data


def chunk_digest(chunk: torch.Tensor) -> bytes:
    """Of the bytes of a tensor."""
    return digest_of(bytes_of(chunk))


def _tensor_of(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D host tensor over the bytes, or over a copy where they are read-only or misaligned."""
    if view.readonly:
        view = memoryview(bytearray(view))
    flat = torch.frombuffer(view, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`, without waiting for what the device is doing."""
    if device.type == "cuda":
        host = host_empty(host.shape, host.dtype, device).copy_(host)
    return host.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory; of a GPU a copy, which went there at the speed of its bus."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = _start_copy(tensor)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


@functools.cache
def _code(device: torch.device) -> torch.Tensor:
    return dynamic_code().to(device)


_SLICE = 1 << 16
"""Numbers per slice: three float32 slices of this fit into an L2 cache of 1 MB."""


def _slices(numel: int) -> list[tuple[int, int, int]]:
    """(start, end, numbers per row) of slices of whole blocks, and of the shorter last block."""
    whole = numel // BLOCK * BLOCK
    parts = [(start, min(start + _SLICE, whole), BLOCK) for start in range(0, whole, _SLICE)]
    return parts if whole == numel else [*parts, (whole, numel, numel - whole)]


def _scales_of(scales: torch.Tensor, start: int, end: int) -> torch.Tensor:
    return scales[start // BLOCK : -(-end // BLOCK)]


@functools.cache
def _nearest() -> torch.Tensor:
    """For each of 65536 equal steps from -1 to 1 the byte whose code is nearest to it."""
    code = dynamic_code().double()
    steps = torch.arange(1 << 16, dtype=torch.float64) * 2.0 / 65535.0 - 1.0
    return torch.searchsorted((code[1:] + code[:-1]) / 2.0, steps).to(torch.uint8)


def _quantize(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1-D floats on the CPU -> (uint8 of the same length, one float32 scale per block).

    A number that is not finite makes its scale not finite.
    """
    numel = flat.numel()
    quantized = torch.empty(numel, dtype=torch.uint8)
    scales = torch.empty(-(-numel // BLOCK), dtype=torch.float32)
    scratch = torch.empty((2, min(numel, _SLICE)), dtype=torch.float32)
    steps = torch.empty(min(numel, _SLICE), dtype=torch.int32)
    for start, end, row in _slices(numel):
        x = flat[start:end].view(-1, row).float()
        out, scale = quantized[start:end], _scales_of(scales, start, end)
        a, b, step = scratch[0, : end - start], scratch[1, : end - start], steps[: end - start]
        torch.abs(x, out=a.view(x.shape))
        torch.amax(a.view(x.shape), 1, out=scale)
        inverse = scale.reciprocal()
        usable = inverse.isfinite()
        all_usable = bool(usable.all())
        if not scale.isfinite().all():
            continue  # the caller refuses it; its steps would be outside the table
        if not all_usable:
            inverse = torch.where(usable, inverse, 0.0)
        # The step is 65535 * (x / scale + 1) / 2 + 1/2, rounded once (a fused multiply-add), cut to a whole
        # number. Here without one: with w = x / scale + 1 it is 32768 w + (1/2 - w/2), whose products are
        # exact, which gives the same whole number for every w (tested).
        torch.mul(x, inverse[:, None], out=a.view(x.shape))
        a.add_(1.0)
        torch.mul(a, -0.5, out=b)
        b.add_(0.5).add_(a, alpha=32768)
        step.copy_(b)
        torch.index_select(_nearest(), 0, step, out=out)
        if not all_usable:
            # All zeros, or so small that 1 / scale is infinite: only the sign is left.
            rows = out.view(x.shape)
            rows[~usable] = (x[~usable] > 0).to(torch.uint8) * 255
    return quantized, scales


def _dequantize(quantized: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """1-D of `dtype` on the CPU, in fresh memory."""
    numel, code = quantized.numel(), _code(torch.device("cpu"))
    result = torch.empty(numel, dtype=dtype)
    index = torch.empty(min(numel, _SLICE), dtype=torch.int32)
    wide = None if dtype == torch.float32 else torch.empty(min(numel, _SLICE), dtype=torch.float32)
    for start, end, row in _slices(numel):
        out, where = result[start:end], index[: end - start].copy_(quantized[start:end])
        numbers = out if wide is None else wide[: end - start]
        torch.index_select(code, 0, where, out=numbers)
        numbers.view(-1, row).mul_(_scales_of(scales, start, end)[:, None])
        if wide is not None:
            out.copy_(numbers)
    return result


def _quantize_cuda(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from bitsandbytes.functional import quantize_blockwise

    wide = flat.float() if flat.dtype == torch.float64 else flat
    quantized, state = quantize_blockwise(wide, code=_code(flat.device), blocksize=BLOCK)
    return quantized, state.absmax


def _dequantize_cuda(
    quantized: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    from bitsandbytes.functional import QuantState, dequantize_blockwise

    direct = torch.float32 if dtype == torch.float64 else dtype
    state = QuantState(absmax=to_device(scales, device), code=_code(device), blocksize=BLOCK, dtype=direct)
    return dequantize_blockwise(to_device(quantized, device), state).to(dtype)
