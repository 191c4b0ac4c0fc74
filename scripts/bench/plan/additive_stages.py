"""Stages as sets of devices, in several divisions side by side, and what each swap of two would cost.

The additive objective has each boundary's slowest pair of the best matching. The *smooth* cost that guides
the search needs no matching. What a device pays to reach a neighbouring stage is a norm of its lines there
with a negative power: little less than its fastest. Of what the devices on both sides pay, a norm with the
same power is taken: little more than the slowest. So a swap changes sums alone. Single precision, in units of
the largest price.

Letters: N devices, S stages, D devices of a stage, R divisions. R is the last axis, which makes numpy's inner
loops long.
"""

from __future__ import annotations

import numpy as np

from scripts.bench.plan.additive_objective import AdditiveTerms

FASTEST = 0.01
"""Of the largest price: faster lines are alike, so that their powers have room in single precision."""


class Divisions:
    """Divisions into stages that are annealed together, each step by a swap between two of its stages."""

    def __init__(self, terms: AdditiveTerms, stages_RSD: np.ndarray) -> None:
        self.terms = terms
        self._unit_s = max(float(terms.exchange_s.max()), float(terms.transfer_s.max())) or 1.0
        self._exchange_NN = (terms.exchange_s / self._unit_s).astype(np.float32)
        self._others_DD = 1.0 - np.eye(terms.replicas, dtype=np.float32)
        self._not_self_DD11 = np.where(self._others_DD, np.float32(0.0), -np.float32(np.inf))[
            :, :, None, None
        ]
        self.sharpen(1)
        self.place(stages_RSD)

    def place(self, stages_RSD: np.ndarray) -> None:
        """Start again from these."""
        count, stages, replicas = stages_RSD.shape
        # Before the first stage and after the last is one of a device that there is not.
        self._device_SDR = np.full((stages + 1, replicas, count), len(self._exchange_NN))
        self._device_SDR[:-1] = stages_RSD.transpose(1, 2, 0)
        inside = self._exchange_NN[stages_RSD[:, :, :, None], stages_RSD[:, :, None, :]]
        self._slowest_SR = inside.sum(axis=3).max(axis=2).T.copy()

    @property
    def stages(self) -> np.ndarray:
        """[R, S, D] the devices of each stage, in no order."""
        return self._device_SDR[:-1].transpose(2, 0, 1).copy()

    def sharpen(self, squarings: int) -> None:
        """From now on with powers of 2, 4, 8, 16 for 1, 2, 3, 4."""
        self._squarings = squarings
        price_NN = np.maximum(self.terms.transfer_s / self._unit_s, FASTEST).astype(np.float32)
        self._nearness_NN = np.pad(1.0 / self._power(price_NN), (0, 1), constant_values=1.0)
        np.fill_diagonal(self._nearness_NN, 1e-20)  # of a device and itself, which is no line

    def _power(self, x: np.ndarray) -> np.ndarray:
        for _ in range(self._squarings):
            x = x * x
        return x

    def _root(self, x: np.ndarray) -> np.ndarray:
        for _ in range(self._squarings):
            x = np.sqrt(x)
        return x

    def changes_s(self, pair_2R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[D, D, R] by how much the smooth cost changes when a device of a stage and one of a later stage
        change places; and [D, D, 2, R] what the exchanges of the two stages would then be.
        """
        own_D2R = self._device_SDR[pair_2R, :, np.arange(pair_2R.shape[1])].transpose(2, 0, 1)
        change_DDR, slowest_DD2R = self._exchange_changes(own_D2R, pair_2R)
        change_DDR += self._transfer_changes(own_D2R, pair_2R)
        return change_DDR * np.float32(self._unit_s), slowest_DD2R

    def _exchange_changes(self, own_D2R: np.ndarray, pair_2R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inside = self._exchange_NN[own_D2R[:, None], own_D2R[None]]
        across = self._exchange_NN[own_D2R[:, None], own_D2R[None, :, ::-1]]
        without = inside.sum(axis=1)[:, None] - inside + self._not_self_DD11  # [stays, goes], then who comes
        slowest = (without[:, :, None] + across[:, None]).max(axis=0)
        np.maximum(slowest, across.sum(axis=0) - across, out=slowest)
        slowest[:, :, 1] = slowest[:, :, 1].swapaxes(0, 1).copy()
        power_SR = self._power(self._slowest_SR)
        before_R = self._root(power_SR.sum(axis=0))
        np.put_along_axis(power_SR, pair_2R, np.float32(0.0), axis=0)
        return self._root(self._power(slowest).sum(axis=2) + power_SR.sum(axis=0)) - before_R, slowest

    def _transfer_changes(self, own_D2R: np.ndarray, pair_2R: np.ndarray) -> np.ndarray:
        (replicas, _, count), others_DD = own_D2R.shape, self._others_DD
        # Four boundaries: before and after the first stage, before and after the second.
        beside_4R = (pair_2R[:, None] + np.array([[-1], [1]])).reshape(4, count)
        there_4R = (beside_4R >= 0) & (beside_4R < self.terms.stages)
        beside_D4R = self._device_SDR[beside_4R, :, np.arange(count)].transpose(2, 0, 1)
        near = self._nearness_NN[own_D2R.repeat(2, axis=1)[:, None], beside_D4R]
        new = self._nearness_NN[own_D2R[:, ::-1].repeat(2, axis=1)[:, None], beside_D4R]
        reach = 1.0 / near.sum(axis=1)
        before_4R = reach.sum(axis=0) + (1.0 / near.sum(axis=0)).sum(axis=0)
        # Sums without one are made anew: next to a large power the others would be lost in rounding.
        without = (others_DD @ near.reshape(replicas, -1)).reshape(near.shape)
        reached = without[:, None] + new
        after = np.reciprocal(reached, out=reached).sum(axis=2)
        after += (others_DD @ reach.reshape(replicas, -1)).reshape(replicas, 1, 4, count)
        after += 1.0 / new.sum(axis=1)
        change = (self._root(after) - self._root(before_4R)) * there_4R
        change[:, :, 2:] = change[:, :, 2:].swapaxes(0, 1).copy()
        beside_r = np.flatnonzero(pair_2R[0] + 1 == pair_2R[1])
        if len(beside_r):  # the boundary between the two has both its sides changed
            change[:, :, 2, beside_r] = 0.0
            after = self._between(near[:, :, 1, beside_r], new[:, :, 2, beside_r], new[:, :, 1, beside_r])
            change[:, :, 1, beside_r] = self._root(after) - self._root(before_4R[1, beside_r])
        # There and back; and the sums are those of the devices of both sides.
        return change.sum(axis=2) * np.float32(2.0 / 2.0 ** (0.5**self._squarings))

    def _between(self, near: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """[D, D, r] the sum at the boundary of two stages of which a pair changes places.

        Args:
            near: [D, D, r] between the two; `first`, `second`: within them.
        """
        every, total = np.arange(len(near)), np.zeros_like(near)
        for side, home, away in ((near, first, second), (near.swapaxes(0, 1), second, first)):
            # [stays, goes, comes, r]; where the one that stays is the one that goes, the one that comes.
            reached = home[:, :, None] + (self._others_DD @ side)[:, None]
            reached[every, every] = away.sum(axis=1) + side
            part = np.reciprocal(reached, out=reached).sum(axis=0)
            total += part if side is near else part.swapaxes(0, 1)
        return total

    def step(self, heat_R: np.ndarray, rng: np.random.Generator) -> None:
        """A swap of each, drawn by exp(-change / heat) from those of two stages, or none."""
        stages, replicas, count = self.terms.stages, self.terms.replicas, len(heat_R)
        first_R = rng.integers(0, stages, count)
        pair_2R = np.sort((first_R, (first_R + rng.integers(1, stages, count)) % stages), axis=0)
        change, slowest = self.changes_s(pair_2R)
        drawn = rng.standard_exponential((replicas**2 + 1, count), dtype=np.float32)
        np.log(np.maximum(drawn, np.float32(1e-30)), out=drawn)
        drawn[:-1] += (change / heat_R.astype(np.float32)).reshape(-1, count)
        choice_R = drawn.argmin(axis=0)
        r = np.flatnonzero(choice_R < replicas**2)
        (a, b), (i, j), device = pair_2R[:, r], np.divmod(choice_R[r], replicas), self._device_SDR
        device[a, i, r], device[b, j, r] = device[b, j, r], device[a, i, r]
        self._slowest_SR[a, r], self._slowest_SR[b, r] = slowest[i, j, 0, r], slowest[i, j, 1, r]
