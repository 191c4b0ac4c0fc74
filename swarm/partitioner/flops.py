"""What operators do, from shapes alone: floating point operations, bytes read and written, views.

A *kind* is a group of ATen calls that cost alike: `aten.mm.default` and `aten.linear.default` are both
`linear`. A call that no table knows counts as memory-bound (`other`). Views cost nothing forward; whether a
`reshape` copies is guessed from what was transposed before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.model.graph.ir import Operator, OpGraph, Value

_KINDS = {
    "linear": "linear addmm mm addmv mv dot",
    "bmm": "bmm baddbmm matmul einsum inner",
    "conv": "conv1d conv2d conv3d convolution _convolution mkldnn_convolution",
    "conv_transpose": "conv_transpose1d conv_transpose2d conv_transpose3d",
    "attention": "scaled_dot_product_attention _scaled_dot_product_flash_attention"
    " _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention",
    "add": "add sub rsub neg lerp ones_like zeros_like full_like fill clamp clamp_min hardtanh threshold",
    "mul": "mul div true_divide addcmul addcdiv square reciprocal sqrt rsqrt abs",
    "relu": "relu leaky_relu relu6",
    "gelu": "gelu erf",
    "silu": "silu sigmoid tanh exp log softplus elu mish hardswish logit sin cos log_sigmoid exp2 log2",
    "pow": "pow",
    "softmax": "softmax _softmax log_softmax _log_softmax _safe_softmax",
    "layer_norm": "layer_norm native_layer_norm",
    "rms_norm": "rms_norm _fused_rms_norm",
    "batch_norm": "batch_norm native_batch_norm _native_batch_norm_legit _batch_norm_impl_index"
    " _native_batch_norm_legit_functional instance_norm",
    "group_norm": "group_norm native_group_norm",
    "max_pool": "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool2d",
    "avg_pool": "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d"
    " _adaptive_avg_pool2d"
    "",
    "upsample": "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d"
    " upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d",
    "mean": "mean sum amax amin max min var std var_mean norm linalg_vector_norm logsumexp cumsum argmax"
    " all any"
    " mse_loss l1_loss smooth_l1_loss huber_loss",
    "embedding": "embedding gather index index_select take_along_dim",
    "cat": "cat stack pad constant_pad_nd roll repeat repeat_interleave index_put scatter",
    "copy": "clone copy contiguous _to_copy tril triu flip",
    "where": "where masked_fill",
    "dropout": "dropout native_dropout bernoulli",
    "cross_entropy": "cross_entropy_loss nll_loss nll_loss_forward nll_loss_nd",
    "view": "view _unsafe_view transpose permute t numpy_T mT matrix_H swapaxes movedim unsqueeze squeeze"
    " expand"
    " expand_as broadcast_tensors broadcast_to detach alias view_as unflatten as_strided real imag"
    " view_as_real view_as_complex lift_fresh_copy diagonal",
    "slice": "slice select narrow chunk split split_with_sizes unbind unfold tensor_split",
}  # fmt: skip
_KIND = {name: kind for kind, names in _KINDS.items() for name in names.split()}
KINDS = (*_KINDS, "other")

MATRIX_KINDS = frozenset({"linear", "bmm", "conv", "conv_transpose", "attention"})
"""Bound by arithmetic, if they are large."""
VIEW_KINDS = frozenset({"view", "slice"})
"""Their outputs are in the memory of their input."""
_MAYBE_VIEWS = frozenset({"reshape", "flatten", "contiguous", "to", "type_as", "expand_copy"})
_TURNING = frozenset(
    {"transpose", "permute", "t", "numpy_T", "mT", "matrix_H", "swapaxes", "movedim", "expand", "expand_as"}
    | {"broadcast_tensors", "broadcast_to", "slice", "select", "narrow", "chunk", "split"}
    | {"split_with_sizes", "unbind", "as_strided"}
)
"""What they give is not contiguous, as a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one operator does, forward and backward, in one microbatch."""

    kind: str
    flops: float = 0.0
    """Of the forward; a multiply-add is two."""
    bytes: float = 0.0
    """Activations that the forward reads and writes."""
    weight_bytes: float = 0.0
    """Parameters and buffers that the forward reads."""
    backward_flops: float = 0.0
    backward_bytes: float = 0.0
    """Gradients and kept tensors that the backward reads and writes."""
    backward_weight_bytes: float = 0.0
    """Gradients of parameters that the backward writes."""
    sums_bytes: float = 0.0
    """Gradients that are added since a value is read by several operators."""
    calls: float = 1.0
    """Kernels launched forward: 0 where nothing runs."""
    backward_calls: float = 0.0


def base_name(target: str) -> str:
    """`aten.add_.Tensor` -> `add`: without namespace, overload and the mark of work in place."""
    parts = target.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def kind_of(target: str) -> str:
    """The kind of an ATen call by its name; `other` if none. See `works` for `reshape` and its like."""
    return _KIND.get(base_name(target), "copy" if base_name(target) in _MAYBE_VIEWS else "other")


def shared_memory(graph: OpGraph) -> tuple[dict[str, str], list[str]]:
    """(of each value the one whose memory it lies in, the kind of each operator), found by following views.

    So `reshape` and its like are settled: `view` or `copy`.
    """
    root: dict[str, str] = {}
    turned: set[str] = set()
    kinds: list[str] = []
    for op in graph.operators:
        name, kind = base_name(op.target), kind_of(op.target)
        source = (*op.inputs, *op.parameters, *op.buffers)[:1]
        if name in _MAYBE_VIEWS and source:
            old, new = graph.values[source[0]], graph.values[op.outputs[0]] if op.outputs else None
            same = new is not None and old.dtype == new.dtype
            kind = "view" if same and source[0] not in turned else "copy"
        if kind == "bmm" and len((*op.inputs, *op.parameters)) == 2:
            shapes = [graph.values[operand].shape for operand in (*op.inputs, *op.parameters)]
            kind = "linear" if min(map(len, shapes)) <= 2 else "bmm"  # matmul by one matrix
        kinds.append(kind)
        raw = op.target.split(".")[1:2]
        in_place = bool(raw) and raw[0].endswith("_") and not raw[0].startswith("__")
        if source and (kind in VIEW_KINDS or in_place):
            for number, output in enumerate(op.outputs):
                # broadcast_tensors gives a view of each of its inputs
                of = (
                    op.inputs[number]
                    if name == "broadcast_tensors" and number < len(op.inputs)
                    else source[0]
                )
                root[output] = root.get(of, of)
                if name in _TURNING or (of in turned and name not in _MAYBE_VIEWS):
                    turned.add(output)
    return {name: root.get(name, name) for name in graph.values}, kinds


def has_backward(graph: OpGraph, op: Operator) -> bool:
    """Whether a gradient comes back to this operator."""
    return any(graph.values[name].differentiable for name in op.outputs)


def works(graph: OpGraph) -> tuple[Work, ...]:
    """The work of each operator, by index."""
    _, kinds = shared_memory(graph)
    back = [op for op in graph.operators if has_backward(graph, op)]
    last = {name: op.index for op in back for name in op.inputs}
    shared = {
        # Each reader but the last has its gradient added to what is there: read two, write one.
        op.index: sum(
            3.0 * graph.values[name].nbytes
            for name in op.inputs
            if graph.values[name].differentiable and op.index < last[name]
        )
        for op in back
    }
    found = []
    for op, kind in zip(graph.operators, kinds, strict=True):
        inputs = [graph.values[name] for name in op.inputs]
        weights = [graph.values[name] for name in (*op.parameters, *op.buffers)]
        outputs = [graph.values[name] for name in op.outputs]
        found.append(work(kind, inputs, weights, outputs, float(shared.get(op.index, 0.0))))
    return tuple(found)


def work(
    kind: str, inputs: list[Value], weights: list[Value], outputs: list[Value], sums_bytes: float = 0.0
) -> Work:
    """The work of one call. `weights`: the parameters and buffers that it reads."""
    differentiable = any(value.differentiable for value in outputs)
    operands = [*inputs, *weights]
    wanted = [value for value in operands if value.differentiable] if differentiable else []
    out_bytes = float(sum(value.nbytes for value in outputs))
    if kind == "view":
        return Work(kind=kind, calls=0.0, sums_bytes=sums_bytes)
    if kind == "slice":
        # Forward a view; backward a gradient of the whole, of which most is zeros.
        back = sum(value.nbytes for value in wanted) + out_bytes if wanted else 0.0
        return Work(
            kind=kind,
            calls=0.0,
            backward_bytes=back,
            backward_calls=float(bool(wanted)),
            sums_bytes=sums_bytes,
        )
    flops = operations(kind, inputs, weights, outputs)
    read = float(sum(_read_bytes(kind, value, out_bytes) for value in inputs))
    weight_bytes = float(sum(_read_bytes(kind, value, out_bytes) for value in weights))
    backward_bytes = backward_flops = backward_weight = 0.0
    if wanted:
        for value in wanted:
            backward_bytes += out_bytes  # the gradient, read
            if kind in MATRIX_KINDS:
                backward_bytes += value.nbytes if value in inputs else 0.0
            elif kind == "embedding":
                backward_bytes += out_bytes + value.nbytes
            else:
                largest = max(out_bytes, float(value.nbytes))
                backward_bytes += largest + (out_bytes if value.nbytes < out_bytes else 0.0)
        matrices = [value for value in wanted if len(value.shape) > 1]
        if kind == "attention":
            backward_flops = 2.5 * flops  # the scores are computed once more
        elif kind in MATRIX_KINDS:
            backward_flops = flops * max(1, min(2, len(matrices)))
        else:
            backward_flops = flops * len(wanted)
        backward_weight = float(sum(value.nbytes for value in wanted if value in weights))
    return Work(
        kind=kind,
        flops=flops,
        bytes=read + out_bytes,
        weight_bytes=weight_bytes,
        backward_flops=backward_flops,
        backward_bytes=backward_bytes,
        backward_weight_bytes=backward_weight,
        sums_bytes=sums_bytes,
        backward_calls=float(len(wanted)),
    )


def operations(kind: str, inputs: list[Value], weights: list[Value], outputs: list[Value]) -> float:
    """Floating point operations of the forward; a multiply-add is two, an element of anything else one."""
    if not outputs:
        return 0.0
    out = outputs[0]
    if kind == "attention" and len(inputs) >= 2:
        # Scores and values. Whether the upper half is masked is not known: all of it counts.
        query, key = inputs[0], inputs[1]
        return 2.0 * (query.numel + out.numel) * key.shape[-2]
    if kind in ("conv", "conv_transpose"):
        tensors = [value for value in (*inputs, *weights) if len(value.shape) >= 3]
        if len(tensors) >= 2:
            image, weight = tensors[0], tensors[1]
            wide = image if kind == "conv_transpose" or _transposed(image, weight, out) else out
            return 2.0 * wide.numel * math.prod(weight.shape[1:])
    if kind in ("linear", "bmm"):
        matrices = [value for value in (*inputs, *weights) if len(value.shape) >= 2] or inputs[:1]
        # The last two: what is added goes first, in addmm and baddbmm. One, if it is multiplied by itself.
        a, b = (matrices * 2)[-2:]
        batch = math.prod(out.shape[:-2]) if kind == "bmm" and min(len(a.shape), len(b.shape)) > 2 else 1
        # [m, k] and [k, n] hold mk · kn numbers, the product mn: together the square of mkn.
        return 2.0 * math.sqrt(float(a.numel) * b.numel * out.numel / max(1, batch))
    return float(max(value.numel for value in (*inputs, *outputs)))


def _transposed(image: Value, weight: Value, out: Value) -> bool:
    """Whether an `aten.convolution` is a transposed one: its weight is [in, out / groups, ...]."""
    if image.shape[1] != out.shape[1]:
        return weight.shape[0] == image.shape[1]
    return math.prod(out.shape[2:]) > math.prod(image.shape[2:])


def _read_bytes(kind: str, value: Value, out_bytes: float) -> float:
    """Of an operand: whole, but a lookup reads only the rows that it gives."""
    return min(float(value.nbytes), out_bytes) if kind == "embedding" else float(value.nbytes)
