"""Decoders of strangers' bytes: honest inputs, those that failed once, and 400,000 that are mutated plainly.

The mutations are drawn from a fixed seed: a failure is the same one in the next call. `scripts/bench/fuzz.py`
looks further, with atheris.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc

import pytest

from tests.fuzz.targets import TARGETS, Target, corpus_of, mutated

EACH, MANY = 1_000, 8_000
"""Mutated inputs of a target, in the quick part and where there is time; of those of files a tenth."""
MEASURED = 60
SLOW_S = 1.0
FILES = {"checkpoints", "model files", "histories", "safetensors", "manifests"}


@pytest.fixture(params=TARGETS, ids=lambda name: name.replace(" ", "-"))
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


def shown(data: bytes) -> str:
    return f"{data.hex()} (a line of tests/fuzz/corpus replays it)"


@pytest.mark.parametrize("each", [EACH, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_input_raises_what_is_not_documented_or_takes_long(target: Target, each: int) -> None:
    inputs = [*target.seeds(), *corpus_of(target.name)]
    dice = random.Random(target.name)
    slowest = 0.0
    for data in [
        *inputs,
        *(mutated(inputs, dice) for _ in range(each // (10 if target.name in FILES else 1))),
    ]:
        began = time.thread_time()
        try:
            target.run(data)
        except Exception as error:
            raise AssertionError(shown(data)) from error
        slowest = max(slowest, time.thread_time() - began)
    assert slowest < SLOW_S


def peak_of(target: Target, data: bytes) -> int:
    """Bytes that Python holds at most while it is decoded, beside those that it held before."""
    tracemalloc.start()
    try:
        target.run(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_input_takes_more_memory_than_four_times_its_size_and_a_megabyte(target: Target) -> None:
    inputs = [*target.seeds(), *corpus_of(target.name)]
    dice = random.Random(target.name)
    gc.collect()  # what earlier tests left is finalized before, not in between
    gc.disable()
    try:
        for data in [*inputs, *(mutated(inputs, dice) for _ in range(MEASURED))]:
            target.run(data)  # what is done once is done
            most = 4 * len(data) + target.spare_bytes
            # A decoder takes the same each time; what threads of earlier tests do meanwhile comes on top.
            assert any(peak_of(target, data) <= most for _ in range(3)), shown(data)
    finally:
        gc.enable()


def test_a_target_notices_a_decoder_that_raises_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness can fail: a decoder without its `except` is found by the mutations."""
    module = sys.modules["tests.fuzz.targets"]
    monkeypatch.setattr(module, "Refused", KeyError)
    inputs = TARGETS["status answers"].seeds()
    dice = random.Random(1)
    with pytest.raises(Exception, match="malformed PeerStatus header"):
        for _ in range(100):
            TARGETS["status answers"].run(mutated(inputs, dice))
