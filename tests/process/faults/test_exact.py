"""A language model trained by processes that are killed equals the same run in a single process."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from peers.events import Evaluated, StepDone, Stepped
from peers.storage.samples import open_eval
from swarm.evaluation import eval_offsets, is_due, mean_loss
from swarm.manifest import CodecSpec, EvalSpec, Run, demo_run
from swarm.model.evaluate import loss_of
from swarm.model.reference import SingleProcess
from tests.process.swarm_processes import Swarm, farthest

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]


def tiny(*, dtype: str, codec: str, steps: int) -> Run:
    """3 layers of width 32 on 3 stages, 16 tokens a sample, 4 microbatches a step."""
    base = demo_run(stages=3, steps=steps, codec=codec)
    return replace(
        base,
        dtype=dtype,
        model=replace(base.model, hidden=32, heads=4, ffn_hidden=64),
        data=replace(base.data, sequence_length=16),
        batch=replace(base.batch, microbatch_size=2, microbatches_per_step=4),
        optimizer=replace(base.optimizer, lr=1e-2, warmup_steps=2),
        codec=CodecSpec(forward=codec, backward=codec),
    )


def test_weights_equal_a_single_process_to_rounding_whoever_was_killed(tmp_path: Path) -> None:
    """float64, codec none: a kill at each fault point, and three at random moments; 1e-9 relative.

    So only the order of additions differs: a lost or a doubled microbatch would differ in the third digit.
    """
    rng = random.Random(20)
    run = tiny(dtype="float64", codec="none", steps=1000)
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        doomed = [swarm.peer(0, kill_at="forward:5"), swarm.peer(1, kill_at="backward:5")]
        doomed.append(swarm.peer(2, kill_at="reduce:3"))
        swarm.peers(1)
        doomed.append(swarm.trainer("--window", "3", kill_at="trainer:9"))
        trainer = swarm.trainer("--window", "3")
        for program in doomed:
            swarm.dies(program)
        swarm.leaves(trainer)

        prepared = swarm.peer(0, kill_at="prepared:2")
        swarm.peers(2)
        trainer = swarm.trainer("--window", "3")
        swarm.dies(prepared)
        for stage in rng.sample(range(run.S), run.S):
            threading.Event().wait(rng.uniform(0.0, 0.4))
            swarm.kill(rng.choice(swarm.serving(stage)))
        swarm.goes_on()
        swarm.leaves(trainer)

        steps = swarm.version() + 3
        swarm.train_to(steps)
        weights = swarm.audited_weights()
    assert farthest(weights, swarm.single_process(steps)) < 1e-9


def test_a_run_is_evaluated_on_the_way_whoever_is_killed(tmp_path: Path) -> None:
    """float32: every loss, and those of one process's weights on held-out samples, to the last bit."""
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("what was never trained on, " * 40)
    base = tiny(dtype="float32", codec="blockwise8", steps=8)
    run = replace(base, eval=EvalSpec(every=3, samples=4 * base.batch.microbatch_size))
    with Swarm(tmp_path, run, held_out=[held_out]) as swarm:
        swarm.bootstrap()
        swarm.peer(1, kill_at="backward:9")
        swarm.peers(1)
        trainer = swarm.trainer("--window", "3")
        swarm.ends(trainer)
        told, done = trainer.heard(Evaluated), trainer.heard(StepDone)
        weights = swarm.audited_weights()
    text, single = open_eval(swarm.run, [held_out], None), SingleProcess(swarm.run, swarm.data.batch)
    assert text is not None
    expected: dict[int, float] = {}
    for t in range(run.steps + 1):
        if is_due(swarm.run, t):
            loss = loss_of(swarm.run, single.named_weights())
            losses = [loss(text.batch(eval_offsets(swarm.run, e))) for e in range(4)]
            expected[t] = mean_loss(losses, [1] * 4)
        if t < run.steps:
            losses = single.step(t)
            assert (done[t].t, done[t].loss) == (t, sum(losses) / run.M)
            assert done[t].losses in ((), tuple(losses))  # who hears of a step early has not all answers
    assert {event.version: event.loss for event in told} == expected and list(expected) == [0, 3, 6, 8]
    assert farthest(weights, single) == 0.0


def test_peers_with_other_numbers_of_threads_and_cores_change_no_bit(tmp_path: Path) -> None:
    """float32, width 512, where three threads in a product round otherwise than one: the difference is 0."""
    base = tiny(dtype="float32", codec="blockwise8", steps=3)
    run = replace(
        base,
        model=replace(base.model, layers=2, stages=2, hidden=512, heads=8, ffn_hidden=1024),
        data=replace(base.data, sequence_length=64),
        batch=replace(base.batch, microbatch_size=4, microbatches_per_step=4),
    )
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        many = [swarm.peer(stage, "--threads", str(2 + stage)) for stage in range(run.S)]
        swarm.peers(2)
        os.sched_setaffinity(many[0].pid, {min(os.sched_getaffinity(0))})
        trainer = swarm.trainer("--window", "3")
        swarm.ends(trainer)
        told = trainer.heard(StepDone)
        weights = swarm.weights()
        took_part = [len(p.heard(Stepped)) for p in many]
    single = SingleProcess(swarm.run, swarm.data.batch)
    for event in told:
        losses = single.step(event.t)
        assert event.loss == sum(losses) / run.M
    assert farthest(weights, single) == 0.0
    assert all(took_part)
