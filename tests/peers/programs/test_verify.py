"""`swarm verify` after the fact: what was signed is computed again, and a stage that lied is found."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from peers import cli
from peers.net.identity import Identity
from peers.programs.tool_options import VerifyOptions
from peers.programs.verify import run_verify
from peers.sim.network import SimSigner
from peers.storage import checkpoint
from peers.storage.transcript import Conviction, Took, TranscriptWriter, path_of
from peers.trainer import entering
from peers.transfer.keeper import CheckpointKeeper
from peers.transfer.leases import Snapshot
from swarm.audit.rerun import answers_of
from swarm.data import sample_offsets
from swarm.errors import SetupError, short
from swarm.ids import Microbatch
from swarm.manifest import CustomModelSpec, IslandsSpec, Run
from swarm.model.layout import initial_state
from swarm.model.reductions import sqnorm, state_digest, vectors_digest
from swarm.protocol.coordinator import realigns
from swarm.protocol.statements import sign
from swarm.protocol.voice import Worked, vouch
from swarm.records import Voucher
from swarm.wire.evidence import WrongAnswer, judged
from swarm.wire.receipts import Answered
from swarm.wire.trails import Signed, TookStep, TookSteps, pack_rows
from tests.model.chain import TEXT, Chain, batch_of, tiny_run
from tests.peers.admitted import admitting
from tests.peers.islands.test_islands import train
from tests.peers.liars.test_false_answers import LIES, TRAINER, audit, lie
from tests.peers.loops import Swarm, swarm
from tests.peers.runs.test_loops import Text
from tests.peers.transfer.test_keeping import add_keeper
from tests.seeds import some

Lie = Callable[[Chain, int, list[torch.Tensor]], None]


def small(**changes: Any) -> Run:
    codec = {"forward": "blockwise8", "backward": "blockwise8"}
    tables = {"model": {"stages": 2, "layers": 2}, "batch": {"microbatches_per_step": 2}, "codec": codec}
    run = tiny_run(**{"dtype": "float32", "steps": 6, "checkpoint_every": 2, **tables, **changes})
    return replace(run, data=replace(run.data, source="files", sha256="", tokens=len(TEXT)))


def nothing(chain: Chain, t: int, sums: list[torch.Tensor]) -> None:
    """No lie."""


@dataclass
class Recorded:
    """A run that was: its folder, as a keeper leaves it, and the two peers of each stage."""

    run: Run
    folder: Path
    peers: list[list[Identity]]
    rows: list[list[TookStep]]
    kinds: list[str]
    vouchers: dict[str, Voucher] = field(default_factory=dict)

    @property
    def transcript(self) -> Path:
        return path_of(self.folder, self.run)

    def write(self, start: int = 0, end: int | None = None, *, kind: str = "", **false: Any) -> None:
        """What the peers of each stage sign of some steps; `false`: other signatures."""
        entries = []
        for stage, rows in enumerate(self.rows):
            took = TookSteps(stage, start, kind or self.kinds[stage], pack_rows(rows[start:end]))
            by = [
                Signed(
                    peer.peer_id,
                    false.get("signature") or sign(peer, self.run.id, took),
                    self.vouchers.get(peer.peer_id),
                )
                for peer in self.peers[stage]
            ]
            entries.append(Took(took, tuple(by)))
        TranscriptWriter(self.folder, self.run).append(entries)

    def verify(self, first: int, last: int, **more: Any) -> bool:
        data = self.folder / "text"
        data.write_bytes(TEXT.tobytes())
        return run_verify(
            VerifyOptions(transcript=self.transcript, data=(data,), from_=first, to=last, **more)
        )


def record(folder: Path, run: Run | None = None, before: Lie = nothing, after: Lie = nothing) -> Recorded:
    """Train; `before` and `after` each step both peers of a stage may change what they have."""
    torch.set_num_threads(1)
    run = run or small()
    chain = Chain(run)
    kinds = [stage.rehearse() for stage in chain.stages]
    rows: list[list[TookStep]] = [[] for _ in chain.stages]
    for t in range(run.steps):
        chain.begin(t)
        for m in range(run.M):
            chain.microbatch(Microbatch(t, m))
        sums = [stage.sums.value(stage.sums.of(t)) for stage in chain.stages]
        before(chain, t, sums)
        chain.apply_settled(t, sums)
        after(chain, t, sums)
        total = sum(map(sqnorm, sums))
        for stage, (compute, found) in enumerate(zip(chain.stages, sums, strict=True)):
            rows[stage].append(
                TookStep(
                    vectors_digest([found], on_device=False),
                    total,
                    compute.state.digest(whole=realigns(run, t + 1)),
                )
            )
            if (t + 1) % run.checkpoint_every == 0:
                saved = checkpoint.Checkpoint(folder, run, stage, t + 1)
                saved.save(compute.state.copy(), keep=99)
    peers = [[Identity.generate() for _ in range(2)] for _ in chain.stages]
    return Recorded(run, folder, peers, rows, kinds)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    was = record(tmp_path_factory.mktemp("honest"))
    was.write(0, 3)
    was.write(3)
    return was


def test_a_run_that_was_as_it_says_is_found_equal_to_the_bit(
    honest: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert honest.verify(2, 6)
    told = capsys.readouterr()
    by = sorted(short(peer.peer_id) for stage in honest.peers for peer in stage)
    assert told.err.splitlines()[0] == f"signed by {' '.join(by)}"
    assert told.out == (
        "steps 2 to 5 are what the peers signed, to the last bit\n"
        "compared: 8 of 8 signed steps of stages, and the checkpoint of step 6\n"
        f"run {honest.run.name} {honest.run.id}\n"
    )
    assert honest.verify(0, 1, stage=1)
    assert capsys.readouterr().out.splitlines()[1] == "compared: 1 of 1 signed steps of stages"


def flipped_sum(chain: Chain, t: int, sums: list[torch.Tensor]) -> None:
    if t == 3:
        sums[1].neg_()


def one_bit(chain: Chain, t: int, sums: list[torch.Tensor]) -> None:
    if t == 3:
        chain.stages[1].state.weights(4).view(torch.int32)[5] ^= 1


@pytest.mark.parametrize(
    ("lie", "what"),
    [({"before": flipped_sum}, "sum"), ({"after": one_bit}, "weights")],
    ids=["sum", "weights"],
)
def test_all_peers_of_a_stage_that_collude_are_found_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lie: dict[str, Lie], what: str
) -> None:
    was = record(tmp_path, **lie)
    was.write()
    both = " and ".join(peer.peer_id for peer in was.peers[1])
    assert was.verify(0, 3)
    capsys.readouterr()
    assert not was.verify(2, 6)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"step 3, stage 1: other {what} than {both} signed"
    assert said[1].startswith("Each stage computes with what others send it.")
    assert not was.verify(2, 6, stage=1) and was.verify(2, 4, stage=0)


@pytest.mark.slow
def test_with_one_stage_in_memory_at_a_time_the_verdicts_are_the_same(
    honest: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was = record(tmp_path / "lie", before=flipped_sum)
    was.write()
    for recorded in (honest, was):
        for more in ({}, {"stage": 1}):
            said = []
            for scratch in (None, tmp_path / "scratch"):
                equal = recorded.verify(2, 6, scratch=scratch, **more)
                said.append((equal, capsys.readouterr().out))
            assert said[0] == said[1] and said[0][0] == (recorded is honest)
    assert not list((tmp_path / "scratch").iterdir())


def test_what_differs_at_a_stage_that_is_not_compared_is_said_and_judges_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was = record(tmp_path, before=flipped_sum)
    was.write()
    both = " and ".join(peer.peer_id for peer in was.peers[1])
    assert was.verify(2, 4, stage=0)
    told = capsys.readouterr()
    assert f"not compared, but seen: step 3, stage 1: other sum than {both} signed" in told.err.splitlines()
    assert told.err.count("not compared") == 1
    assert told.out.startswith("steps 2 to 3 are what the peers signed, to the last bit\n")


def rounded_otherwise(chain: Chain, t: int, sums: list[torch.Tensor]) -> None:
    sums[1].view(torch.int32)[5] ^= 1


def test_who_names_another_kind_of_device_that_finds_the_same_bits_has_nothing_judged_less_closely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with voice could have a small lie of another stage go unseen, within what a referee allows."""
    was = record(tmp_path)
    was.kinds[1] = "f" * 32
    was.write()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert was.verify(0, 2)
    said = capsys.readouterr()
    assert said.out.startswith("steps 0 to 1 are what the peers signed, to the last bit\n")
    assert "comparing bits [" in said.err, "it takes as long as all the rest"


def test_a_stage_that_computed_with_what_another_kind_of_device_sent_is_refereed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was = record(tmp_path, before=rounded_otherwise)
    was.kinds[1] = "f" * 32
    was.write()
    for stage in (-1, 2):  # the run has none such
        took = TookSteps(stage, 0, "e" * 32, pack_rows(was.rows[0]))
        signed = Signed(was.peers[0][0].peer_id, sign(was.peers[0][0], was.run.id, took))
        TranscriptWriter(tmp_path, was.run).append([Took(took, (signed,))])
    assert was.verify(0, 2, stage=0)
    told = capsys.readouterr()
    both = " and ".join(sorted(peer.peer_id for peer in was.peers[1]))
    how = "a referee in float64 judges, not to the bit, 2 of 2 signed steps:"
    assert told.out.startswith(f"{how} {both} of stage 1 computed on another kind of device\n")
    assert "as far as another kind of device can tell" in told.out


def test_what_identities_of_a_keeper_sign_is_left_out_beside_what_those_with_voice_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Identity.generate()
    was = record(tmp_path, admitting(replace(small(), steps=4), trainer.peer_id))
    for stage in was.peers:
        for peer in stage:
            was.vouchers[peer.peer_id] = vouch(trainer, was.run.id, Worked(peer.peer_id, 30, 2, 30))
    strangers = [[Identity.generate()] for _ in was.peers]
    other = [[step._replace(total_sqnorm=step.total_sqnorm * 4.0) for step in rows] for rows in was.rows]
    forged = {strangers[0][0].peer_id: vouch(strangers[1][0], was.run.id, Worked("x", 30, 2, 30))}
    made_up = replace(was, peers=strangers, rows=other, vouchers=forged)
    made_up.write(2, kind="f" * 32)
    assert not was.verify(2, 4), "nobody else says anything"
    was.write()
    capsys.readouterr()
    assert was.verify(2, 4)
    told = capsys.readouterr()
    assert told.out.startswith("steps 2 to 3 are what the peers signed, to the last bit\n")
    accused = answered(was.run, 0, 1)[0]
    convict(made_up, accused)
    lied = convict(was, msgspec.structs.replace(accused, outputs=b"x" * 32, output_grads=b"x" * 32))
    assert was.verify(2, 4)
    both = " and ".join(peer.peer_id for peer in was.peers[0])
    told = capsys.readouterr()
    assert [line for line in told.out.splitlines() if line.startswith("convicted: ")] == [
        f"convicted: peer {lied} of stage 0: its answer of microbatch (0, 1), say {both}"
    ]
    names = " ".join(map(short, sorted(stage[0].peer_id for stage in strangers)))
    assert f"signed by peers without voice, and left out: {names}" in told.err


def test_what_identities_of_a_keeper_sign_is_left_out_beside_what_founders_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have voice from the first step, when nobody has a voucher."""
    was = founded(tmp_path)
    other = [[step._replace(total_sqnorm=step.total_sqnorm * 4.0) for step in rows] for rows in was.rows]
    was.write()
    replace(was, peers=[[Identity.generate()] for _ in was.peers], rows=other).write()
    assert was.verify(0, 2)
    assert "signed by peers without voice, and left out: " in capsys.readouterr().err


def founded(folder: Path) -> Recorded:
    """A run whose manifest names its peers as founders, of which nothing is written yet."""
    founders = [[Identity.generate() for _ in range(2)] for _ in range(2)]
    run = admitting(replace(small(), steps=2))
    named = tuple(peer.peer_id for stage in founders for peer in stage)
    was = record(folder, replace(run, admission=replace(run.admission, founders=named)))
    was.peers = founders
    return was


def test_a_transcript_that_a_keeper_signed_itself_is_none_where_founders_sign(tmp_path: Path) -> None:
    """It leaves out all that they signed, and computes from a state that it made up."""
    was = founded(tmp_path)
    replace(was, peers=[[Identity.generate()] for _ in was.peers]).write()
    with pytest.raises(SetupError, match=r"has no signed step from 0 to 1: take others \(it has none\), or"):
        was.verify(0, 2)


def test_what_peers_without_voice_alone_signed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was = record(tmp_path, admitting(replace(small(), steps=2), Identity.generate().peer_id))
    was.write()
    assert was.verify(0, 2)
    said = "signed by peers without voice alone, which the writer of this transcript can make up: stage 0"
    assert f"{said}, stage 1" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("left", ["a stage", "a step", "no rows"])
def test_steps_that_nobody_signed_do_not_pass_with_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    """A keeper can leave out what shows a lie, and all that followed from it."""
    was = founded(tmp_path)
    if left == "a stage":
        replace(was, rows=was.rows[:1]).write()
    else:
        was.write(0, 1) if left == "a step" else was.write(1, 1)
    lacks = {"a stage": "stage 1 (0 to 1)", "a step": "stage 0 (1 to 1), stage 1 (1 to 1)"}
    lacked = lacks.get(left, "stage 0 (0 to 1), stage 1 (0 to 1)")
    signed = 0 if left == "no rows" else 2
    said = f"nobody whose word counts signed {4 - signed} of 4 steps of stages: {lacked}"
    with pytest.raises(SetupError) as error:
        was.verify(0, 2)
    assert error.value.text.startswith(f"{said}. Leave them out (--from, --to, --stage), or ")
    told = capsys.readouterr()
    assert said in told.err.splitlines() and f"compared: {signed} of 4 signed steps of stages" in told.out
    if left == "a stage":
        assert was.verify(0, 2, stage=0)


def test_a_transcript_in_the_folder_of_another_run_is_not_taken_for_that_ones(
    honest: Recorded, tmp_path: Path
) -> None:
    other = tmp_path / ("0" * 32) / "transcript"
    other.parent.mkdir()
    other.write_bytes(honest.transcript.read_bytes())
    with pytest.raises(SetupError, match=f"is of run {honest.run.id}, and lies in the folder of 00000"):
        run_verify(VerifyOptions(transcript=other, from_=0, to=1))


def test_a_norm_that_was_made_up_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = replace(small(), steps=2)
    was = record(tmp_path, run)
    was.rows = [[step._replace(total_sqnorm=step.total_sqnorm * 1.01) for step in rows] for rows in was.rows]
    was.write()
    assert not was.verify(0, 2)
    assert capsys.readouterr().out.startswith("step 0, stage 0: other norm than ")


@pytest.mark.parametrize("times", some([4.0, 1e30, math.nan], quick=[4.0]))
def test_a_norm_that_a_keeper_has_a_stage_beside_say_makes_no_honest_peer_a_liar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], times: float
) -> None:
    """What a stage signed of a step is left out, and identities of the keeper sign a norm at another one: the
    step was taken with that, and what the honest peers signed of the next one was another sum."""
    was = record(tmp_path, replace(small(), steps=4))
    other = [[step._replace(total_sqnorm=step.total_sqnorm * times) for step in was.rows[0]]]
    keeper = Identity.generate()
    was.write(0, 2)
    replace(was, peers=[[keeper]], rows=other).write(2, 3)
    was.write(3)
    with pytest.raises(SetupError, match=r"signed 1 of 4 steps of stages: stage 1 \(2 to 2\)"):
        was.verify(0, 4, stage=1)
    told = capsys.readouterr()
    assert f"not compared, but seen: step 2, stage 0: other norm than {keeper.peer_id} signed" in told.err
    assert "compared: 3 of 4 signed steps" in told.out


def test_a_norm_that_one_peer_says_a_little_else_makes_the_others_of_its_stage_no_liars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the last bit: the weights differ all the same. One of those that sign it has voice, and the keeper
    writes it down three times; the others are the keeper's own."""
    trainer = Identity.generate()
    was = record(tmp_path, admitting(replace(small(), steps=3), trainer.peer_id))
    off = [[s._replace(total_sqnorm=math.nextafter(s.total_sqnorm, 1e9)) for s in rows] for rows in was.rows]
    liars = [[Identity.generate() for _ in range(4)] for _ in was.peers]
    for peer in (one for stage, others in zip(was.peers, liars, strict=True) for one in (*stage, others[0])):
        was.vouchers[peer.peer_id] = vouch(trainer, was.run.id, Worked(peer.peer_id, 30, 2, 30))
    liars = [[others[0]] * 2 + others for others in liars]
    replace(was, peers=liars, rows=off).write(1, 2)
    was.write()
    replace(was, peers=liars, rows=off).write(1, 2)
    assert not was.verify(0, 3)
    said = set(capsys.readouterr().out.splitlines()[:2])
    assert said == {f"step 1, stage {n}: other norm than {liars[n][0].peer_id} signed" for n in range(2)}


def test_of_two_accounts_the_false_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = replace(small(), steps=2)
    was = record(tmp_path, run)
    was.write()
    liars = [[Identity.generate()] for _ in was.peers]
    other = replace(
        was, peers=liars, rows=[[*rows[:1], rows[1]._replace(sum="ab" * 16)] for rows in was.rows]
    )
    other.write(1)
    assert not was.verify(0, 2)
    said = capsys.readouterr().out.splitlines()[:2]
    assert said == [f"step 1, stage {n}: other sum than {liars[n][0].peer_id} signed" for n in range(2)]


def test_one_that_signs_falsely_keeps_no_later_lie_from_being_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was, liar = record(tmp_path, before=flipped_sum), Identity.generate()
    was.write()
    rows = [[step._replace(sum="ab" * 16, weights="") for step in was.rows[1]]]
    false = replace(was, peers=[[liar]], rows=[[], *rows])
    false.peers.insert(0, [])
    false.write(0, 3)
    both = " and ".join(peer.peer_id for peer in was.peers[1])
    assert not was.verify(0, 6)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"step 0, stage 1: other sum than {liar.peer_id} signed"
    assert said[1] == f"step 3, stage 1: other sum than {both} signed"
    assert not was.verify(0, 3) and liar.peer_id in capsys.readouterr().out.splitlines()[0]


def test_what_a_peer_did_not_sign_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    was = record(tmp_path, replace(small(), steps=2))
    honest = was.rows
    was.rows = [[step._replace(sum="ab" * 16) for step in rows] for rows in honest]
    was.write(signature=b"f" * 64)
    with pytest.raises(
        SetupError, match=r"has no signed step from 0 to 1: take others \(it has none\), or the transcript"
    ):
        was.verify(0, 2)
    was.rows = honest
    was.write()
    assert was.verify(0, 2)
    assert capsys.readouterr().err.count("not signed by those that it names, and left out: ") == 2
    was.peers = [[SimSigner("\x1bc")] for _ in was.peers]  # type: ignore[list-item]
    was.write(signature=b"f" * 64)
    assert was.verify(0, 2)
    assert "left out: ?c" in capsys.readouterr().err, "a name says nothing to a terminal"


@pytest.mark.parametrize("vector", ["weights", "exp_avg_sq"])
def test_a_checkpoint_that_is_not_what_peers_signed_is_no_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vector: str
) -> None:
    was = record(tmp_path, replace(small(), steps=4))
    was.write()
    saved = checkpoint.Checkpoint(tmp_path, was.run, 0, 2)
    tensors = saved.load()
    tensors[vector][0] += 1
    saved.save(tensors, keep=99)
    assert not was.verify(2, 4)
    assert capsys.readouterr().out.splitlines()[1].startswith("The checkpoint of step 2 has others.")
    assert not was.verify(0, 2)
    assert capsys.readouterr().out == "the checkpoint of step 2 is not what was computed: stage 0\n"


def test_one_that_signs_another_checkpoint_neither_has_it_refused_nor_a_false_one_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was, liar = record(tmp_path, replace(small(), steps=4)), Identity.generate()
    was.write()
    saved = checkpoint.Checkpoint(tmp_path, was.run, 0, 2)
    tensors = saved.load()
    tensors["weights"][0] += 1
    rows = [was.rows[0][0], was.rows[0][1]._replace(weights=state_digest(tensors))]
    replace(was, peers=[[liar]], rows=[rows]).write(1)
    assert was.verify(2, 4)
    saved.save(tensors, keep=99)
    assert not was.verify(2, 4)
    assert "The checkpoint of step 2 has others." in capsys.readouterr().out


def test_a_checkpoint_of_another_stage_that_is_not_what_peers_signed_makes_no_peer_a_liar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A keeper makes up that of stage 0, and somebody verifies stage 1."""
    was = record(tmp_path, replace(small(), steps=4))
    saved = checkpoint.Checkpoint(tmp_path, was.run, 0, 2)
    tensors = saved.load()
    tensors["weights"][0] += 1
    saved.save(tensors, keep=99)
    was.write()
    assert not was.verify(2, 4, stage=1)
    told = capsys.readouterr()
    assert told.out.splitlines()[1].startswith("The checkpoint of step 2 has others.")
    assert "stage 1: other" not in told.out


def test_a_start_that_nobody_signed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    was = record(tmp_path, replace(small(), steps=4))
    was.write(2)
    assert was.verify(2, 4)
    said = "nobody signed the checkpoint of step 2 of stage 0 1: what differs may be that"
    assert said in capsys.readouterr().err
    was.write(0, 2)
    assert was.verify(2, 4) and was.verify(0, 2)
    assert "nobody signed" not in capsys.readouterr().err


@pytest.mark.parametrize("vector", ["weights", "exp_avg"])
def test_a_checkpoint_of_another_form_or_with_other_moments_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vector: str
) -> None:
    was = record(tmp_path, replace(small(), steps=2))
    was.write()
    saved = checkpoint.Checkpoint(tmp_path, was.run, 1, 2)
    tensors = saved.load()
    tensors[vector] = torch.zeros(3) if vector == "weights" else tensors[vector] + 1
    saved.save(tensors, keep=99)
    if vector == "weights":
        with pytest.raises(SetupError, match=r"the checkpoint of step 2 in .* is not one of stage 1"):
            was.verify(0, 2)
    else:
        assert not was.verify(0, 2)


def test_what_is_missing_is_said_with_what_there_is(honest: Recorded, tmp_path: Path) -> None:
    for (first, last), said in {
        (3, 4): "step 3 is not complete in .*: it lacks stages 0, 1 .complete steps: 6 4 2.",
        (4, 4): "--from 4 --to 4: run .* has versions 0 to 6, and --to is a later one than --from",
        (0, 7): "--from 0 --to 7: run .* has versions 0 to 6",
    }.items():
        with pytest.raises(SetupError, match=said):
            honest.verify(first, last)
    with pytest.raises(SetupError, match=r"--stage 2: run .* has stages 0 to 1"):
        honest.verify(0, 1, stage=2)
    other = replace(honest, run=replace(honest.run, seed=5), folder=tmp_path)
    other.write(0, 2)
    with pytest.raises(
        SetupError, match=r"has no signed step from 2 to 3: take others \(it has steps 0 to 1\), or"
    ):
        other.verify(2, 4)


def test_code_that_the_user_does_not_allow_is_not_called(honest: Recorded, tmp_path: Path) -> None:
    model = CustomModelSpec(kind="code", source="torch.testing:assert_close", stages=2)
    stranger = replace(honest, run=replace(honest.run, model=model), folder=tmp_path)
    stranger.write(0, 2)
    with pytest.raises(SetupError, match=r"names code that is installed here: torch\.testing:assert_close"):
        stranger.verify(0, 2)


def test_a_torn_end_is_said_and_the_rest_is_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was = record(tmp_path, replace(small(), steps=2))
    was.write()
    with was.transcript.open("ab") as file:
        file.write(b"\x30\0\0\0torn")
    assert was.verify(0, 2)
    assert "the last 8 bytes of the transcript are damaged, and not read" in capsys.readouterr().err


def test_another_kind_of_device_is_refereed_in_float64_within_a_tolerance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was = record(tmp_path / "true", before=rounded_otherwise)
    was.write(kind="f" * 32)
    assert was.verify(0, 4)
    told = capsys.readouterr()
    first, second = told.out.splitlines()[:2]
    assert first.startswith("a referee in float64 judges, not to the bit, 8 of 8 signed steps: 12D3KooW")
    assert second.startswith("steps 0 to 3 are what the peers signed, as far as another kind of device can")
    lie = record(tmp_path / "lie", before=flipped_sum)
    lie.write(kind="f" * 32)
    assert lie.verify(0, 2) and not lie.verify(2, 4)
    assert capsys.readouterr().out.endswith("the checkpoint of step 4 is not what was computed: stage 1\n")


def test_another_kind_of_device_is_refereed_whatever_moments_and_gradients_are_rounded_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = small()
    optimizer, codec = replace(terms.optimizer, moments="bfloat16"), replace(terms.codec, reduce="rounded16")
    was = record(tmp_path, replace(terms, optimizer=optimizer, codec=codec), before=rounded_otherwise)
    was.write(kind="f" * 32)
    assert was.verify(0, 4)
    assert "as far as another kind of device can tell" in capsys.readouterr().out


def test_as_a_command_it_ends_with_0_if_equal_with_5_if_not_and_says_what_to_do(
    honest: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = honest.folder / "text"
    data.write_bytes(TEXT.tobytes())
    words = ["verify", "--transcript", str(honest.transcript), "--data", str(data), "--to", "2", "--from"]
    assert cli.main([*words, "0"]) == 0
    lie = record(tmp_path, replace(small(), steps=2), before=lambda chain, t, sums: sums[0].neg_())
    lie.write()
    words[2] = str(lie.transcript)
    assert cli.main([*words, "0"]) == cli.Exit.CHECK == 5
    assert cli.main([*words, "3"]) == cli.Exit.SETUP
    assert "swarm verify: --from 3 --to 2: run" in capsys.readouterr().err
    words[2] = str(data)
    assert cli.main([*words, "0"]) == cli.Exit.SETUP
    assert "is not a transcript: a keeper writes one beside its checkpoints" in capsys.readouterr().err


def answered(run: Run, t: int, m: int) -> list[Answered]:
    """What honest peers sign of a microbatch at version 0."""
    body = entering(run, batch_of(run)(sample_offsets(run, t, m)))
    return answers_of(run, 0, partial(initial_state, run), Microbatch(t, m), body, "cpu")


def convict(was: Recorded, said: Answered, *, judges: int = 2, forged: bool = False) -> str:
    """Both peers of its stage say that another one of it lied."""
    liar = Identity.generate()
    signature = b"f" * 64 if forged else sign(liar, was.run.id, said)
    evidence = WrongAnswer(
        accused=liar.peer_id, statement=said, signature=signature, inputs=(), output_grads=(), outputs=(),
        input_grads=(),
    )  # fmt: skip
    by = [
        Signed(peer.peer_id, sign(peer, was.run.id, judged(evidence)), was.vouchers.get(peer.peer_id))
        for peer in was.peers[said.stage]
    ]
    TranscriptWriter(was.folder, was.run).append([Conviction(evidence, tuple(by[:judges]))])
    return liar.peer_id


def test_who_was_convicted_is_listed_and_answers_are_computed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was = record(tmp_path, replace(small(), steps=2, checkpoint_every=9))
    was.write()
    true = answered(was.run, 0, 1)
    other = b"x" * 32
    cases = [
        (msgspec.structs.replace(true[0], outputs=other, output_grads=other), "it lied"),
        (true[0], "its answer is true"),
        (msgspec.structs.replace(true[1], inputs=other), "it was sent something false"),
        (msgspec.structs.replace(true[1], input_grads=other), "it lied"),
        (msgspec.structs.replace(true[1], loss=0.0), "it lied"),
        (msgspec.structs.replace(true[0], loss=0.0), "its answer is true"),  # it passed on what came
        (msgspec.structs.replace(true[0], output_grads=other), "it was sent something false"),
    ]
    liars = [convict(was, said) for said, _ in cases]
    convict(was, true[0], forged=True)
    convict(was, true[0], judges=0)
    assert was.verify(0, 2)
    said = capsys.readouterr().out.splitlines()
    for (evidence, found), liar, listed, again in zip(cases, liars, said, said[len(cases) :], strict=False):
        both = " and ".join(peer.peer_id for peer in was.peers[evidence.stage])
        where = f"peer {liar} of stage {evidence.stage}: its answer of microbatch (0, 1)"
        assert listed == f"convicted: {where}, say {both}"
        assert again == f"computed again, microbatch (0, 1): peer {liar}: {found}"
    assert len(said) == 2 * len(cases) + 3
    assert was.verify(0, 1, stage=1)
    assert capsys.readouterr().out.count("convicted: ") == 3


@pytest.mark.virtual_time
@pytest.mark.slow
async def test_a_peer_that_lied_is_in_the_transcript_with_those_that_judged_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    audit(monkeypatch, share=1.0)
    plain = small(steps=4, batch={"microbatches_per_step": 6}, codec={"forward": "none", "backward": "none"})
    run = admitting(plain, TRAINER)
    async with swarm(run, replicas=3, batches=Text(batch_of(run))) as s:
        await s.until_serving()
        lie(s.peers["s0p1"], LIES["zero"])
        keeper = add_keeper(s, tmp_path, keep=9)
        s.add_trainer(TRAINER)
        honest = [p for n, p in s.peers.items() if n != "s0p1"]
        await s.until(lambda: all(p.core.version >= run.steps for p in honest))
        await s.until(lambda: "s0p1" in keeper._recorders[0]._file.convicted)  # type: ignore
        for _ in range(2):
            await keeper._recorders[0].record(all_of_it=True)  # type: ignore
    data = tmp_path / "text"
    data.write_bytes(TEXT.tobytes())
    options = VerifyOptions(transcript=path_of(tmp_path, run), data=(data,), from_=0, to=4)
    run_verify(options, verify=SimSigner("reader").verify)
    said = capsys.readouterr().out.splitlines()
    listed = [line for line in said if line.startswith("convicted: ")]
    assert listed, "by both, or by each for an answer of its own"
    assert all(line.startswith("convicted: peer s0p1 of stage 0: its answer of microbat") for line in listed)
    assert {by for line in listed for by in line.partition(", say ")[2].split(" and ")} == {"s0p0", "s0p2"}
    assert any(line.endswith(": peer s0p1: it lied") for line in said)


@pytest.mark.virtual_time
@pytest.mark.parametrize("lies", [False, True])
async def test_what_a_keeper_of_a_real_swarm_wrote_verifies_or_tells_of_the_stage_that_lied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lies: bool
) -> None:
    torch.set_num_threads(1)
    run = small(steps=4)
    async with swarm(run, batches=Text(batch_of(run))) as s:
        await s.until_serving()
        for peer in [s.peers[name] for name in s.of_stage(1) if lies]:
            honest = peer.core.compute.apply

            def apply(
                t: int, *found: Any, honest: Any = honest, state: Any = peer.core.compute.state
            ) -> None:
                honest(t, *found)
                if t == 1:
                    state.weights(t + 1)[:100] += 0.01

            peer.core.compute.apply = apply  # type: ignore[method-assign]
        add_keeper(s, tmp_path, keep=9)
        s.add_trainer("trainer")
        await s.until_finished()
        await s.until(lambda: path_of(tmp_path, run).exists())
        await s.until(lambda: checkpoint.newest_common_step(tmp_path, run) == 4)
    data = tmp_path / "text"
    data.write_bytes(TEXT.tobytes())
    options = VerifyOptions(transcript=path_of(tmp_path, run), data=(data,), from_=0, to=4)
    assert run_verify(options, verify=SimSigner("reader").verify) != lies
    said = capsys.readouterr().out.splitlines()
    if lies:
        assert said[0] == "step 1, stage 1: other weights than s1p0 and s1p1 signed"
    else:
        assert said[1] == "compared: 8 of 8 signed steps of stages, and the checkpoint of step 4"


# --- islands ----------------------------------------------------------------------------------------------


def islands(**changes: Any) -> Run:
    """Two islands of two stages, which meet twice."""
    run = small(steps=6, checkpoint_every=0, batch={"microbatches_per_step": 4}, **changes)
    return replace(run, islands=IslandsSpec(count=2, local_steps=2, codec="blockwise8"))


def of_cell(s: Swarm, cell: int) -> list[str]:
    return [name for name in s.peers if name.startswith(f"s{cell}")]


def false_change(s: Swarm) -> None:
    """All of stage 1 of island 1 say, and sign, that it has changed something else."""
    for name in of_cell(s, 3):
        state = s.peers[name].core.compute.state
        honest, meetings = state.difference, count()

        def difference(honest: Any = honest, meetings: Any = meetings) -> torch.Tensor:
            found = honest()
            if next(meetings) == 1:
                found.view(torch.uint8)[:64] ^= 1
            return found

        state.difference = difference  # type: ignore[method-assign]


def other_change_given(s: Swarm) -> None:
    """The same peers sign what is true, and give something else to the other island."""
    for name in of_cell(s, 3):
        leases = s.peers[name]._states  # type: ignore
        honest = leases.lend

        async def lend(
            reader: str, pool: str, what: Any, content: Snapshot, *rest: Any, honest: Any = honest
        ) -> Any:
            if what[0] >= 0:
                changed = content.tensors["gradient"].clone()
                changed[:64] ^= 1
                content = content._replace(tensors={"gradient": changed})
            return await honest(reader, pool, what, content, *rest)

        leases.lend = lend  # type: ignore[method-assign]


def other_weights(s: Swarm) -> None:
    """All of stage 0 of island 1 change their weights between two meetings."""
    for name in of_cell(s, 2):
        compute = s.peers[name].core.compute

        def apply(t: int, *found: Any, compute: Any = compute, honest: Any = compute.apply) -> None:
            honest(t, *found)
            if t == 3:
                compute.state.weights(t + 1)[:100] += 0.01

        compute.apply = apply  # type: ignore[method-assign]


LIES_OF_ISLANDS: dict[str, tuple[Callable[[Swarm], None], str]] = {
    "nothing": (lambda s: None, ""),
    "a change": (false_change, "5, stage 1 of island 1 (cell 3): other change than s3p0 and s3p1 signed"),
    "given": (other_change_given, "2, stage 1 of island 0 (cell 1): other weights than s1p0 and s1p1 signed"),
    "weights": (other_weights, "3, stage 0 of island 1 (cell 2): other weights than s2p0 and s2p1 signed"),
}


def verified(folder: Path, run: Run, first: int, **more: Any) -> bool:
    data = folder / "text"
    data.write_bytes(TEXT.tobytes())
    options = VerifyOptions(transcript=path_of(folder, run), data=(data,), from_=first, to=6, **more)
    return run_verify(options, verify=SimSigner("reader").verify)


async def until_all_is_kept(s: Swarm, keeper: CheckpointKeeper) -> None:
    await s.until_finished(limit_s=200.0)
    ends = keeper._recorders[0]._file.ends  # type: ignore
    await s.until(lambda: ends == dict.fromkeys(range(4), 6), limit_s=60.0)
    await s.until(lambda: keeper.version == 6, limit_s=60.0)


@pytest.mark.virtual_time
@pytest.mark.parametrize("case", some(list(LIES_OF_ISLANDS), quick=["nothing", "a change"]))
async def test_islands_are_computed_again_with_their_meetings_and_who_lied_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    torch.set_num_threads(1)
    run, (lies, named) = islands(), LIES_OF_ISLANDS[case]
    async with swarm(run, batches=Text(batch_of(run))) as s:
        await s.until_serving()
        lies(s)
        keeper = add_keeper(s, tmp_path, keep=9)
        train(s)
        await until_all_is_kept(s, keeper)
    said = []
    for scratch in (None, tmp_path / "scratch"):
        assert verified(tmp_path, run, 0, scratch=scratch) == (not named)
        said.append(capsys.readouterr().out.splitlines())
    assert said[0] == said[1]
    if named:
        assert said[0][0] == f"step {named}" and len(said[0]) == 3
        assert said[0][1].startswith("At a meeting" if case != "weights" else "Each stage computes")
        return
    assert said[0][:2] == [
        "steps 0 to 5 are what the peers signed, to the last bit",
        "compared: 24 of 24 signed steps of stages, and the checkpoint of step 6",
    ]
    true, judge = answered(run.island(1), 0, 1)[0], SimSigner("s2p1")
    for island, made_up in {
        1: msgspec.structs.replace(true, outputs=b"x" * 32),
        0: msgspec.structs.replace(true, stage=2),  # which is a cell, and no stage
        2: true,
    }.items():
        of, liar = f"{run.id}.{island}", SimSigner(f"liar {island}")
        evidence = WrongAnswer(
            accused=liar.peer_id, statement=made_up, signature=sign(liar, of, made_up),
            inputs=(), output_grads=(), outputs=(), input_grads=(),
        )  # fmt: skip
        signed = Signed(judge.peer_id, sign(judge, of, judged(evidence)))
        took = TookSteps(made_up.stage, 0, "f" * 32, b"")
        TranscriptWriter(tmp_path, run).append(
            [Conviction(evidence, (signed,), island), Took(took, (signed,), 2)]
        )
    assert verified(tmp_path, run, 0)
    where = "liar 1 of stage 0 of island 1 (cell 2): its answer of microbatch (0, 1), say s2p1"
    assert capsys.readouterr().out.splitlines()[:3] == [
        f"convicted: peer {where}",
        "computed again, microbatch (0, 1): peer liar 1: it lied",
        "steps 0 to 5 are what the peers signed, to the last bit",
    ]


@pytest.mark.virtual_time
@pytest.mark.slow
async def test_steps_that_a_lost_island_took_twice_are_compared_once_and_are_true(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    run = islands()
    async with swarm(run, batches=Text(batch_of(run))) as s:
        await s.until_serving()
        keeper = add_keeper(s, tmp_path, keep=9)
        train(s, steps=4)
        await s.until_version(4)
        await s.until(lambda: keeper.version == 3)
        ends = keeper._recorders[0]._file.ends  # type: ignore
        while ends != dict.fromkeys(range(4), 4):
            for recorder in keeper._recorders:  # type: ignore
                await recorder.record(all_of_it=True)
        for name in [*of_cell(s, 2), *of_cell(s, 3)]:
            s.kill(name)
        new = [s.add_peer(f"new {cell}", cell) for cell in (2, 3)]
        await s.until(lambda: all(peer.core.version == 3 for peer in new), limit_s=200.0)
        train(s, "again")
        await until_all_is_kept(s, keeper)
    assert verified(tmp_path, run, 0)
    assert capsys.readouterr().out.splitlines()[1].startswith("compared: 24 of 24 signed steps of stages")
    assert verified(tmp_path, run, 3, stage=3)
    assert "compared: 3 of 3 signed steps" in capsys.readouterr().out
    with pytest.raises(SetupError, match=r"--stage 4: run .* has cells 0 to 3"):
        verified(tmp_path, run, 3, stage=4)
    with pytest.raises(SetupError, match="step 4 is not complete"):  # between meetings
        verified(tmp_path, run, 4)


def rounding_otherwise(state: Any, apply: Callable[..., None], t: int, *more: Any) -> None:
    apply(t, *more)
    state.weights(t + 1).view(torch.int32)[0] ^= t == 0


@pytest.mark.slow
@pytest.mark.virtual_time
async def test_islands_on_another_kind_of_device_are_refereed_with_their_meetings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    run = islands()
    async with swarm(run, replicas=1, batches=Text(batch_of(run))) as s:
        await s.until_serving()
        for peer in s.peers.values():
            peer.core.kind, state = "f" * 32, peer.core.compute.state
            peer.core.compute.apply = partial(rounding_otherwise, state, peer.core.compute.apply)  # type: ignore
        keeper = add_keeper(s, tmp_path, keep=9)
        train(s)
        await until_all_is_kept(s, keeper)
    assert verified(tmp_path, run, 0)
    told = capsys.readouterr()
    assert "24 of 24 signed steps: s0p0 of stage 0 of island 0 (cell 0) computed on another" in told.out
    assert "compared: 24 of 24 signed steps of stages, and the checkpoint of step 6" in told.out
