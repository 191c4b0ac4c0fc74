"""Evaluation on the way: its losses follow from the manifest, whatever dies, and no weight sees it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from prometheus_client import generate_latest

from peers.evaluation.asking import Evaluations
from peers.evaluation.serving import MAX_AT_ONCE, MAX_EACH
from peers.events import Evaluated, Trouble
from peers.ports import Answer, Request
from peers.programs.status import picture
from peers.programs.trained import evaluate
from peers.stage.settings import Checkpoints
from peers.storage.dataset import open_dataset
from peers.storage.samples import open_eval, pinned_eval
from peers.storage.weights import Weights
from peers.watch.metrics import registry_of
from peers.watch.monitor import Monitor
from peers.watch.terminal import _loss
from swarm.errors import Busy, NotNow, NotReady, Refused, SetupError, Stale
from swarm.evaluation import eval_data, eval_offsets, is_due, mean_loss, microbatches, version_of
from swarm.manifest import DataSpec, EvalSpec, Run, demo_run, parse_run
from swarm.model.evaluate import loss_of
from swarm.model.reference import SingleProcess
from swarm.model.stage_io import input_metas
from swarm.wire.codec import encode
from swarm.wire.messages import Evaluate, pack
from swarm.wire.messages import Evaluated as Told
from swarm.wire.tensor_meta import buffer_sizes
from tests.model.chain import TEXT, Chain, batch_of, tiny_run, weights_of
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import TRAINER, add_liar, admitting, give_voice
from tests.peers.tarpits import Trickle
from tests.seeds import some

pytestmark = pytest.mark.virtual_time


class Text:
    """The bytes that the single process reads too."""

    def __init__(self, batch: Callable[[list[int]], np.ndarray]) -> None:
        self.batch = batch


def eval_run(**changes: Any) -> Run:
    spec = EvalSpec(every=2, samples=6, sha256="a" * 64, tokens=len(TEXT))
    terms: dict[str, Any] = {
        "dtype": "float32",
        "steps": 5,
        "eval": spec,
        "model": {"dropout": 0.3, "z_loss": 0.1},
    }
    codec = {"forward": "blockwise8", "backward": "blockwise8"}
    return tiny_run(**{**terms, "codec": codec, **changes})


def expected_loss(run: Run, weights: dict[str, torch.Tensor]) -> float:
    """By the whole model, as `swarm eval` computes it."""
    loss, batch = loss_of(run, weights), batch_of(run)
    losses = [loss(batch(eval_offsets(run, e))) for e in range(microbatches(run))]
    return mean_loss(losses, [run.batch.microbatch_size] * len(losses))


def expected(run: Run) -> tuple[dict[int, float], SingleProcess]:
    """(version -> loss, the run in one process)."""
    single, found, before = SingleProcess(run, batch_of(run)), dict[int, float](), dict[int, Any]()
    for t in range(run.steps + 1):
        before[t] = single.named_weights()
        if is_due(run, t):
            found[version_of(run, t)] = expected_loss(run, before[version_of(run, t)])
        if t < run.steps:
            single.step(t)
    return found, single


@pytest.mark.parametrize("delayed", some([False, True], quick=[False]))
async def test_with_deaths_and_two_trainers_its_losses_are_those_of_one_process_to_the_last_bit(
    delayed: bool,
) -> None:
    run = eval_run(delayed_updates=delayed)
    losses, single = expected(run)
    assert losses.keys() == ({0, 1, 3, 5} if delayed else {0, 2, 4, 5})
    held_out = Text(batch_of(run))
    async with swarm(run, batches=held_out) as s:
        s.add_trainer("trainer", held_out=held_out)
        s.add_trainer("other", held_out=held_out)
        s.on_call("eval", lambda *_: s.kill("s1p0"), to="s1p0", nth=2)
        s.on_call("eval", lambda *_: s.kill("s2p1"), to="s2p1", nth=5)
        s.on_call("work", lambda *_: s.kill("s0p1"), to="s0p1", nth=4)
        await s.until_finished(limit_s=90.0)
        await s.until(lambda: all(s.tasks[name].done() for name in s.trainers))
        told = {(event.version, event.loss) for event in s.seen(Evaluated)}
        assert told == set(losses.items())
        reference = single.named_weights()
        for _, peer in s.live():
            for name, weight in weights_of(peer.core.compute).items():
                assert torch.equal(weight, reference[name]), name
        (first,) = [peer for _, peer in s.live() if peer.stage == 0]
        assert first.evaluations.newest == (5, losses[5])
        looker = s.network.join("monitor")
        seen = picture(run, await Monitor(run, looker.transport, looker.directory).once())
        assert seen.evaluations == ((5, losses[5]),)
        assert f"held out {losses[5]:.4f} at step 5" in str(_loss(seen, 100))
        assert f"swarm_run_eval_loss {losses[5]!r}" in generate_latest(registry_of(lambda: seen)).decode()


async def test_a_peer_that_comes_while_the_end_of_the_run_is_evaluated_is_asked(tmp_path: Path) -> None:
    """The only one of its stage ended with the first question, and was started again."""
    run, saves = eval_run(steps=1, batch={"microbatches_per_step": 1}), Checkpoints(folder=tmp_path)
    held_out = Text(batch_of(run))
    async with swarm(run, replicas=0, batches=held_out) as s:
        for stage in range(run.S):
            s.add_peer(f"s{stage}p0", stage, checkpoints=saves)
        s.add_trainer("trainer")
        await s.until_finished()

        def restart(caller: str, callee: str) -> None:
            s.kill(callee)
            s.add_peer("back", 1, checkpoints=saves)

        s.on_call("eval", restart, to="s1p0")
        s.add_trainer("late", held_out=held_out)
        await s.until(lambda: s.tasks["late"].done(), limit_s=200.0)
        assert [(event.version, event.loss) for event in s.seen(Evaluated)] == [(1, expected(run)[0][1])]


@pytest.mark.parametrize("how", some(["never", "refused", "stale"], quick=["never"]))
async def test_peers_that_evaluate_nothing_end_no_trainer_and_hold_the_run_up_for_a_while(how: str) -> None:
    run, held_out = eval_run(steps=2), Text(batch_of(eval_run()))
    reference = expected(run)[1].named_weights()
    asked = 0
    async with swarm(run, batches=held_out) as s:

        async def evaluate_nothing(request: Request) -> Answer:
            nonlocal asked
            asked += 1
            if how == "never":
                await request.accept()
                return await asyncio.get_running_loop().create_future()
            raise Refused("not by me") if how == "refused" else Stale("it is over", version=99)

        for peer in ("s0p0", "s0p1"):
            transport = s.network.peers[peer].transport
            transport.serve("eval", evaluate_nothing, max_body_bytes=1 << 20)
        s.add_trainer("trainer", held_out=held_out)
        await s.until_finished(limit_s=1500.0)
        for _, peer in s.live():
            for name, weight in weights_of(peer.core.compute).items():
                assert torch.equal(weight, reference[name]), name
        assert not s.seen(Evaluated)
        (first, *_) = s.seen(Trouble)
        assert first.text.startswith("the evaluation before step 0 is given up, and the run goes on: 3 of 3")
        assert first.text.endswith("the last refusal: not by me") == (how == "refused")
        assert asked < 1500, "not five times a second, for minutes"


def boast(s: Swarm, *liars: str) -> None:
    """Have peers of the last stage say better losses than they find in evaluations; they train truly."""
    for liar in liars:
        compute: Any = s.peers[liar].core.compute
        true = compute.evaluate
        compute.evaluate = lambda *args, true=true: true(*args) - 1.0


async def evaluated(run: Run, *, liars: tuple[str, ...], voiced: tuple[str, ...] = ()) -> Swarm:
    held_out = Text(batch_of(run))
    async with swarm(run, replicas=(1, 1, 3), batches=held_out) as s:
        give_voice(s, *voiced)
        await s.until_serving()
        boast(s, *liars)
        s.add_trainer(TRAINER, held_out=held_out)
        await s.until_finished(limit_s=900.0)
        await s.until(lambda: s.tasks[TRAINER].done(), limit_s=200.0)
        return s


async def test_one_peer_alone_says_no_loss_of_an_evaluation_that_is_believed() -> None:
    run = admitting(eval_run(steps=2))
    s = await evaluated(run, liars=("s2p1",))
    assert {(event.version, event.loss) for event in s.seen(Evaluated)} == set(expected(run)[0].items())


async def test_of_an_evaluation_only_those_with_voice_are_asked() -> None:
    """Of three identities two are one stranger's; they would agree."""
    run = admitting(eval_run(steps=2))
    s = await evaluated(run, liars=("s2p1", "s2p2"), voiced=("s2p0",))
    assert {(event.version, event.loss) for event in s.seen(Evaluated)} == set(expected(run)[0].items())


@pytest.mark.parametrize("voiced", [True, False])
async def test_a_mere_record_has_no_stage_behind_evaluate_what_it_made_up(voiced: bool) -> None:
    """Each call costs the device a forward: thirty-two at once are nine tenths of its work."""
    run = admitting(eval_run())
    async with swarm(run, replicas=2, batches=Text(batch_of(run))) as s:
        if voiced:
            give_voice(s, "s0p0", "s0p1", "s1p0")
        await s.until_serving()
        await add_liar(s, "stranger", 0, 0)
        await asyncio.sleep(1.0)
        compute, made = s.peers["s1p0"].core.compute, list[int]()
        compute.evaluate = lambda *args: made.append(1) or 1.0  # type: ignore[func-returns-value, method-assign]
        metas = input_metas(run, 1)
        wanted = pack(Evaluate(run=run.id, t=0, e=0, tensors=metas, route=()))
        body = [bytes(size) for size in buffer_sizes(metas)]

        async def ask(by: str) -> None:
            await s.network.peers[by].transport.call("s1p0", "eval", wanted, body)

        await ask("s0p1")
        assert made == [1], "by who works at the stage before"
        if voiced:
            with pytest.raises(Refused, match="has no voice at stage 0"):
                await ask("stranger")
            assert made == [1]
        else:
            await ask("stranger")


async def test_of_two_routes_that_differ_neither_is_believed_and_that_is_said() -> None:
    run = admitting(eval_run(steps=1))
    s = await evaluated(run, liars=("s2p1",), voiced=("s2p0", "s2p1"))
    assert not s.seen(Evaluated)
    assert "the last refusal: routes answered with the losses " in s.seen(Trouble)[0].text


async def test_an_end_of_the_run_that_no_peer_evaluates_is_said() -> None:
    def nobody(_: Any) -> list[str]:
        raise NotReady("not yet", version=0)

    told, failed = list[Any](), list[Any]()
    last = Evaluations(
        eval_run(),
        lambda _: asyncio.sleep(0.0, []),
        Any,
        lambda _: [],
        nobody,
        failed.append,
        told.append,
        lambda _: math.inf,  # type: ignore
    )
    await last.last([])
    await last.close()
    assert [one.text for one in told] == ["the evaluation of the run's end took over 120 s"]


async def test_data_that_went_from_the_cache_are_fetched_again() -> None:
    """Training reads more than the cache has room for. A server that was busy then ended the trainer."""
    run, here = eval_run(steps=2), list[bool]()

    class Far(Text):
        def has(self, offsets: list[int]) -> bool:
            return False

    def batch(offsets: list[int]) -> np.ndarray:
        here.append(len(here) > 3)
        if not here[-1]:
            raise NotNow("a shard of the data cannot be had now")
        return batch_of(run)(offsets)

    async with swarm(run, batches=Text(batch_of(run))) as s:
        s.add_trainer("trainer", held_out=Far(batch))
        await s.until_finished(limit_s=60.0)
        await s.until(s.tasks["trainer"].done)
        told = {(event.version, event.loss) for event in s.seen(Evaluated)}
    assert told == set(expected(run)[0].items())


async def test_a_trainer_without_the_data_evaluates_nothing_and_holds_nothing_up() -> None:
    run = eval_run()
    async with swarm(run, batches=Text(batch_of(run))) as s:
        s.add_trainer("trainer")
        await s.until_finished(limit_s=60.0)
        assert not s.seen(Evaluated)


async def test_what_is_no_part_of_an_evaluation_is_refused_before_it_is_received() -> None:
    run = eval_run()
    async with swarm(run, batches=Text(batch_of(run))) as s:
        await s.until_serving()
        body = [np.ascontiguousarray(batch_of(run)(eval_offsets(run, 0))).data.cast("B")]
        metas = encode(torch.from_numpy(batch_of(run)(eval_offsets(run, 0))), "none").meta
        stranger = s.network.join("stranger").transport

        async def asked(body: Any = body, **changes: Any) -> None:
            wanted = Evaluate(**{"run": run.id, "t": 0, "e": 0, "tensors": (metas,), **changes})
            await stranger.call("s0p0", "eval", pack(wanted), body)

        for changes in ({"t": 1}, {"t": -2}, {"t": 6}, {"e": 3}, {"e": -1}):
            with pytest.raises(Refused, match=r"no microbatch .* of an evaluation"):
                await asked(**changes)
        with pytest.raises(Refused, match="takes other tensors"):
            await asked(tensors=())
        with pytest.raises(Refused, match="takes other tensors"):
            await asked(body=[b"1"])
        with pytest.raises(NotReady, match="no peer of stage 1 was named"):
            await asked()
        with pytest.raises(Refused, match="no evaluation of version 9"):
            await stranger.call("s0p0", "evaluated", pack(Told(run=run.id, version=9, loss=1.0)))
        with pytest.raises(Refused, match=r"malformed Evaluated header: .* `\$\.loss`"):
            await stranger.call("s0p0", "evaluated", pack(Told(run=run.id, version=1, loss=float("inf"))))


def test_a_stage_evaluates_with_weights_that_it_holds() -> None:
    run = eval_run()
    chain = Chain(run)
    tokens = [encode(torch.from_numpy(batch_of(run)(eval_offsets(run, 0))), "none")]
    with pytest.raises(NotReady, match="an evaluation needs weights 1; stage 0 is at 0"):
        chain.stages[0].evaluate(1, tokens)
    chain.step(0)
    with pytest.raises(Stale, match="an evaluation needs weights 0; stage 0 is at"):
        chain.stages[0].evaluate(0, tokens)
    passed: Any = tokens
    for stage in chain.stages:
        passed = stage.evaluate(1, passed)
    assert passed == loss_of(run, chain.named_weights())(batch_of(run)(eval_offsets(run, 0)))


# --- the data


def text_run(tmp_path: Any, letters: int, **spec: Any) -> tuple[Run, Any]:
    run = replace(demo_run(stages=2), data=DataSpec(source="tales", sequence_length=16))
    run = replace(run, batch=replace(run.batch, microbatch_size=2))
    run = replace(run, eval=EvalSpec(**{"every": 2, "samples": 4, **spec}))
    (tmp_path / "held-out.txt").write_text("abcdefgh" * (letters // 8))
    return run, tmp_path / "held-out.txt"


def test_the_manifest_pins_what_the_run_is_evaluated_on(tmp_path: Any) -> None:
    run, path = text_run(tmp_path, 160)
    found = pinned_eval(open_dataset(run).pinned(run), open_eval(run, [path], None))
    assert found.pinned and found.eval.tokens == 160 and parse_run(found.to_toml()) == found
    assert open_eval(found, [path], None) is not None
    assert eval_offsets(found, 0) + eval_offsets(found, 1) == [0, 36, 72, 108]
    path.write_text("abcdefgx" * 20)
    with pytest.raises(SetupError, match="not the data of the run"):
        open_eval(found, [path], None)
    with pytest.raises(SetupError, match="give the text to evaluate on with --eval-data"):
        open_eval(found, [], None)
    with pytest.raises(SetupError, match=r"the manifest of run 'demo' has no table \[eval\]"):
        open_eval(replace(run, eval=EvalSpec()), [path], None)
    assert not run.pinned and eval_data(found).data.sha256 == found.eval.sha256


def test_an_evaluation_of_more_samples_than_there_are_is_refused(tmp_path: Any) -> None:
    run, path = text_run(tmp_path, 64)
    with pytest.raises(SetupError, match=r"eval.samples = 4, but .* have 3 samples of 16 tokens: give"):
        pinned_eval(run, open_eval(run, [path], None))
    path.write_text("abcdefgh" * 3)
    with pytest.raises(SetupError, match=r"eval.samples = 4, but .* have 1 sample of 16 tokens: give"):
        pinned_eval(run, open_eval(run, [path], None))


def test_swarm_eval_finds_the_same_loss(tmp_path: Any) -> None:
    run, path = text_run(tmp_path, 320)
    text = open_eval(run, [path], None)
    assert text is not None
    run = pinned_eval(open_dataset(run).pinned(run), text)
    weights = {n: w for stage in Chain(run).stages for n, w in weights_of(stage).items()}
    found = evaluate(Weights(run=run, step=0, by_name=weights), text, run.eval.samples)
    loss = loss_of(run, weights)
    losses = [loss(text.batch(eval_offsets(run, e))) for e in range(microbatches(run))]
    assert found.loss == mean_loss(losses, [2] * len(losses))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"every": 2, "samples": 0}, "eval.samples = 0"),
        ({"every": 0, "samples": 4}, "eval.every = 0"),
        ({"samples": 3}, r"a multiple of batch.microbatch_size \(2\)"),
        ({"data": "a.b:c"}, '"files" when data.source is "tales"'),
        ({"sha256": "a" * 64}, "given together with eval.tokens"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Any, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        text_run(tmp_path, 160, **spec)


def test_the_steps_that_are_evaluated() -> None:
    run = eval_run()
    assert [t for t in range(8) if is_due(run, t)] == [0, 2, 4, 5]
    assert not is_due(tiny_run(), 0)


async def test_bodies_that_trickle_make_way_for_an_evaluation_that_waits() -> None:
    """They had all places for ever, and nothing was evaluated any more."""
    run = eval_run()
    losses, _ = expected(run)
    held_out = Text(batch_of(run))
    async with swarm(run, batches=held_out, replicas=1) as s:
        await s.until_serving()
        serve, wanted = s.peers["s0p0"].evaluations._serve, Evaluate(run=run.id, t=0, e=0)
        wanted = msgspec.structs.replace(wanted, tensors=input_metas(run, 0))
        held, size = list[asyncio.Future[Any]](), buffer_sizes(wanted.tensors)
        for name in ("one", "two"):
            held += [asyncio.ensure_future(serve(Trickle(name, pack(wanted), size))) for _ in range(MAX_EACH)]
            await asyncio.sleep(0)
            with pytest.raises(Busy, match="enough for its caller"):
                await asyncio.wait_for(serve(Trickle(name, pack(wanted), size)), 5.0)
        assert len(held) == MAX_AT_ONCE
        s.add_trainer("trainer", held_out=held_out)
        await s.until_finished(limit_s=300.0)
        await s.until(lambda: all(s.tasks[name].done() for name in s.trainers))
        assert {(event.version, event.loss) for event in s.seen(Evaluated)} == set(losses.items())
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
