"""Samples that code makes: of one form, in range, and those of the manifest; a manifest bound to them."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from peers.programs.manifest_pinning import pinned
from peers.storage.samples import Samples, open_data, open_samples
from peers.trainer import entering
from peers.trainer.samples import fetched
from swarm.data import sample_offsets
from swarm.errors import SetupError
from swarm.manifest import BatchSpec, CustomModelSpec, DataSpec, Run, demo_run

HERE = "tests.model.graph.custom_models"


def of(code: str) -> Run:
    return replace(
        demo_run(steps=20),
        model=CustomModelSpec(kind="code", source=f"{HERE}:classifier", stages=2),
        data=DataSpec(source="code", code=f"{HERE}:{code}", sequence_length=1),
        batch=BatchSpec(microbatch_size=3, microbatches_per_step=2),
    )


class Far:
    """Samples of which some are here."""

    def batch(self, offsets: list[int]) -> np.ndarray:
        return np.array(offsets)

    def has(self, offsets: list[int]) -> bool:
        return 7 not in offsets


async def test_only_what_has_to_be_fetched_is_fetched_in_a_thread() -> None:
    here = threading.get_ident()
    assert await fetched(Far(), [1], threading.get_ident) == here
    assert await fetched(Far(), [1, 7], threading.get_ident) != here
    assert await fetched(open_data(of("samples")), [7], threading.get_ident) == here, "code of the user's"


def test_a_run_is_bound_to_its_samples_and_its_model_and_trainers_send_the_inputs() -> None:
    data = open_data(of("samples"))
    run = pinned(of("samples"))
    assert run.pinned and run.data.tokens == 20 and pinned(run) == run
    assert open_samples(run).sha256 == run.data.sha256
    offsets = sample_offsets(run, 3, 1)
    assert len(offsets) == 3
    image, mask, label = data.batch(offsets)
    assert (image.shape, mask.shape, label.tolist()) == ((3, 6), (3, 6), [offset % 3 for offset in offsets])
    sent = [bytes(buffer) for buffer in entering(run, [image, mask, label])]
    assert sent == [
        image.astype("<f4").tobytes(),
        mask.astype(np.uint8).tobytes(),
        label.astype(np.uint8).tobytes(),
    ]


def test_every_sample_is_drawn_the_last_one_too() -> None:
    run = pinned_data(of("samples"))
    seen = {offset for t in range(200) for offset in sample_offsets(run, t, 0)}
    assert seen == set(range(20))


def pinned_data(run: Run) -> Run:
    return open_samples(run).pinned(run)


def test_every_number_and_its_form_is_in_the_digest() -> None:
    run, image = of("samples"), np.zeros(6, np.float32)
    cases = [[(image, 1)], [(image, 2)], [(image + 1, 1)], [(image, 1)] * 2, [(image.astype(np.float64), 1)]]
    cases += [[(image.reshape(2, 3), 1)], [(image, np.uint8(1))], [(image,)]]
    assert len({Samples(run, case).sha256 for case in cases}) == len(cases)
    assert Samples(run, [(image.astype(">f4"), 1)]).sha256 == Samples(run, [(image, 1)]).sha256


class Augmented:
    """A data set that adds noise: drawn anew each time, or of the sample's number."""

    def __init__(self, seeded: bool) -> None:
        self.seeded, self.drawn = seeded, np.random.default_rng(5)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        draw = np.random.default_rng(i) if self.seeded else self.drawn
        return draw.random(6), i


def test_samples_that_are_others_each_time_are_refused() -> None:
    run = of("samples")
    assert Samples(run, Augmented(seeded=True)).batch([3, 0])[1].tolist() == [3, 0]
    fault = r"^sample 3 of \S+ holds other numbers than when it was opened: .* have to be the same each time"
    with pytest.raises(SetupError, match=fault):
        Samples(run, Augmented(seeded=False)).batch([3, 0])


def test_each_sample_is_compared_with_itself() -> None:
    image = np.zeros(6, np.float32)
    held = [(image + i, i) for i in range(4)]
    data = Samples(of("samples"), held)
    held[2] = held[3]
    assert data.batch([0, 1, 3])[1].tolist() == [0, 1, 3]
    with pytest.raises(SetupError, match=r"^sample 2 of "):
        data.batch([2])


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("samples_uneven", r"^sample 7 of \S+samples_uneven is float32\[5\], .*, the first one float32\[6"),
        ("samples_of_infinity", r"^sample 7 of \S+ holds numbers that are not finite"),
        ("samples_of_words", r"^sample 7 of \S+ holds <U1: integers, booleans and floats can be sent"),
        ("samples_too_large", r"^sample 7 of \S+ holds 300: integers must be 0 to 255 \(model\.vocab_size\)"),
        ("samples_below_zero", r"^sample 7 of \S+ holds -1: integers must be 0 to 255"),
        ("samples_bare", r"^sample 7 of \S+ is a ndarray: it must be a tuple, an array for each input"),
        ("samples_lost", r"^sample 7 of \S+ cannot be had: 'lost'"),
        ("no_samples", r"no_samples returned no samples"),
        ("one_number", r"one_number returned a int: it must be a sequence of samples"),
        ("broken", r"^the data tests\.model\.graph\.custom_models:broken fails: no such luck$"),
        ("gone", r"^tests\.model\.graph\.custom_models has no gone"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_refused(code: str, text: str) -> None:
    with pytest.raises(SetupError, match=text):
        open_samples(of(code))


def test_other_samples_than_the_manifest_pins_are_refused() -> None:
    run = pinned_data(of("samples"))
    other = replace(run, data=replace(run.data, code=f"{HERE}:samples_of_four_classes"))
    with pytest.raises(
        SetupError, match=r"^these are not the data of the run: .* makes 8 samples .* pins 20 with"
    ):
        open_samples(other)


def test_files_are_refused_where_code_makes_the_samples() -> None:
    with pytest.raises(
        SetupError, match=r"made by tests\.model\.graph\.custom_models:samples: leave a\.txt out"
    ):
        open_data(of("samples"), ["a.txt"])


def test_a_run_whose_samples_do_not_fit_its_model_is_not_published() -> None:
    run = of("samples_of_pairs")
    with pytest.raises(SetupError, match=r"have 2 arrays each, but the model takes 3: image, mask, label"):
        pinned(run)
