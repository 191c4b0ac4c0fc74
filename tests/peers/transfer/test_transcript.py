"""The transcript that a keeper writes: signed by replicas, whole or repaired, and small."""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import msgspec
import pytest

from peers.audit.recorder import chosen
from peers.audit.trail import KEPT, OwnTrail
from peers.events import Trouble
from peers.ports import Answer, Request
from peers.sim.network import SimSigner
from peers.storage import checkpoint, transcript
from peers.storage.transcript import (
    CharterSeen,
    Conviction,
    Terms,
    Took,
    TranscriptWriter,
    packed,
    path_of,
    read,
)
from swarm.errors import SetupError
from swarm.manifest import Run, audit_run
from swarm.protocol.statements import is_signed, sign
from swarm.protocol.sums import Projected
from swarm.records import Voucher
from swarm.wire.evidence import Convicted, WrongContribution
from swarm.wire.messages import AskTrail, Trail, pack, unpack
from swarm.wire.trails import (
    MAX_STEPS,
    ROW_BYTES,
    Signed,
    TookStep,
    TookSteps,
    pack_rows,
    unpack_rows,
)
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import TRAINER, add_liar, admitting, give_voice
from tests.peers.transfer.test_keeping import RUN, add_keeper, trained_with_keeper

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def took(start: int, steps: int, *, stage: int = 0, kind: str = "k", norm: float = 1.5) -> TookSteps:
    rows = [TookStep(f"{t:032x}", norm, os.urandom(16).hex() if norm < 0 else f"{t + 7:032x}")
            for t in range(start + 1, start + 1 + steps)]  # fmt: skip
    return TookSteps(stage, start, kind, pack_rows(rows))


def entries(folder: Path, run: Run) -> list[Any]:
    return read(path_of(folder, run)).entries


# --- a replica's trail


def test_steps_are_the_same_after_they_travelled_and_what_is_not_known_is_empty() -> None:
    steps = [TookStep("ab" * 16, 0.1, ""), TookStep("cd" * 16, float("inf"), "ef" * 16)]
    rows = pack_rows(steps)
    assert len(rows) == 2 * ROW_BYTES == 80
    assert unpack_rows(rows) == unpack_rows(rows + b"half") == steps


def test_a_trail_has_no_gap_forgets_the_oldest_and_keeps_a_step_back_until_its_weights_are_hashed() -> None:
    trail = OwnTrail()
    for t in range(3, 6):
        trail.took(t, f"{t:032x}", float(t))
        assert trail.between(0, 99) == (3, [TookStep(f"{s:032x}", float(s), "aa" * 16) for s in range(3, t)])
        trail.weighs(t + 1, "aa" * 16)
    assert trail.between(4, 5) == (4, [TookStep(f"{4:032x}", 4.0, "aa" * 16)])
    assert trail.between(7, 9) == (7, []) and trail.between(9, 2) == (9, [])
    trail.weighs(2, "bb" * 16)  # before its first
    trail.took(9, "09" * 16, 0.0)  # steps were missed
    assert trail.between(0, 99) == (9, [])
    trail.begin(20)  # other weights were loaded
    for t in range(20, 20 + KEPT + 5):
        trail.took(t, "01" * 16, 1.0)
    start, steps = trail.between(0, 10_000)
    assert (start, len(steps)) == (25, MAX_STEPS)
    assert trail.between(20 + KEPT, 10_000)[1] == [TookStep("01" * 16, 1.0, "")] * 4


# --- the file


def test_a_transcript_says_whose_it_is_and_is_continued(tmp_path: Path) -> None:
    first = TranscriptWriter(tmp_path, RUN)
    one, two = Took(took(0, 4), (Signed(PEER, b"s" * 64),)), CharterSeen(PEER, b"signed")
    first.append([one, two])
    other = TranscriptWriter(tmp_path, RUN)
    other.append()
    assert other.ends == {0: 4} and other.charter == b"signed"
    other.append([Took(took(0, 3, stage=1), ())])
    first.append()
    assert first.ends == {0: 4, 1: 3}
    assert entries(tmp_path, RUN) == [Terms(RUN.id, RUN.to_toml()), one, two, Took(took(0, 3, stage=1), ())]
    assert read(path_of(tmp_path, RUN)).run == RUN


@pytest.mark.parametrize("zeros", [0, 1, 200])
@pytest.mark.parametrize("kept", [0, 1, 7, 8, 30])
def test_an_entry_that_was_cut_off_is_not_read_and_the_next_writer_removes_it(
    tmp_path: Path, kept: int, zeros: int
) -> None:
    """After a power cut there may be zeros."""
    writer, last = TranscriptWriter(tmp_path, RUN), Took(took(4, 4), ())
    writer.append([Took(took(0, 4), ())])
    path = path_of(tmp_path, RUN)
    whole = path.read_bytes()
    path.write_bytes(whole + packed(last)[:kept] + bytes(zeros))
    assert len(read(path).entries) == 2 and read(path).rest_bytes == kept + zeros
    again = TranscriptWriter(tmp_path, RUN)
    again.append([last])
    assert path.read_bytes() == whole + packed(last) and again.ends == {0: 8}


@pytest.mark.parametrize("charter_bytes", [100, 1 << 19])
def test_a_flipped_bit_ends_the_reading_and_a_file_that_is_damaged_is_not_cut(
    tmp_path: Path, charter_bytes: int
) -> None:
    writer = TranscriptWriter(tmp_path, RUN)
    writer.append([Took(took(0, 4), ()), *(CharterSeen(PEER, bytes(charter_bytes)) for _ in range(3))])
    path = path_of(tmp_path, RUN)
    data = bytearray(path.read_bytes())
    data[len(transcript.MAGIC) + 8 + len(packed(Terms(RUN.id, RUN.to_toml()))) + 20] ^= 1
    path.write_bytes(data)
    assert [type(entry) for entry in entries(tmp_path, RUN)] == [Terms]
    with pytest.raises(SetupError, match="is damaged, or of another run: move it away"):
        TranscriptWriter(tmp_path, RUN).append()
    assert path.read_bytes() == data


def whole(entry: bytes) -> bytes:
    return struct.pack("<II", len(entry), zlib.crc32(entry)) + entry


@pytest.mark.parametrize(
    "tail",
    [
        struct.pack("<II", 1 << 31, 0) + b"x",  # more than there may be
        struct.pack("<II", 0, 0),
        whole(b"abc"),
        whole(b"\x93\xa5Terms\xa1\xff\xa0"),  # no UTF-8
        whole(b"\x94\xa5Terms\xa0\xa0" + b"\x91" * 100_000),  # a list in a list in a list
    ],
)
def test_what_is_no_entry_is_not_read(tmp_path: Path, tail: bytes) -> None:
    TranscriptWriter(tmp_path, RUN).append([CharterSeen(PEER, b"signed")])
    with path_of(tmp_path, RUN).open("ab") as file:
        file.write(tail)
    assert [type(entry) for entry in entries(tmp_path, RUN)] == [Terms, CharterSeen]


def test_a_file_that_is_none_or_of_another_run_is_refused(tmp_path: Path) -> None:
    path = path_of(tmp_path, RUN)
    with pytest.raises(SetupError, match="cannot be read: No such file"):
        read(path)
    other = replace(RUN, seed=9)
    TranscriptWriter(tmp_path, RUN).append()
    assert not path.exists()  # there is nothing to write
    TranscriptWriter(tmp_path, other).append([CharterSeen(PEER, b"signed")])
    path.parent.mkdir()
    contents = path_of(tmp_path, other).read_bytes(), b"something else"
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(SetupError, match="is damaged, or of another run: move it away, and a new one"):
            TranscriptWriter(tmp_path, RUN).append()
        assert path.read_bytes() == content
    for content in (b"something else", transcript.MAGIC + packed(CharterSeen(PEER, b""))):
        path.write_bytes(content)
        with pytest.raises(SetupError, match="is not a transcript: a keeper writes one beside its checkpoin"):
            read(path)
    path.write_bytes(transcript.MAGIC + packed(Terms(RUN.id, other.to_toml())))
    with pytest.raises(SetupError, match="the manifest is of run"):
        read(path)


def test_a_transcript_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    writer = TranscriptWriter(tmp_path, RUN)
    writer.append([Took(took(0, 4), ())])
    path_of(tmp_path, RUN).unlink()
    writer.append([Took(took(4, 2), ())])
    assert writer.ends == {0: 6} and len(entries(tmp_path, RUN)) == 2


@pytest.mark.parametrize("there", [b"", b"swarm trans", b"swarm trans" + bytes(9), bytes(9000)])
def test_a_beginning_that_was_cut_off_is_written_again(tmp_path: Path, there: bytes) -> None:
    path = path_of(tmp_path, RUN)
    path.parent.mkdir()
    path.write_bytes(there)
    TranscriptWriter(tmp_path, RUN).append([Took(took(0, 4), ())])
    assert len(entries(tmp_path, RUN)) == 2 and read(path).rest_bytes == 0


def test_keepers_that_begin_a_transcript_at_the_same_moment_lose_nothing_of_each_other(
    tmp_path: Path,
) -> None:
    def write(at: Path, stage: int) -> None:
        writer = TranscriptWriter(at, RUN)
        both.wait()
        writer.append([Took(took(0, 4, stage=stage), ())])

    for number in range(20):
        both, at = Barrier(2), tmp_path / str(number)
        writers = [Thread(target=write, args=(at, stage)) for stage in range(2)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert {entry.steps.stage for entry in entries(at, RUN)[1:]} == {0, 1}


def test_a_disk_that_is_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TranscriptWriter(tmp_path, RUN)

    def full(file: Any, data: bytes) -> None:
        file.write(data[:50])
        raise OSError(28, "No space left on device")

    writer.append([CharterSeen(PEER, b"signed")])

    with monkeypatch.context() as patched:
        patched.setattr(transcript.atomic_file, "write_all", full)
        with pytest.raises(SetupError, match=r"cannot write the transcript in .* the disk is full"):
            writer.append([Took(took(0, 4), ())])
    assert writer.ends == {}
    writer.append([Took(took(0, 4), ())])
    assert writer.ends == {0: 4} and len(entries(tmp_path, RUN)) == 3


def test_the_transcript_of_100_000_steps_of_32_stages_has_less_than_200_mb() -> None:
    """What peers are named, their signatures and vouchers do not depend on how many there are."""
    voucher = Voucher(PEER, 100, 10**6, b"v" * 64)
    by = (Signed(PEER, b"s" * 64, voucher), Signed(PEER, b"t" * 64, voucher))
    entry = packed(Took(took(10**6, MAX_STEPS, stage=31, kind="f" * 32), by))
    segments = -(-100_000 // MAX_STEPS)
    assert 40 * MAX_STEPS < len(entry) < 45 * MAX_STEPS
    assert 32 * segments * len(entry) < 145e6


# --- which words are written


def test_the_account_with_the_most_voice_is_written_and_one_that_contradicts_it() -> None:
    true, false, short, gpu, late = (
        took(0, 4), took(0, 4, norm=9.0), took(0, 3), took(0, 4, kind="g", norm=3.0), took(2, 2)
    )  # fmt: skip

    def by(name: str) -> Signed:
        return Signed(name, b"s" * 64)

    voice = {"a": 20, "b": 20, "c": 100, "d": 1}
    assert chosen([], voice.__getitem__) == []
    told = [(late, by("c")), (true, by("a")), (short, by("d")), (true, by("b")), (false, by("d"))]
    assert chosen(told, voice.__getitem__) == [Took(true, (by("a"), by("b"))), Took(false, (by("d"),))]
    assert chosen([(gpu, by("d")), (true, by("a"))], voice.__getitem__) == [Took(true, (by("a"),))]
    three = [(true, by(name)) for name in "abc"]
    assert chosen(three, voice.__getitem__) == [Took(true, (by("a"), by("b")))]


# --- a keeper among real stage peers


def recorded(folder: Path, run: Run, s: Swarm) -> list[Took]:
    found = [entry for entry in entries(folder, run) if isinstance(entry, Took)]
    signer = next(iter(s.network.peers.values())).transport.signer
    for one in found:
        for by in one.by:
            assert is_signed(signer, by.peer, run.id, one.steps, by.signature)
    return found


@pytest.mark.virtual_time
async def test_a_keeper_writes_down_what_two_replicas_of_each_stage_sign(tmp_path: Path) -> None:
    run = replace(audit_run(stages=2, steps=6, microbatches_per_step=4), checkpoint_every=2)
    async with swarm(run, replicas=3) as s:
        await trained_with_keeper(s, tmp_path)
        await s.until(lambda: path_of(tmp_path, run).exists() and len(entries(tmp_path, run)) == 3)
        for one in recorded(tmp_path, run, s):
            assert (one.steps.start, one.steps.end, len(one.by)) == (0, 6, 2)
            assert {by.peer[:3] for by in one.by} == {f"s{one.steps.stage}p"}
            steps = unpack_rows(one.steps.rows)
            assert all(step.sum and step.total_sqnorm > 0 for step in steps)
            core = s.peers[one.by[0].peer].core
            assert steps[-1].weights == core.digest and one.steps.kind == core.kind


@pytest.mark.virtual_time
async def test_a_keeper_that_leaves_takes_what_there_is_and_the_next_goes_on_from_there(
    tmp_path: Path,
) -> None:
    run = replace(audit_run(stages=1, steps=12, microbatches_per_step=2), checkpoint_every=2)
    async with swarm(run, replicas=2) as s:
        keeper = add_keeper(s, tmp_path)
        await s.until_serving()
        s.add_trainer("trainer", steps=5)
        await s.until_version(5)
        await s.until(lambda: s.network.records["s0p0"].version == 5)
        assert not path_of(tmp_path, run).exists()  # it is not due
        keeper.leave()
        await s.until(s.tasks["keeper"].done)
        (first,) = recorded(tmp_path, run, s)
        assert (first.steps.start, first.steps.end, len(first.by)) == (0, 5, 2)
        add_keeper(s, tmp_path, "other")
        s.add_trainer("another")
        await s.until_finished()
        await s.until(lambda: len(recorded(tmp_path, run, s)) == 2)
        assert (recorded(tmp_path, run, s)[1].steps.start, first.steps.end) == (5, 5)


@pytest.fixture
def short_trails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 steps each, of which 16 are remembered."""
    for where in ("recorder", "trail"):
        monkeypatch.setattr(f"peers.audit.{where}.MAX_STEPS", 4)
        monkeypatch.setattr(f"peers.audit.{where}.KEPT", 16)


@pytest.mark.virtual_time
@pytest.mark.usefixtures("short_trails")
async def test_a_keeper_that_was_away_for_longer_than_replicas_remember_goes_on_after_a_gap(
    tmp_path: Path,
) -> None:
    run = audit_run(stages=1, steps=43, microbatches_per_step=2)
    async with swarm(run, replicas=2) as s:
        await s.until_serving()
        s.add_trainer("trainer", steps=30)
        await s.until_version(30)
        await s.until(lambda: all(s.network.records[peer].version == 30 for peer in ("s0p0", "s0p1")))
        keeper = add_keeper(s, tmp_path)
        await s.until(lambda: path_of(tmp_path, run).exists())
        (first,) = recorded(tmp_path, run, s)
        assert (first.steps.start, first.steps.end, len(first.by)) == (24, 28, 2)
        s.add_trainer("another")
        await s.until_finished()
        await s.until(lambda: all(s.network.records[peer].version == 43 for peer in ("s0p0", "s0p1")))
        keeper.leave()
        await s.until(s.tasks["keeper"].done)
        found = [(one.steps.start, one.steps.end) for one in recorded(tmp_path, run, s)]
        assert found[0] == (24, 28) and found[-1][1] == 43  # all of the rest, though it is several trails
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(found))


@pytest.mark.virtual_time
@pytest.mark.usefixtures("short_trails")
async def test_one_that_says_that_it_is_far_ahead_does_not_say_alone_what_its_stage_did(
    tmp_path: Path,
) -> None:
    """It signs steps that no peer has taken: what others sign of these would not be asked for any more."""
    run = admitting(audit_run(stages=2, steps=12, microbatches_per_step=2))
    async with swarm(run, replicas=2) as s:
        give_voice(s, *s.peers, "liar")
        await s.until_serving()
        await add_liar(s, "liar", 0, run.steps)
        transport = s.network.peers["liar"].transport

        async def made_up(request: Request) -> Answer:
            ask = unpack(request.header, AskTrail)
            false = took(ask.since, min(ask.until - ask.since, 4), kind="f" * 32)
            return Answer(pack(Trail(steps=false, signature=sign(transport.signer, run.id, false))))

        transport.serve("trail", made_up)
        recorder = add_keeper(s, tmp_path)._recorders[0]  # type: ignore
        s.add_trainer(TRAINER)
        await s.until(lambda: "keeper" in s.network.records)
        while not all(peer.core.finished for _, peer in s.live()):
            await recorder.record()
            await asyncio.sleep(0.1)
        await s.until(lambda: all(s.network.records[name].version == run.steps for name in s.peers))
        await recorder.record()
        found = [one for one in recorded(tmp_path, run, s) if one.by[0].peer != "liar"]
        said = {stage: [one.steps.start for one in found if one.steps.stage == stage] for stage in range(2)}
        assert said == {0: [0, 4, 8], 1: [0, 4, 8]}


@pytest.mark.virtual_time
async def test_a_charter_is_written_down_once(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=1) as s:
        keeper = add_keeper(s, tmp_path, charter=lambda: (PEER, b"signed"))
        await s.until_serving()
        for _ in range(2):
            await keeper._recorders[0].record()  # type: ignore
        assert entries(tmp_path, RUN)[1:] == [CharterSeen(PEER, b"signed")]


def accusation(run: Run, accused: str, by: str, *, stage: int = 0) -> WrongContribution:
    said = Projected(stage, 3, "r", (), (), ())
    return WrongContribution(accused=accused, statement=said, signature=sign(SimSigner(by), run.id, said))


def convictions(folder: Path, run: Run) -> list[tuple[str, list[str]]]:
    if not path_of(folder, run).exists():
        return []
    found = [entry for entry in entries(folder, run) if isinstance(entry, Conviction)]
    assert all(len(packed(entry)) < 600 for entry in found)
    return [(entry.evidence.accused, [by.peer for by in entry.by]) for entry in found]


@pytest.mark.virtual_time
async def test_who_was_convicted_is_written_once_two_replicas_judged_it_or_after_a_while_one(
    tmp_path: Path,
) -> None:
    async with swarm(replace(RUN, steps=99), replicas=4) as s:
        await s.until_serving()
        keeper = add_keeper(s, tmp_path)
        await s.until(lambda: "keeper" in s.network.records)
        one, other = (s.peers[name].convictions for name in ("s0p0", "s0p1"))
        one.convict(accusation(s.run, "s0p2", "s0p2"))

        async def recorded_by(times: int) -> list[tuple[str, list[str]]]:
            for _ in range(times):
                await keeper._recorders[0].record()  # type: ignore
            return convictions(tmp_path, s.run)

        asked = 4  # replicas, in turn
        assert await recorded_by(2 * asked) == []
        first = [("s0p2", ["s0p0"])]
        assert await recorded_by(asked) == first and await recorded_by(2 * asked) == first
        other.convict(accusation(s.run, "s0p2", "s0p2"))
        both = [*first, ("s0p2", ["s0p0", "s0p1"])]
        assert await recorded_by(asked) == both and await recorded_by(2 * asked) == both
        for convicted in (one, other):
            convicted.convict(accusation(s.run, "s0p3", "s0p3"))
        assert (await recorded_by(asked))[2:] == [("s0p3", ["s0p0", "s0p1"])]


@pytest.mark.virtual_time
async def test_evidence_that_its_accused_did_not_sign_is_not_written_nor_that_of_others_stages(
    tmp_path: Path,
) -> None:
    async with swarm(replace(RUN, steps=99), replicas=3) as s:
        await s.until_serving()
        keeper = add_keeper(s, tmp_path)
        await s.until(lambda: "keeper" in s.network.records)
        for name in ("s0p0", "s0p1"):
            s.peers[name].convictions.convict(accusation(s.run, "s0p2", name))
            s.peers[name].convictions.convict(accusation(s.run, "s1p0", "s1p0", stage=1))
        judge = s.network.peers["s0p1"].transport
        honest, _ = judge.handlers["convicted"]

        async def unsigned(request: Request) -> Answer:
            told = unpack((await honest(request)).header, Convicted)
            return Answer(pack(msgspec.structs.replace(told, signature=b"f" * 64 if told.evidence else b"")))

        s.peers["s0p0"].convictions.convict(accusation(s.run, "s0p9", "s0p9"))
        s.peers["s0p1"].convictions.convict(accusation(s.run, "s0p9", "s0p9"))
        judge.serve("convicted", unsigned)
        for _ in range(12):
            await keeper._recorders[0].record()  # type: ignore
        assert convictions(tmp_path, s.run) == [("s0p9", ["s0p0"])]


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "change",
    [
        lambda took, sig: Trail(steps=took, signature=b"f" * 64),
        lambda took, sig: Trail(steps=TookSteps(1, took.start, took.kind, took.rows), signature=sig),
        lambda took, sig: Trail(steps=TookSteps(0, took.start + 1, took.kind, took.rows), signature=sig),
        lambda took, sig: Trail(steps=TookSteps(0, took.start, took.kind, b""), signature=sig),
        lambda took, sig: Answer(b"nonsense"),
    ],
    ids=["forged", "other stage", "beyond the end", "nothing", "nonsense"],
)
async def test_what_a_replica_did_not_sign_or_was_not_asked_is_not_written(
    tmp_path: Path, change: Any
) -> None:
    run = audit_run(stages=1, steps=3, microbatches_per_step=2)
    async with swarm(run, replicas=2) as s:
        await s.until_serving()
        transport = s.peers["s0p1"].core.transport
        honest, _ = transport.handlers["trail"]  # type: ignore[attr-defined]

        async def lie(request: Request) -> Answer:
            said = unpack((await honest(request)).header, Trail)
            false = change(said.steps, said.signature)
            return Answer(pack(false)) if isinstance(false, Trail) else false

        transport.serve("trail", lie)
        await trained_with_keeper(s, tmp_path)
        await s.until(lambda: path_of(tmp_path, run).exists() and len(entries(tmp_path, run)) == 2)
        (only,) = recorded(tmp_path, run, s)
        assert [by.peer for by in only.by] == ["s0p0"]
        assert not s.seen(Trouble)


@pytest.mark.virtual_time
async def test_a_replica_whose_weights_were_replaced_signs_no_step_from_before() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        await s.until_finished()
        core = s.peers["s0p0"].core
        await s.until(lambda: core.digest)
        assert len(core.trail.between(0, 9)[1]) == RUN.steps
        await core.load(core.position, core.compute.state.copy())
        assert core.trail.between(0, 9) == (RUN.steps, [])


@pytest.mark.virtual_time
async def test_a_trail_is_asked_by_anybody_and_of_this_run() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        ask = AskTrail(run=RUN.id, since=0, until=10**9)
        said = await s.add_stranger().ask("s0p0", "trail", ask, Trail)
        assert said.steps.rows == b"" and said.steps.start == 0


@pytest.mark.virtual_time
async def test_a_damaged_transcript_is_said_once_and_checkpoints_are_kept_all_the_same(
    tmp_path: Path,
) -> None:
    path_of(tmp_path, RUN).parent.mkdir()
    path_of(tmp_path, RUN).write_bytes(b"something else")
    async with swarm(RUN, replicas=1) as s:
        await trained_with_keeper(s, tmp_path)
        await s.until(lambda: checkpoint.newest_common_step(tmp_path, RUN) == RUN.steps)
        (said,) = s.seen(Trouble)
        assert "is damaged, or of another run: move it away" in said.text
