"""The lines that a bootstrap prints: they start the other programs of its run."""

from __future__ import annotations

import contextlib
import errno
import shlex
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.cli import build_parser
from peers.events import JoinLine
from peers.net import nat
from peers.net.nat import listening_host
from peers.options import BootstrapOptions, TrainOptions
from peers.programs.demo import run_up
from peers.programs.roles import Bootstrap, Train, address_for_others
from peers.programs.tool_options import UpOptions
from peers.start_line import program
from peers.system import everywhere
from swarm.manifest import AdmissionSpec, CustomModelSpec, IslandsSpec, Run
from swarm.records import PeerRecord
from tests.example import example_run

PEER = "12D3KooW" + "A" * 44
HERE, HERE_6 = "/ip4/127.0.0.1/tcp/31337/p2p/x", "/ip6/::1/tcp/31337/p2p/x"
THERE_6 = "/ip6/2001:db8::7/tcp/31337/p2p/x"
THERE, NAMED = "/ip4/192.0.2.2/tcp/31337/p2p/x", "/dns4/bootstrap/tcp/31337/p2p/x"


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [((HERE, THERE), THERE), ((HERE_6, HERE, NAMED), NAMED), ((THERE, NAMED), THERE), ((HERE, HERE_6), HERE)],
)
def test_an_address_is_handed_out_that_other_machines_can_dial(
    addresses: tuple[str, ...], expected: str
) -> None:
    assert address_for_others(addresses) == expected


def bootstrap_line(address: str = THERE, *, trainers: tuple[str, ...] = (), **options: Any) -> JoinLine:
    given = BootstrapOptions(manifest=Path("run.toml"), **options)
    run = replace(example_run(), admission=AdmissionSpec(trainers=trainers))
    role = Bootstrap(given, emit=lambda _: None)
    return role._join_line(run, ["--run", "5a7c", "--join", address])


def test_the_lines_start_all_that_a_run_needs_and_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("peers.programs.roles.program", lambda: ".venv/bin/swarm")
    line = bootstrap_line(data=(Path("my corpus.txt"),), join_file=Path("join.txt"))
    assert line.words() == (
        "join with, at least once for each of 3 stages:\n"
        f"    .venv/bin/swarm peer --run 5a7c --join {THERE}\n"
        "and start, once each:\n"
        "    .venv/bin/swarm train @join.txt --data 'my corpus.txt'\n"
        "    .venv/bin/swarm keeper @join.txt --dir ckpt\n"
        "    .venv/bin/swarm dashboard @join.txt"
    )
    Path("join.txt").write_text(f"--run\n{'5a7c' * 8}\n--join\n{THERE}\n")
    for command in line.others:
        assert build_parser().parse_args(shlex.split(command)[1:])
    assert not line.local
    near = bootstrap_line(HERE).words()
    assert near.endswith("\nonly programs of this machine can join; for others, add --host 0.0.0.0 here")
    assert f"    .venv/bin/swarm dashboard --run 5a7c --join {HERE}\n" in near


@pytest.mark.parametrize(
    ("identity", "key"), [(None, "trainer.key"), (Path("my run/owner.key"), "'my run/trainer.key'")]
)
def test_where_the_manifest_names_its_trainers_the_line_has_the_key_of_one(
    identity: Path | None, key: str
) -> None:
    given = {"data": (Path("a.txt"),), "eval_data": (Path("b.txt"),)}
    train, *_ = bootstrap_line(trainers=(PEER,), identity=identity, **given).others
    assert train.endswith(f" --identity {key} --data a.txt --eval-data b.txt")
    assert build_parser().parse_args(shlex.split(train.replace("5a7c", "5a7c" * 8))[1:])


def own_model() -> Run:
    data = replace(example_run().data, source="code", code="my_package.data:samples")
    model = CustomModelSpec(kind="code", source="my_package.models:build", stages=3, vocab_size=4)
    return replace(example_run(), model=model, data=data)


def test_the_lines_of_the_owner_allow_the_code_of_the_manifest_and_that_of_others_does_not() -> None:
    role = Bootstrap(BootstrapOptions(manifest=Path("run.toml")), emit=lambda _: None)
    line = role._join_line(own_model(), ["--run", "5a7c" * 8, "--join", THERE])
    train, keeper, dashboard = line.others
    for command in (train, keeper):
        assert build_parser().parse_args(shlex.split(command)[1:]).allow_code == ["my_package"]
    assert "--allow-code" not in line.line + dashboard


def test_up_says_how_the_loss_of_a_model_is_measured_that_writes_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("charter", "owner.key", "trainer.key"):
        (tmp_path / name).touch()
    monkeypatch.setattr("peers.storage.model_file.is_trained", lambda *_: True)
    for run, command in ((own_model(), ["eval"]), (example_run(), ["generate"])):
        (tmp_path / "run.toml").write_text(run.to_toml())
        run_up(UpOptions(folder=tmp_path))
        words = shlex.split(capsys.readouterr().out.splitlines()[-1])[1:]
        given = build_parser().parse_args(words)
        assert words[:1] == command and given.model == tmp_path / "model.safetensors"
        assert given.allow_code == ["my_package"][: len(run.code)]


async def test_a_program_says_which_peers_the_run_waits_for_and_how_they_are_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there: list[PeerRecord] = []

    async def lookup_all() -> list[PeerRecord]:
        return there

    run, node, said = example_run(), SimpleNamespace(directory=SimpleNamespace(lookup_all=lookup_all)), []
    options = TrainOptions(run=run.id, join=(THERE,), allow_code=("my_package", "./my code"))
    monkeypatch.setattr("peers.start_line.program", lambda: ".venv/bin/swarm")
    trainer = Train(options, emit=lambda event: said.append(event.words()))
    await trainer._tell_missing(options, node, run, 1)  # type: ignore[arg-type]
    first, line = said.pop().split("\n")
    assert first.startswith("the run waits for 2 more peers: no peer serves stages 0, 2 yet. Start one for")
    start = build_parser().parse_args(shlex.split(line)[1:])
    assert (start.join, start.allow_code) == ([THERE], ["my_package", "./my code"]), "as it was started"
    await trainer._tell_missing(options, node, run, 0, 1)  # type: ignore[arg-type]
    assert said.pop().startswith(
        "the run waits for 1 more peer: no peer serves stage 2 yet. Start it, here or"
    )
    some = replace(run, islands=IslandsSpec(count=2, local_steps=9), checkpoint_every=0)
    await trainer._tell_missing(options, node, some, 0)  # type: ignore[arg-type]
    assert said.pop().startswith(
        "the run waits for 5 more peers: no peer serves stage 1 of island 0 (cell 1), stage 2 of island 0 "
        "(cell 2), stage 0 of island 1 (cell 3), stage 1 of island 1 (cell 4) and 1 more cell yet. Start"
    )
    there += [PeerRecord(peer=f"p{n}", run=run.id, stage=n, state="joining", version=0) for n in range(3)]
    await trainer._tell_missing(options, node, run)  # type: ignore[arg-type]
    assert not said


@pytest.mark.parametrize("place", ["path", "clone", "elsewhere", "none"])
def test_a_line_begins_with_a_command_that_is_found(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my clone" / ".venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder) if place == "path" else "/nowhere")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / ("my clone" if place == "clone" else "other"))
    if place != "none":
        (folder / "swarm").touch(mode=0o755)
    expected = {"clone": ".venv/bin/swarm", "elsewhere": shlex.quote(str(folder / "swarm"))}
    assert program() == expected.get(place, "swarm")


@pytest.mark.parametrize(
    ("given", "join", "announce", "expected"),
    [
        ("", (THERE,), (), "0.0.0.0"),
        ("", (HERE, NAMED), (), "0.0.0.0"),
        ("", (THERE_6, HERE_6), (), "::"),
        ("", (THERE_6, THERE), (), "everywhere"),
        ("", ("/dns/bootstrap/tcp/31337/p2p/x",), (), "everywhere"),
        ("", (HERE, HERE_6), (), "127.0.0.1"),
        ("", (), (), "127.0.0.1"),
        ("", (), ("192.0.2.7:31337",), "0.0.0.0"),
        ("", (), ("[2001:db8::7]:31337",), "::"),
        ("", (HERE,), ("[2001:db8::7]:31337", "/dns6/home.example/tcp/31337"), "::"),
        ("", (), ("[2001:db8::7]:31337", "192.0.2.7:31337"), "0.0.0.0"),
        ("", (), ("/dns4/home.example/tcp/31337",), "0.0.0.0"),
        ("192.0.2.7", (HERE,), (), "192.0.2.7"),
        ("127.0.0.1", (THERE,), (), "127.0.0.1"),
    ],
)
def test_a_program_listens_for_other_machines_if_it_knows_of_any(
    given: str, join: tuple[str, ...], announce: tuple[str, ...], expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One that announced an address of IPv6 only listened at none."""
    monkeypatch.setattr(nat, "everywhere", lambda: "everywhere")
    assert listening_host(given, join, announce) == expected


@pytest.mark.parametrize(
    ("leads", "expected"),
    [((4,), "0.0.0.0"), ((4, 6), "0.0.0.0"), ((6,), "::"), ((), "0.0.0.0")],
    ids=["IPv4", "both", "IPv6", "none"],
)
def test_a_machine_that_only_ipv6_leads_from_is_listened_at_by_it(
    monkeypatch: pytest.MonkeyPatch, leads: tuple[int, ...], expected: str
) -> None:
    """Nobody could dial it by default, and it was told to forward a port."""

    class _Socket(contextlib.AbstractContextManager[Any]):
        def __init__(self, family: int, kind: int) -> None:
            assert kind == socket.SOCK_DGRAM, "nothing is sent"
            self.leads = (6 if family == socket.AF_INET6 else 4) in leads

        def __exit__(self, *_: object) -> None: ...

        def connect(self, there: object) -> None:
            if not self.leads:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("socket.socket", _Socket)
    assert everywhere() == expected
