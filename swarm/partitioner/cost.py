"""How long operators and stages take on a device, and how much memory, from the operator graph alone.

A device is known by a law for each kind of operator, forward and backward (`peers.programs.calibrate` times
some hundred small calls on the device itself, in seconds):

    seconds = overhead + flops / rate + bytes / bandwidth + weight bytes / bandwidth + far bytes / bandwidth

Far bytes are those beyond what a cache holds. The terms are added, where a roofline would take the larger:
one core does not overlap them. FusionLLM's workload estimator (Tang et al., 2024) fits one factor to a
device; a law for each kind follows shapes too, since a thin product is mostly the bytes of its matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from swarm.errors import SetupError
from swarm.partitioner.flops import Work

FAR_BYTES = (1 << 20, 16 << 20)
"""Of a call's working set: what fits near a core, and what fits into a large shared cache."""


@dataclass(frozen=True, slots=True)
class Law:
    """Seconds of one call of a kind, as a sum of what it does. All terms are at least 0."""

    overhead_s: float
    flop_s: float
    """Per floating point operation."""
    byte_s: float
    """Per byte of activations."""
    weight_byte_s: float
    far_byte_s: tuple[float, ...]
    """Per byte beyond each of `FAR_BYTES`."""

    def seconds(self, flops: float, moved: float, weight_bytes: float) -> float:
        """Of one call."""
        terms = _terms(flops, moved, weight_bytes)
        laws = (self.overhead_s, self.flop_s, self.byte_s, self.weight_byte_s, *self.far_byte_s)
        return math.fsum(term * law for term, law in zip(terms, laws, strict=True))


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed call: what it does, and how long it took forward and backward (0: it has none)."""

    work: Work
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What is known of a device, enough to predict any stage on it."""

    forward: Mapping[str, Law]
    """By kind; `other` is for those that were not timed."""
    backward: Mapping[str, Law]

    def operator_s(self, work: Work) -> tuple[float, float]:
        """Seconds of (forward, backward) of one operator in one microbatch."""
        forward = backward = 0.0
        if work.calls:
            law = self.forward.get(work.kind) or self.forward["other"]
            forward = law.seconds(work.flops, work.bytes, work.weight_bytes)
        if work.backward_calls:
            law = self.backward.get(work.kind) or self.backward["other"]
            backward = law.seconds(work.backward_flops, work.backward_bytes, work.backward_weight_bytes)
        if work.sums_bytes:
            backward += self.forward["add"].seconds(0.0, work.sums_bytes, 0.0)
        return forward, backward


def fit(samples: Sequence[Sample]) -> DeviceModel:
    """The laws that fit the samples best: least squares of relative errors, no term below 0.

    Raises:
        SetupError: a time is not above 0, or there is no sample of `add`, which stands for unknown kinds.
    """
    kinds = sorted({sample.work.kind for sample in samples})
    if "add" not in kinds:
        raise SetupError("a device model needs samples of `add`, by which sums of gradients are reckoned")
    forward, backward = {}, {}
    for kind in kinds:
        mine = [(s, s.work) for s in samples if s.work.kind == kind]
        forward[kind] = _law([(w.flops, w.bytes, w.weight_bytes, s.forward_s) for s, w in mine])
        back = [
            (w.backward_flops, w.backward_bytes, w.backward_weight_bytes, s.backward_s)
            for s, w in mine
            if w.backward_calls
        ]
        if back:
            backward[kind] = _law(back)
    forward.setdefault("other", forward["add"])
    backward.setdefault("other", backward.get("mul", forward["add"]))
    return DeviceModel(forward, backward)


def _terms(flops: float, moved: float, weight_bytes: float) -> tuple[float, ...]:
    far = (max(0.0, moved + weight_bytes - limit) for limit in FAR_BYTES)
    return (1.0, flops, moved, weight_bytes, *far)


def _law(calls: Sequence[tuple[float, float, float, float]]) -> Law:
    """The law of calls: (operations, bytes of activations, bytes of weights, seconds) of each."""
    took_s = [call[-1] for call in calls]
    if not all(math.isfinite(seconds) and seconds > 0 for seconds in took_s):
        raise SetupError(f"a call cannot take {min(took_s):g} s: is the device's clock right?")
    terms = np.array([_terms(*call[:-1]) for call in calls])
    scale = np.maximum(terms.max(axis=0), 1e-30)
    weighted = terms / scale / np.array(took_s)[:, None]
    found = nnls(weighted, np.ones(len(took_s)))[0] / scale
    overhead, flop, byte, weight_byte, *far = (float(value) for value in found)
    return Law(overhead, flop, byte, weight_byte, tuple(far))
