"""How much memory a stage takes, from the operator graph alone.

What autograd keeps of a call for its backward is a rule for each kind. Tensors that share memory count once,
at the operator that made the memory. A stage's peak is its worst moment: going forward what is kept grows;
going back it shrinks, while gradients of the weights (all of them at once where sums are exact, see
`swarm.model.stage`) and of the activations come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from swarm.model.graph.ir import DTYPE_BYTES, Operator, OpGraph
from swarm.model.layout import Holding
from swarm.partitioner.flops import base_name, has_backward, kind_of, shared_memory


class Kept:
    """What autograd keeps of each operator of a graph, by index."""

    def __init__(self, graph: OpGraph) -> None:
        self.root, kinds = shared_memory(graph)
        """Of a value: the one in whose memory it lies."""
        self.saves: list[frozenset[str]] = []
        """The roots of what it saves for its backward."""
        self.beside: list[float] = []
        """Bytes that no other operator sees: places of maxima, masks of dropout, logarithms."""
        for op, kind in zip(graph.operators, kinds, strict=True):
            names, nbytes = _saved_by(graph, op, kind) if has_backward(graph, op) else ([], 0.0)
            self.saves.append(frozenset(self.root[name] for name in names))
            self.beside.append(nbytes)
        saved = frozenset[str]().union(*self.saves)
        self.saved = [
            nbytes + sum(graph.values[name].nbytes for name in op.outputs if name in saved)
            for op, nbytes in zip(graph.operators, self.beside, strict=True)
        ]
        """Bytes of what it makes, and makes beside that, which are held until the backward. A value counts
        where it is made, whoever saves it; a view never."""


_SAVES_NOTHING = frozenset({"view", "slice", "copy", "add", "cat", "mean", "upsample"})
_SAVES_OUTPUT = frozenset({"relu", "softmax"})
_OUTPUT_NOT_INPUT = frozenset({"sigmoid", "tanh", "exp", "exp2", "elu", "sqrt", "rsqrt", "reciprocal"})
_MEANS_THAT_SAVE = frozenset(
    {"amax", "amin", "max", "min", "var", "std", "var_mean", "norm", "linalg_vector_norm", "logsumexp"}
    | {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
)
_INDEX_BYTES = 8


def _saved_by(graph: OpGraph, op: Operator, kind: str) -> tuple[list[str], float]:
    """(values that autograd saves for the backward of this call, bytes that it makes for it besides)."""
    values, name, inputs = graph.values, base_name(op.target), list(op.inputs)
    if name in _MEANS_THAT_SAVE:
        return inputs, 0.0
    if kind in _SAVES_NOTHING:
        return [], 0.0
    if kind in _SAVES_OUTPUT or name in _OUTPUT_NOT_INPUT:
        return list(op.outputs), 0.0
    if kind in ("mul", "bmm", "linear") and name not in ("square", "abs"):
        # Each factor is saved for the gradient of the others; a number that is no tensor needs none.
        factors = [*inputs, *op.parameters, *op.buffers]
        if kind == "linear":
            factors = [factor for factor in factors if len(values[factor].shape) > 1]
        wanted = [factor for factor in factors if values[factor].differentiable]
        return [one for one in inputs if one in factors and any(other != one for other in wanted)], 0.0
    if kind == "max_pool":
        return inputs, float(_INDEX_BYTES * values[op.outputs[0]].numel)
    if kind == "cross_entropy":
        # The logarithms of the probabilities, made inside.
        return inputs[1:], float(values[inputs[0]].nbytes) if name == "cross_entropy_loss" else 0.0
    if kind == "dropout":
        return [], float(sum(values[value].nbytes for value in op.outputs))  # the mask, as numbers
    if kind == "where":
        return [value for value in inputs if values[value].dtype == "bool"], 0.0
    if kind == "attention":
        # A mask of truth values is turned into numbers.
        masks = [value for value in inputs if values[value].dtype == "bool"]
        numbers = sum(values[mask].numel for mask in masks) * DTYPE_BYTES[values[op.outputs[0]].dtype]
        return [*(value for value in inputs if value not in masks), *op.outputs], float(numbers)
    if kind == "rms_norm":
        return inputs, float(values[op.outputs[0]].nbytes)  # what is multiplied by the weight
    if kind == "embedding":
        return [value for value in inputs if not values[value].differentiable], 0.0
    return inputs, 0.0


def _workspace(graph: OpGraph, op: Operator) -> tuple[float, float]:
    """(forward, backward) bytes that a call takes for itself while it runs."""
    kind, values = kind_of(op.target), graph.values
    if kind == "cross_entropy" and op.inputs:
        # Its backward makes a gradient of the logarithms, then one of what they were taken of.
        return 0.0, float(values[op.inputs[0]].nbytes)
    if kind in ("conv", "conv_transpose") and op.inputs:
        weight = [values[name] for name in (*op.parameters, *op.inputs[1:]) if len(values[name].shape) > 2]
        if weight and math.prod(weight[0].shape[2:]) > 1:
            # Kernels want blocks of channels: all operands are copied (oneDNN; cuDNN wants about as much).
            operands = float(weight[0].nbytes + values[op.inputs[0]].nbytes)
            return operands, operands + sum(values[name].nbytes for name in op.outputs)
    return 0.0, 0.0


class MemoryLine:
    """The memory of every stretch of a row of operators: `peak(start)[k]` is that of start … start + k.

    Without the state of its weights, and without what the cheap operators make: several operators share those
    (`swarm.partitioner.segments`).
    """

    def __init__(
        self,
        graph: OpGraph,
        kept: Kept,
        reads: Mapping[int, Sequence[str]],
        order: Sequence[int],
        holding: Holding,
    ) -> None:
        """`order`: indices of operators, a topological order. `reads`: what has to be there for each."""
        self._inflight = holding.inflight
        spans = _Spans(graph, kept, reads, order)
        n, values, operators = len(order), graph.values, [graph.operators[index] for index in order]
        is_saved = spans.saved_at < n

        def alive(amount: np.ndarray, last: np.ndarray = spans.last) -> np.ndarray:
            """[n + 1] bytes of what lies from where it is made to `last`, after so many operators."""
            steps, held = np.zeros(n + 2), amount * (last > spans.made)
            np.add.at(steps, spans.made + 1, held)
            np.add.at(steps, last + 1, -held)
            return np.cumsum(steps)[: n + 1]

        self._made_at, self._last_at, self._loose = spans.made, spans.last, spans.nbytes * ~is_saved
        self._alive = alive(spans.nbytes)
        self._gradient = alive(spans.gradient_bytes)
        self._wider = alive(spans.wider_bytes)
        # Saved by nobody so far: held only because a later stage wants it.
        self._unsaved = alive(spans.nbytes, np.minimum(spans.saved_at, spans.last))
        self._inputs_saved = alive(spans.nbytes, np.where(is_saved, spans.saved_at, -1))

        made = np.array([kept.saved[index] for index in order])
        self._made = np.concatenate(([0.0], np.cumsum(made)))
        freed, beside, own, dying = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
        np.add.at(freed, spans.saved_at[is_saved], spans.nbytes[is_saved])
        read = spans.made < spans.last
        np.add.at(own, spans.last[read], (spans.gradient_bytes + spans.wider_bytes)[read])
        np.add.at(dying, spans.last[read], self._loose[read])
        seen: set[str] = set()
        weights = np.zeros(n)
        for number, op in enumerate(operators):
            beside[number] = kept.beside[op.index]
            going, coming = _workspace(graph, op)
            dying[number] += going
            own[number] += coming
            for name in op.parameters:
                if name not in seen and values[name].differentiable:
                    seen.add(name)
                    weights[number] += values[name].nbytes
        self._freed = np.concatenate(([0.0], np.cumsum(freed + beside)))
        self._forward = self._made[1:] + alive(self._loose)[1:] + dying
        self._weights = np.concatenate(([0.0], np.cumsum(weights))) * holding.gradients_at_once
        alone = 0.0 if holding.gradients_at_once else weights
        self._backward = (
            self._freed[1:] - self._weights[:-1] + self._gradient[1:] + self._wider[1:] + own + alone
        )

    def peak(self, start: int) -> np.ndarray:
        """[n - start] bytes of the microbatches in flight at worst, by length of the stretch less one."""
        ends = slice(start + 1, None)
        inputs, outputs = self._alive[start], self._unsaved[ends] - self._passing_through(start)
        forward = np.maximum.accumulate(self._forward[start:]) - self._made[start]
        gone = self._freed[start] + self._inputs_saved[start]
        backward = np.maximum.accumulate(self._backward[start:]) - gone + self._weights[ends] + outputs
        # Whoever called the backward holds the gradients of the outputs; a later stage's `cat` is not here.
        backward += self._gradient[ends] - self._wider[ends]
        # What is left when all is done: the gradients of the weights, of the outputs and of the inputs.
        left = (
            self._weights[ends]
            - self._weights[start]
            + outputs
            + self._gradient[ends]
            + self._gradient[start]
        )
        waiting = (self._inflight - 1) * (inputs + self._made[ends] - self._made[start] + outputs)
        return np.maximum(np.maximum(forward, backward), left) + inputs + waiting

    def _passing_through(self, start: int) -> np.ndarray:
        """[n - start] bytes of values that come in, go out and are saved by no operator, by length."""
        through = (self._made_at < start) & (self._last_at > start)
        steps = np.zeros(len(self._forward) + 1)
        np.add.at(steps, self._last_at[through], self._loose[through])
        # One that is last read at k comes out of the stretches that end before k.
        return np.cumsum(steps[::-1])[::-1][start + 1 :]


class _Spans:
    """The memory of each tensor (and its views) in a row of operators, by their places: arrays of tensors."""

    def __init__(
        self, graph: OpGraph, kept: Kept, reads: Mapping[int, Sequence[str]], order: Sequence[int]
    ) -> None:
        made: dict[str, int] = {kept.root[name]: -1 for name in graph.inputs}
        last, saved_at = dict(made), dict[str, int]()
        for number, index in enumerate(order):
            op = graph.operators[index]
            for name in op.outputs:
                made.setdefault(kept.root[name], number)
            for name in (*reads[index], *op.outputs):
                last[kept.root[name]] = number
            for root in kept.saves[index] & made.keys():
                saved_at.setdefault(root, number)
        wider = dict.fromkeys(made, 0.0)
        for number, index in enumerate(order):
            op = graph.operators[index]
            if kind_of(op.target) == "cat":
                # Their gradients are views of one; the part that was made first holds it for longest.
                parts = [kept.root[n] for n in reads[index] if graph.values[n].differentiable]
                first = min(parts, key=lambda root: (made[root], root), default=None)
                if first is not None and last[first] == number:
                    whole = sum(graph.values[name].nbytes for name in op.outputs)
                    wider[first] = float(max(0, whole - graph.values[first].nbytes))
        values = [graph.values[root] for root in made]
        self.nbytes = np.array([float(value.nbytes) for value in values])
        self.gradient_bytes = self.nbytes * [value.differentiable for value in values]
        self.wider_bytes = np.array([wider[root] for root in made])
        """Of a larger gradient that its own is a view of, beyond its own, until that is added to or sent."""
        self.made = np.array(list(made.values()), dtype=np.int64)
        """-1: an input of the model."""
        self.last = np.array([last[root] for root in made], dtype=np.int64)
        """Its last reader."""
        self.saved_at = np.array([saved_at.get(root, len(order)) for root in made], dtype=np.int64)
        """The first whose backward needs it; as many as there are operators if none does."""


def state_bytes(graph: OpGraph, name: str, holding: Holding) -> float:
    """Bytes that the parameter or buffer `name` takes: buffers are only held."""
    value = graph.values[name]
    if name in graph.buffers:
        return float(value.nbytes)
    return holding.state_bytes(value.numel, DTYPE_BYTES[value.dtype])
