"""A history on disk: played again it gives the same pictures; a torn or a foreign file is said."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from pathlib import Path

import msgspec
import pytest

from peers.clock import now_s
from peers.programs.tool_options import DashboardOptions
from peers.sim.loop import run_virtual
from peers.watch.dashboard import MAX_WAIT_S, run_dashboard
from peers.watch.history import Recorder, read
from swarm.errors import SetupError
from swarm.manifest import demo_run
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation, SwarmHealth
from tests.watch.pictures import RUN, START, record, status

LOOKS = [
    Observation(at=START, records=(record("peer-a", 0), record("peer-b", 1))),
    Observation(at=START + 1),
    *(
        Observation(
            at=START + 2 * v, statuses=(status("peer-a", 0, v, to=("peer-b",)),), silent={"peer-b": "ü €"}
        )
        for v in range(1, 6)
    ),
    Observation(at=START + 30, gone=("peer-b",), refused={"a record with a wrong signature": 2}),
]


def played(looks: list[Observation]) -> list[SwarmHealth]:
    aggregator, seen = Aggregator(RUN), []
    for look in looks:
        aggregator.observe(look)
        seen.append(aggregator.health(now=look.at))
    return seen


def recorded(path: Path, looks: list[Observation] = LOOKS) -> None:
    with Recorder(path, RUN) as record:
        for look in looks:
            record(look)


def test_what_was_recorded_gives_the_same_pictures(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path)
    run, looks = read(path)
    assert run == RUN
    again = played(list(looks))
    assert len(path.read_bytes().splitlines()) == len(LOOKS)  # a head, and nothing for the look without news
    expected = played(LOOKS)
    del expected[1]
    assert again == expected


def test_a_file_is_continued_also_after_it_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path, LOOKS[:4])
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"at": 1000')
    assert len(list(read(path)[1])) == 3
    recorded(path, LOOKS[4:])
    assert path.read_bytes().startswith(whole + b'{"at": 1000\n{"at":1000')
    assert played(list(read(path)[1]))[-1] == played(LOOKS)[-1]


def test_who_went_while_nothing_was_recorded_is_not_there_afterwards(tmp_path: Path) -> None:
    """They were in the replay for ever, as peers that serve."""
    path = tmp_path / "history.jsonl"
    recorded(path, LOOKS[:4])
    recorded(path, [Observation(at=START + 900, records=(record("peer-b", 1), record("peer-c", 0)))])
    last = played(list(read(path)[1]))[-1]
    assert [peer.peer for peer in last.peers] == ["peer-c", "peer-b"]
    assert [line.text for line in last.happenings if line.kind == "lost"]


def test_a_file_that_is_full_becomes_an_old_one_and_both_can_be_played(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path, LOOKS[:2])  # and those who are there
    size_bytes = path.stat().st_size + 2 * len(msgspec.json.encode(LOOKS[3])) + 100
    path.unlink()
    with Recorder(path, RUN, most_bytes=size_bytes) as record:
        for look in LOOKS:
            record(look)
    old = path.with_name("history.jsonl.1")
    assert sorted(tmp_path.iterdir()) == [path, old]
    assert max(path.stat().st_size, old.stat().st_size) <= size_bytes
    for part in (old, path):
        run, looks = read(part)
        first = played(list(looks))[0]
        assert run == RUN and [p.peer for p in first.peers] == ["peer-a", "peer-b"]
        assert first.happenings == (), "those who are there did not join now"
    last = played(list(read(path)[1]))[-1]
    assert last.version == 5 and "peer-b of stage 1 is lost" in last.happenings[-1].text


@pytest.mark.parametrize(
    "line",
    [
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b" " * (1 << 21),
        b'{"at": "noon"}',
        b"\xff",
        msgspec.json.encode(Observation(at=1e300, records=(record("peer-a", 0),))),
    ],
    ids=["nested", "long", "of another type", "no text", "impossible time"],
)
def test_a_line_that_is_no_observation_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path)
    lines = path.read_bytes().splitlines()
    monkeypatch.setattr("peers.watch.history.MAX_LINE_BYTES", 1 << 20)
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))
    assert played(list(read(path)[1]))[-1] == played(LOOKS)[-1]
    path.write_bytes(line + b"\n")
    with pytest.raises(SetupError, match="its first line holds no manifest"):
        read(path)


def test_the_history_of_another_run_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path)
    with pytest.raises(SetupError, match=f"holds the history of run {RUN.id}, not of"):
        Recorder(path, demo_run(steps=7))


@pytest.mark.parametrize("text", ["", "hello\n", '{"event": 1}\n', "\xff\n", '{"manifest": 3}\n'])
def test_a_file_that_is_no_history_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(
        SetupError, match="is no history that --record wrote: its first line holds no manifest"
    ):
        read(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 2, "more": 1}, "in format 2; this one plays format 1: play it with the version that"),
        (
            {"manifest": RUN.to_toml().replace("format = 2", "format = 99")},
            "another version of swarm recorded it: format = 99 .* must be one of",
        ),
    ],
)
def test_the_history_of_another_version_is_said(tmp_path: Path, change: dict[str, object], text: str) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path)
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(first), **change}) + b"\n" + rest)
    with pytest.raises(SetupError, match=rf"history.jsonl .*{text}"):
        read(path)


def test_a_history_of_a_stranger_cannot_steer_the_terminal_nor_say_what_cannot_be(tmp_path: Path) -> None:
    path, evil = tmp_path / "history.jsonl", "\x1b[2J\x1b]0;mine\x07"
    wild = msgspec.structs.replace(record("peer-a", 0), device=evil, load=1e308, speed=-1.0)
    said = msgspec.structs.replace(status("peer-a", 0, 1), rebalance=evil, digest=evil, trainers=(evil,))
    looks = [
        Observation(at=START, records=(wild, record(evil, 0), record("peer-x", -7)), refused={evil: 1}),
        Observation(at=START + 1, statuses=(said, status("peer-a", 0, 10**6), status(evil, 0, 1))),
        Observation(at=START + 2, silent={"peer-a": evil, evil: evil}, gone=(evil,)),
    ]
    recorded(path, looks)
    last = played(list(read(path)[1]))[-1]
    assert [peer.peer for peer in last.peers] == ["peer-a"] and last.version == 3
    assert "\x1b" not in repr(last).replace("\\x1b", "\x1b")


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot read .*nowhere: No such file"):
        read(tmp_path / "nowhere")
    with pytest.raises(SetupError, match=r"cannot record to .*: No such file"):
        Recorder(tmp_path / "nowhere" / "x", RUN)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, which is a full disk, here")
def test_a_full_disk_is_said() -> None:
    with pytest.raises(SetupError, match="cannot record to /dev/full: No space left on device"):
        Recorder(Path("/dev/full"), RUN)


async def test_a_replay_prints_lines_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path)
    await run_dashboard(DashboardOptions(replay=path, speed=1e6))
    said = capsys.readouterr().out
    assert "peer peer-b of stage 1 is lost" in said
    assert "! 2 records refused: a record with a wrong signature" in said


async def test_a_replay_of_nothing_is_said(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path, [])
    with pytest.raises(SetupError, match=r"history.jsonl holds nothing yet but its run"):
        await run_dashboard(DashboardOptions(replay=path))


def test_a_gap_in_the_history_is_not_sat_through(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path, [LOOKS[0], msgspec.structs.replace(LOOKS[-1], at=START + 1e6)])

    async def replay() -> float:
        await run_dashboard(DashboardOptions(replay=path))
        return now_s()

    assert run_virtual(replay()) == MAX_WAIT_S


async def test_with_metrics_the_last_picture_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path)
    options = DashboardOptions(replay=path, speed=1e6, metrics=("127.0.0.1", 0))
    showing = asyncio.create_task(run_dashboard(options))
    said = ""
    while "is lost" not in said:  # the last look
        await asyncio.sleep(0.01)
        said += capsys.readouterr().out
    place = said.split("metrics at ")[1].split()[0]

    def fetch() -> str:
        with urllib.request.urlopen(place, timeout=10) as answer:
            return answer.read().decode()

    assert "swarm_run_version 5.0" in await asyncio.to_thread(fetch)
    showing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await showing
    with pytest.raises(OSError):
        await asyncio.to_thread(fetch)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (DashboardOptions(), "give --run and --join, or @FILE that has both, to look at a run; or --replay"),
        (DashboardOptions(run="0" * 32), "give --run and --join"),
        (
            DashboardOptions(replay=Path("x"), run="0" * 32),
            "--replay shows a recorded history: it goes without",
        ),
    ],
)
async def test_half_of_the_arguments_are_refused_with_what_to_add(
    options: DashboardOptions, text: str
) -> None:
    with pytest.raises(SetupError, match=text):
        await run_dashboard(options)


def test_looks_travel_as_json() -> None:
    for look in LOOKS:
        assert msgspec.json.decode(msgspec.json.encode(look), type=Observation) == look
