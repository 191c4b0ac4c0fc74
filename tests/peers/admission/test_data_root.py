"""A manifest with the root of its data: trainers cannot choose what is trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from peers.sim.setting import tree_of_zeros
from peers.storage.dataset import Dataset, open_dataset
from peers.trainer import entering
from swarm.data import check_samples, most_proof_bytes, proof_bytes, sample_offsets
from swarm.errors import Refused, SetupError
from swarm.manifest import AdmissionSpec, Run, audit_run, parse_run
from swarm.model.stage_io import input_metas
from swarm.wire.messages import Work, WorkDone
from tests.example import example_run
from tests.peers.admitted import TRAINER, admitting
from tests.peers.loops import swarm


def rooted(run: Run) -> Run:
    """With the root of zeros, and named trainers."""
    return admitting(replace(run, data=replace(run.data, root=tree_of_zeros(run.data.tokens).root.hex())))


RUN = rooted(audit_run(stages=2, steps=3, microbatches_per_step=8))


class Chosen:
    """The data of a trainer that would rather train on something else, and proves what it should send."""

    def __init__(self, run: Run) -> None:
        self._tree = tree_of_zeros(run.data.tokens)

    def batch(self, offsets: list[int]) -> np.ndarray:
        return np.ones((len(offsets), 9), dtype=np.uint8)

    def prove(self, run: Run, offsets: list[int]) -> bytes:
        from swarm.data import prove_samples

        return prove_samples(run, self._tree, offsets)


@pytest.mark.virtual_time
async def test_what_is_of_the_data_is_trained_on() -> None:
    async with swarm(RUN) as s:
        s.add_trainer(TRAINER)
        await s.until_version(1)
        s.kill(s.of_stage(1)[0])
        await s.until_finished()
        s.assert_each_counted_once()


@pytest.mark.virtual_time
async def test_a_named_trainer_cannot_choose_the_data() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        s.add_trainer(TRAINER, batches=Chosen(RUN))
        with pytest.raises(
            SetupError, match=r"is not what the run's data have at byte \d+: train on the data"
        ):
            await s.tasks[TRAINER]
        assert s.done("s0p0") == s.done("s1p0") == 0
        s.tasks.pop(TRAINER)


@pytest.mark.virtual_time
async def test_work_without_a_proof_is_refused_before_it_is_received() -> None:
    run = replace(RUN, admission=AdmissionSpec())
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        stranger = s.add_stranger()
        work = Work(run=run.id, t=0, m=0, version=0, tensors=input_metas(run, 0))
        right = proof_bytes(run, 0, 0)
        for body in ([bytes(9)], [bytes(9), bytes(right - 1)], [bytes(9), bytes(right), b""]):
            with pytest.raises(Refused, match="do not fit the tensors"):
                await stranger.send("s0p0", "work", work, list(body))
        with pytest.raises(Refused, match="is not what the run's data have"):
            await stranger.send("s0p0", "work", work, [bytes(9), b"\1" * right])
        assert s.done("s0p0") == 0 and not s.step("s0p0").ledger.in_progress
        proof = s.batches.prove(run, sample_offsets(run, 0, 0))
        assert await stranger.ask("s0p0", "work", work, WorkDone, [bytes(9), proof])


# --- from a file --------------------------------------------------------------------------------------------


def opened(run: Run, folder: Path) -> tuple[Run, Dataset]:
    """A run on a file of text, pinned, and its data."""
    text = folder / "text.txt"
    text.write_bytes(np.random.default_rng(1).integers(0, 256, 50_000, dtype=np.uint8).tobytes())
    data = open_dataset(run, [text])
    return data.pinned(run), data


FILES = replace(example_run(), data=replace(example_run().data, source="files", tokenizer="bytes"))


def test_publishing_a_run_that_names_trainers_fills_in_the_root(tmp_path: Path) -> None:
    run, data = opened(admitting(FILES), tmp_path)
    assert run.data.root == data.root == run.data.sha256 and parse_run(run.to_toml()) == run
    assert not opened(FILES, tmp_path)[0].data.root, "other runs stay as they were"


@pytest.mark.parametrize("vocab_size", [256, 60_000, 100_000])
def test_samples_of_any_width_are_proven_with_two_kilobytes(tmp_path: Path, vocab_size: int) -> None:
    terms = replace(FILES, model=replace(FILES.built_in, vocab_size=vocab_size))
    run, data = opened(admitting(terms), tmp_path)
    for m in range(4):
        offsets = sample_offsets(run, 1, m)
        (tokens,) = (memoryview(part).cast("B") for part in entering(run, data.batch(offsets)))
        proof = data.prove(run, offsets)
        assert len(proof) == proof_bytes(run, 1, m) <= most_proof_bytes(run)
        assert len(proof) <= 2000 * run.batch.microbatch_size
        check_samples(run, 1, m, tokens, memoryview(proof))
        with pytest.raises(Refused):
            check_samples(run, 1, m + 4, tokens, memoryview(data.prove(run, sample_offsets(run, 1, m + 4))))
        bent = bytearray(tokens)
        bent[-1] ^= 1
        with pytest.raises(Refused, match=rf"what came for \(1, {m}\) is not what the run's data have"):
            check_samples(run, 1, m, memoryview(bent), memoryview(proof))
