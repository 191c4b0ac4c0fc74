"""What the simulation compares with is right, and it looks at all that a step takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from peers.sim.invariants import Invariants, Violation, due_of
from peers.sim.setting import setting_of
from swarm.ids import Generation
from swarm.manifest import NO_ISLAND, Run, audit_run
from swarm.model.stage import StageCompute


def counted(run: Run, island: int, version: int) -> list[float]:
    """How often the weights of a version have counted each microbatch: since the last meeting an island
    counts only its own, each as often as there are islands.
    """
    count = run.islands.count
    if count == 1:
        sizes = [run.microbatches(t) for t in range(version)]
        return [sum(run.M / size for size in sizes if m < size) for m in range(run.M)]
    since = version % (run.islands.local_steps + 1)
    met, share = run.islands.trained(version - since), run.M // count
    return [met + count * since * (m // share == island) for m in range(run.M)]


def test_one_process_counts_each_microbatch_once() -> None:
    """Said by a formula: of tied weights twice, and in each loss with the version that is due."""
    settings = {setting.seed: setting for setting in map(setting_of, (2, 4, 5, 7, 10, 77))}
    assert settings[2].tied and settings[5].tied and settings[77].run.rounds_sums
    assert settings[2].run.islands.count > 1 and settings[4].run.batch.warmup_steps
    for setting in settings.values():
        run, tied = setting.run, setting.tied
        states, losses = due_of(run, tied=tied)
        times = [2 if tied and stage in (0, run.S - 1) else 1 for stage in range(run.S)]
        for (island, stage, version), state in states.items():
            due = [times[stage] * count for count in counted(run, island, version)]
            assert (state["weights"] * -run.M).tolist() == pytest.approx(due, abs=1e-6)
        for t, told in enumerate(losses):
            share = run.microbatches(t) // run.islands.count
            for m, loss in enumerate(told):
                island = m // share if run.islands.count > 1 else NO_ISLAND
                of = m % share + max(0, island) * (run.M // run.islands.count)
                weight = counted(run, island, run.weight_version(t))[of]
                assert loss == pytest.approx(-sum(times) * weight / run.M, abs=1e-6)


def test_all_that_the_next_step_takes_is_compared() -> None:
    """The weights before are those that a step with delayed updates is computed with."""
    run = replace(audit_run(stages=1, steps=2, microbatches_per_step=2), delayed_updates=True)
    checks, compute = Invariants(run), StageCompute(run, 0)
    compute.apply(0, torch.ones(2, dtype=torch.float64), 2.0)
    checks.holds("p", compute)
    state = compute.state.copy()
    compute.load_state(1, {**state, "weights_previous": state["weights"]})
    with pytest.raises(Violation, match=r"I2: stage 0, peer p: version 1 has .*'weights_previous'"):
        checks.holds("p", compute)


def test_a_part_of_tied_weights_is_counted_and_may_be_rounded() -> None:
    """With two bytes a weight a count of one came as 1 + 2^-12, and the run was said to be broken."""
    checks = Invariants(audit_run(stages=2, microbatches_per_step=4))
    checks.part("p", NO_ISLAND, 1, 0, torch.tensor([1.0, 1.0 + 2.0**-12, 1.0, 1.0]))
    for wrong in ([1.0, 2.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0]):
        with pytest.raises(Violation, match="I1: stage 1, peer p: of what stage 0 adds"):
            checks.part("p", NO_ISLAND, 1, 0, torch.tensor(wrong))


def test_a_gradient_of_a_generation_that_is_over_lets_no_stage_take_a_step() -> None:
    checks, later = Invariants(audit_run(stages=2)), Generation(number=1)
    checks.prepared |= {(0, 3, Generation()), (1, 3, Generation()), (1, 3, later)}
    checks.takes("p", 1, 3, Generation())
    with pytest.raises(Violation, match="I5: p takes step 3 in cell 1, which stage 0 has not"):
        checks.takes("p", 1, 3, later)


def test_each_loss_is_compared() -> None:
    """Two that are mistaken for one another have the same mean."""
    warming = audit_run(stages=1, steps=4, microbatches_per_step=4)
    warming = replace(warming, batch=replace(warming.batch, warmup_steps=4, warmup_microbatches=1))
    checks, (*_, due) = Invariants(warming), due_of(warming, tied=False)[1]
    assert due[0] != due[-1]
    checks.loss("t", 3, sum(due) / len(due), due)
    with pytest.raises(Violation, match="I3"):
        checks.loss("t", 3, sum(due) / len(due), due[::-1])
