"""Microbatches of the right form and any values, to live peers: document masks, brought models, warm-ups.

The liar is a stage peer, so that every stage takes calls from it. What is out of bounds is refused, and what
is not is computed: no peer ends, none computes a number that is not finite, and the run comes to its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from swarm.errors import SwarmError
from swarm.manifest import Run
from swarm.model.stage_io import StageInput, input_metas, stage_inputs
from swarm.records import PeerRecord
from swarm.wire.codec import Encoded, encode
from swarm.wire.messages import Work
from tests.model.chain import batch_of, tiny_run, weights_of
from tests.peers.islands.test_islands import Text as Tokens
from tests.peers.loops import swarm
from tests.peers.runs.test_batch_warmup import warming
from tests.peers.runs.test_brought import Images, Text, gpt2_run, resnet_run
from tests.seeds import some

pytestmark = pytest.mark.virtual_time

EOS = 7
Values = Callable[[StageInput], Iterator[torch.Tensor]]


def documents(**model: Any) -> tuple[Run, Any]:
    data, model = {"document_mask": True, "eos": EOS}, {"layers": 3, "vocab_size": 300, **model}
    run = tiny_run(data=data, model=model, dtype="float32")
    rows = batch_of(run)
    return run, Tokens(lambda offsets: rows(offsets).astype(np.uint16))


def brought() -> tuple[Run, Any]:
    run = gpt2_run()
    return run, Text(run)


def images() -> tuple[Run, Any]:
    run = resnet_run()
    return run, Images(run)


def warmed_up() -> tuple[Run, Any]:
    run = replace(warming(tiny_run(dtype="float32")), steps=4)
    return run, Tokens(batch_of(run))


RUNS: dict[str, Callable[[], tuple[Run, Any]]] = {
    "documents": documents,
    "documents, learned places": lambda: documents(positions="learned"),
    "brought": brought,
    "images": images,
    "batch warm-up": warmed_up,
}


def legal(what: StageInput) -> Iterator[torch.Tensor]:
    """The ends of what may be: all the same token, as an end of documents each."""
    dtype = getattr(torch, what.dtype)
    if what.below:
        for value in (what.least, what.below - 1, min(EOS, what.below - 1)):
            yield torch.full(what.shape, value, dtype=dtype)
    else:
        for value in (0.0, 1e4, torch.finfo(dtype).tiny):
            yield torch.full(what.shape, value, dtype=dtype)


def impossible(what: StageInput) -> Iterator[torch.Tensor]:
    """What no honest peer sends, one number of which would do harm: an index into nothing, or no number."""
    dtype = getattr(torch, what.dtype)
    if what.below:
        ends = torch.iinfo(dtype) if dtype != torch.bool else torch.iinfo(torch.uint8)
        for value in {ends.min, ends.max, what.below, what.least - 1} - {*range(what.least, what.below)}:
            if ends.min <= value <= ends.max and dtype != torch.bool:
                tensor = torch.full(what.shape, what.least, dtype=dtype)
                tensor.view(-1)[-1] = value
                yield tensor
    else:
        for value in (torch.inf, -torch.inf, torch.nan):
            tensor = torch.zeros(what.shape, dtype=dtype)
            tensor.view(-1)[-1] = value
            yield tensor


def encoded(what: StageInput, tensor: torch.Tensor, codec: str) -> Encoded:
    """As a liar encodes it, who checks nothing."""
    if tensor.is_floating_point() and not tensor.isfinite().all():
        honest = encode(torch.zeros_like(tensor), codec)
        raw = tensor.to(torch.bfloat16 if codec == "bf16" else tensor.dtype).contiguous()
        return Encoded(honest.meta, [raw.view(torch.uint8).numpy().tobytes()])
    return encode(tensor, codec)


def bodies(
    run: Run, stage: int, values: Callable[[StageInput], Iterator[torch.Tensor]]
) -> Iterator[list[bytes]]:
    """Bodies of which one tensor has those values, and the others are the first that is legal."""
    takes = stage_inputs(run, stage)
    codecs = [meta.codec for meta in input_metas(run, stage)]
    usual = [next(legal(what)) for what in takes]
    for number, what in enumerate(takes):
        for tensor in values(what):
            of = [*usual[:number], tensor, *usual[number + 1 :]]
            sent = [encoded(*one) for one in zip(takes, of, codecs, strict=True)]
            yield [bytes(buffer) for one in sent for buffer in one.buffers]


@pytest.mark.parametrize("name", some(list(RUNS), quick=["documents"]))
async def test_microbatches_of_any_values_end_no_peer_and_leave_every_weight_a_number(name: str) -> None:
    torch.set_num_threads(1)
    run, batches = RUNS[name]()
    if not run.batch.warmup_steps:
        run = replace(run, steps=1, batch=replace(run.batch, microbatches_per_step=12))
    async with swarm(run, replicas=1, batches=batches) as s:
        await s.until_serving()
        liar = s.add_stranger("z")
        counts = dict.fromkeys((impossible, legal), 0)
        for values, stage in itertools.product(counts, range(run.S)):
            record = PeerRecord(peer="z", run=run.id, stage=max(0, stage - 1), state="serving", version=0)
            await liar.end.directory.announce(record)
            for body in bodies(run, stage, values):
                m = counts[legal] % run.microbatches(0)
                work = Work(run=run.id, t=0, m=m, version=0, tensors=input_metas(run, stage))
                if run.microbatches(0) < run.M:
                    beyond = msgspec.structs.replace(work, m=run.M - 1)
                    with pytest.raises(SwarmError, match="no microbatch"):
                        await liar.send(f"s{stage}p0", "work", beyond, [*body])
                counts[values] += 1
                try:
                    await liar.send(f"s{stage}p0", "work", work, [*body])
                    assert values is legal, f"what cannot be was computed at stage {stage}"
                except SwarmError as error:
                    assert not error.text.startswith("internal error")
        await liar.end.directory.withdraw()
        assert all(counts.values())
        s.add_trainer("trainer")
        await s.until_finished(limit_s=300.0)
        for _, peer in s.live():
            for weight in weights_of(peer.core.compute).values():
                assert weight.isfinite().all()
        assert len(s.live()) == run.S
