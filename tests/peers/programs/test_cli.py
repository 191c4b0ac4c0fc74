"""The command line: help that fits, values that are checked, errors as one line, signals as farewells."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes.util
import dataclasses
import errno
import hashlib
import importlib
import io
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import pytest

import swarm
from peers import cli, options
from peers.__main__ import interrupt
from peers.cli import COMMANDS, PROGRAMS, ROLES, UNLISTED, Exit, build_parser, exit_code, main, options_of
from peers.events import Failed, parse_event
from peers.options import description, options_from
from peers.programs import manifest_pinning, roles, tool_options
from peers.programs.fleet import Child
from peers.programs.manifest import EXAMPLE
from peers.programs.manifest_pinning import check_code
from peers.programs.roles import manifest
from peers.storage import CACHE_ENV, RESULTS_ENV, cache_folder, results_folder
from swarm.errors import Busy, PeerGone, Refused, SetupError, SwarmError, Unreachable
from swarm.installed import check_allowed
from swarm.manifest import CustomModelSpec, DataSpec, Run, demo_run
from swarm.wire.version import PROTOCOL_VERSION
from tests.example import example_run
from tests.seeds import some

RUN = "0123456789abcdef" * 2
JOIN = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
NEEDED = {
    "bootstrap": ["--manifest", "run.toml"],
    "peer": ["--run", RUN, "--join", JOIN],
    "init": ["myrun"],
    "up": ["myrun"],
    "invite": ["--manifest", "run.toml", "--owner", "owner.key"],
    "ban": [PEER, "--why", "lies", "--owner", "owner.key", "--run", RUN, "--join", JOIN],
    "unban": [PEER, "--owner", "owner.key", "--run", RUN, "--join", JOIN],
    "charter": ["--run", RUN, "--join", JOIN],
    "revoke": ["--identity", "stolen.key", "--run", RUN, "--join", JOIN],
    "train": ["--run", RUN, "--join", JOIN],
    "health": ["peer.sock"],
    "status": ["--run", RUN, "--join", JOIN],
    "keeper": ["--run", RUN, "--join", JOIN, "--dir", "ckpt"],
    "audit": ["--run", RUN, "--join", JOIN],
    "export": ["--checkpoint-dir", "ckpt", "--out", "model.safetensors"],
    "generate": ["--checkpoint-dir", "ckpt"],
    "eval": ["--model", "model.safetensors"],
    "plan": ["--manifest", "run.toml", "--devices", "devices.toml"],
    "dashboard": ["--run", RUN, "--join", JOIN],
    "verify": ["--transcript", "model.safetensors", "--from", "2", "--to", "4"],
    "simulate": ["--manifest", "run.toml", "--devices", "devices.toml"],
    "graph": ["--model", "package.module:build"],
    "tokenize": ["model.safetensors", "--out", "ckpt"],
    "completion": ["bash"],
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that `NEEDED` names, where they have to exist."""
    monkeypatch.chdir(tmp_path)
    Path("ckpt").mkdir()
    Path("model.safetensors").touch()


def parse(command: str, *more: str) -> argparse.Namespace:
    return build_parser().parse_args([command, *NEEDED.get(command, []), *more])


class Interrupted:
    """Ctrl-C, just when a module is looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "peers.cli":
            raise KeyboardInterrupt


@pytest.mark.parametrize("nohup", [False, True])
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(
    nohup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the terminal is one too: it left what a tool had downloaded in /tmp; but not under nohup."""
    monkeypatch.delitem(sys.modules, "peers.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell has it for what is followed by `&`
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        assert importlib.import_module("peers.__main__").main() == Exit.STOPPED
        *others, hangup = map(signal.getsignal, numbers)
        assert {*others} == {interrupt}
        assert hangup == (signal.SIG_IGN if nohup else interrupt)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("lost", ["except BaseException: pass", "except BaseException: raise ImportError"])
def test_ctrl_c_in_the_middle_of_an_import_is_not_lost(lost: str, tmp_path: Path) -> None:
    """numpy makes another error of it, torch goes on, and msgspec crashes."""
    (tmp_path / "half.py").write_text(f"import os\ntry: os.kill(os.getpid(), 2)\n{lost}")
    code = "import signal, sys; sys.path[:0] = sys.argv[1:]; from peers.__main__ import interrupt; "
    code += "signal.signal(2, interrupt); import half"
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path), str(Path(cli.__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (Exit.STOPPED, b"")


def test_ctrl_c_in_a_finaliser_comes_again_after_it() -> None:
    """Python would only print that an exception was ignored: an export went on, whatever its user wanted."""

    code = """if True:
        import os, signal, sys
        sys.path[:0] = sys.argv[1:]
        from peers.__main__ import interrupt
        class Closes:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                print("closed")
        for number in (signal.SIGINT, signal.SIGALRM):
            signal.signal(number, interrupt)
        try:
            Closes()
            while True:
                signal.pause()
        except KeyboardInterrupt:
            print("stopped")
    """
    command = [sys.executable, "-I", "-S", "-c", code, str(Path(cli.__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("closed\nstopped\n", "")


def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main([*argv, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_the_help_fits_a_screen_and_names_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = help_of(capsys, monkeypatch).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert set(COMMANDS) == set(PROGRAMS)
    for name in COMMANDS:
        words = "" if name in UNLISTED else description(options_of(name))[0][1:-1]
        assert any(name in line and words in line for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_parses(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("join.txt").write_text(f"--run\n{RUN}\n--join\n/ip4/192.0.2.7/tcp/1/p2p/12D3KooW\n")
    text = help_of(capsys, monkeypatch, name)
    assert text.startswith(f"usage: swarm {name} ") and ("FILE ...\n" in text) == (name == "tokenize")
    examples = [line.strip() for line in text.splitlines() if line.startswith("  swarm ")]
    assert "example" in text
    assert examples
    for example in examples:
        filled = example.replace("5a7c...", RUN).replace("PEER", PEER)
        words = shlex.split(filled.partition(" > ")[0])[1:]
        assert build_parser().parse_args(words).command == name


def test_the_help_comes_at_once_and_without_torch() -> None:
    code = (
        "import sys, peers.cli\n"
        "try: peers.cli.main(['--help'])\n"
        "except SystemExit: print(sorted({'torch', 'numpy', 'hivemind', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = [help_of(capsys, monkeypatch), help_of(capsys, monkeypatch, "peer")]
    for words, expected in zip((["help"], ["help", "peer"]), told, strict=True):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0 and capsys.readouterr().out == expected


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == Exit.USAGE
    assert "swarm demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["dance"], "invalid choice: 'dance'; choose from demo, init, up, "),
        (["sattus"], "invalid choice: 'sattus' (did you mean status?)\nSee: swarm --help"),
        (["peer"], "the following arguments are required: --run, --join; or @FILE, which a bootstrap wrote"),
        (["peer", "--joinn=x"], "unknown option --joinn (did you mean --join?)"),
        (
            ["peer", *NEEDED["peer"], "--reach", "publik"],
            "'publik' (did you mean public?); choose",
        ),
        (["completion", "fish"], "invalid choice: 'fish'; choose from bash, zsh"),
        (["peer", "--run", "5a7c", "--join", JOIN], "'5a7c' is not a run id (32 hex digits)"),
        (
            ["peer", *NEEDED["peer"], "--stage", "first"],
            "'first' is not a whole number from 0 to 1000000000 (or auto)",
        ),
        (["peer", *NEEDED["peer"], "--threads", "0"], "'0' is not a whole number from 1 to 1024"),
        (["peer", *NEEDED["peer"], "--port", "65536"], "'65536' is not a port: 1 to 65535"),
        (
            ["train", *NEEDED["train"], "--window", "-1"],
            "'-1' is not a whole number from 1 to 1000000000 (or auto)",
        ),
        (["keeper", *NEEDED["keeper"], "--keep", "0"], "'0' is not a whole number from 1 to 1000000000"),
        (["keeper", *NEEDED["train"]], "the following arguments are required: --dir"),
        (["eval"], "one of the arguments --model --checkpoint-dir --join is required"),
        (["generate", *NEEDED["generate"], "--model", "m"], "not allowed with argument --checkpoint-dir"),
        (
            ["export", *NEEDED["export"], "--step", "last"],
            "'last' is not a whole number from 0 to 1000000000",
        ),
        (["simulate"], "the following arguments are required: --manifest, --devices"),
        (["simulate", *NEEDED["simulate"], "--hours", "0"], "'0' is not a number of hours: above 0"),
        (["dashboard", "--web", "host:80"], "'host:80' is not a place to listen at: 8080, :8080 or 0.0"),
        (["dashboard", "--web", ":99999"], "'99999' is not a port: 1 to 65535"),
        (["dashboard", "--speed", "0"], "'0' is not a speed: above 0, up to 1000000"),
        (["dashboard", "--record-max", "0"], "'0' is not GiB of a file: above 0, up to 1000000"),
        (["plan", "--keep", "0"], "'0' is not a part of all numbers: above 0, below 1"),
        (["plan", "--keep", "1"], "'1' is not a part of all numbers: above 0, below 1"),
        (["demo", "--preempt", "x"], "'x' is not a whole number from 0 to 1000"),
        (["demo", "--preempt", "9" * 9], f"'{'9' * 9}' is not a whole number from 0 to 1000"),
        (["peer", *NEEDED["peer"], "--threads", "9999"], "'9999' is not a whole number from 1 to 1024"),
        (
            ["generate", *NEEDED["generate"], "--seed", str(2**63)],
            "whole number from 0 to 9223372036854775807",
        ),
        (["generate", *NEEDED["generate"], "--tokens", "9" * 5000], "whole number from 1 to 1000000000"),
        (["demo", "--step", "3"], "unknown option --step (did you mean --steps?)"),
        (["demo", "--codec", "zip"], "'zip' is not a codec: none, bf16, blockwise8, hadamard4, topk:R"),
        (["generate", *NEEDED["generate"], "--temperature", "hot"], "'hot' is not a temperature: 0 to 100"),
        (
            ["peer", *NEEDED["peer"], "--token", "foo"],
            "--token: none that swarm invite printed: that is",
        ),
        (
            ["keeper", *NEEDED["keeper"], "--token", "swarm-invitation-a b"],
            "one word that starts with swarm-",
        ),
        (["generate", *NEEDED["generate"], "--temperature", "nan"], "'nan' is not a temperature: 0 to 100"),
    ],
)
def test_a_wrong_argument_is_said_with_the_way_to_the_help(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == Exit.USAGE
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.rstrip().endswith("--help")


def said_by(words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What a command gets that runs in the environment of now."""
    seen: list[argparse.Namespace] = []
    run = "_run_role" if words[0] in ROLES else "_run_tool"
    monkeypatch.setattr(cli, run, lambda args: seen.append(args) or 0)
    assert main(words) == 0
    return seen[0]


def test_variables_of_the_environment_stand_for_what_is_not_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = JOIN[:-1] + "M"
    monkeypatch.setenv("SWARM_RUN", RUN)
    monkeypatch.setenv("SWARM_JOIN", f"{JOIN} {other}")
    monkeypatch.setenv("SWARM_IDENTITY", "mine.key")
    monkeypatch.setenv("SWARM_TOKEN", "swarm-invitation-x")
    assert said_by(["keeper", "--dir", "d"], monkeypatch).token == "swarm-invitation-x"
    monkeypatch.delenv("SWARM_TOKEN")
    args = said_by(["peer", "--stage", "1"], monkeypatch)
    assert (args.run, args.join, args.identity) == (RUN, [JOIN, other], Path("mine.key"))
    assert args.words == [
        *("peer", "--stage", "1", "--identity", "mine.key", "--run", RUN, "--join", JOIN, "--join", other)
    ], "a peer for each of several devices gets them as arguments"
    args = said_by(["keeper", "--dir", "d", f"--join={other}", "--run", "f" * 32], monkeypatch)
    assert (args.run, args.join) == ("f" * 32, [other])
    Path("join.txt").write_text(f"--run\n{'e' * 32}\n--join\n{other}\n")
    args = said_by(["train", "@join.txt"], monkeypatch)
    assert (args.run, args.join, args.identity) == ("e" * 32, [other], Path("mine.key"))
    assert said_by(["dashboard"], monkeypatch).run == RUN
    assert said_by(["dashboard", "--replay", "x"], monkeypatch).run is None
    assert said_by(["plan", "--manifest", "x", "--devices", "y"], monkeypatch).join == []
    args = said_by(["bootstrap", "--manifest", "run.toml"], monkeypatch)
    assert (args.join, args.identity) == ([], Path("mine.key"))
    assert said_by(["pause"], monkeypatch).identity is None, "which of a user's peers is another question"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SWARM_RUN", "mine", "$SWARM_RUN: 'mine' is not a run id (32 hex digits)"),
        ("SWARM_JOIN", f"{JOIN} 10.0.0.1:99", "$SWARM_JOIN '10.0.0.1:99' is not the address of a peer"),
    ],
)
def test_a_variable_that_cannot_be_is_not_blamed_on_an_option(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_RUN", RUN)
    monkeypatch.setenv("SWARM_JOIN", JOIN)
    monkeypatch.setenv(variable, value)
    assert main(["peer"]) == Exit.SETUP
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["peer", "--help"])
    assert said_by(["peer", "--run", RUN, "--join", JOIN], monkeypatch).run == RUN


def test_a_bad_device_or_key_is_refused_before_anything_is_asked_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said after a minute, when the run had been found, or was not."""
    (broken := tmp_path / "owner.key").write_bytes(b"half a key")
    with (tmp_path / "corpus").open("wb") as large:
        large.truncate(1 << 40)
    at = ["--run", RUN, "--join", JOIN]
    for words, said in (
        (["peer", "--device", "gpu9"], "--device 'gpu9' is unknown; take auto, cpu"),
        (["peer", "--device", "cpu,gpu9"], "--device 'gpu9' is unknown; take auto, cpu"),
        (
            ["charter", "--owner", str(broken)],
            "owner.key is no key: not an Ed25519 key in libp2p's form. Give",
        ),
        (
            ["charter", "--owner", str(tmp_path / "no")],
            "no is no key: No such file or directory. Give the owner",
        ),
        (["charter", "--owner", str(tmp_path / "corpus")], "corpus is no key: not an Ed25519 key"),
    ):
        assert main([*words, *at]) == Exit.SETUP
        assert said in capsys.readouterr().err


@pytest.mark.process
def test_a_manifest_is_read_from_the_standard_input() -> None:
    words = [sys.executable, "-m", "peers", "manifest", "-"]
    told = subprocess.run(words, input=EXAMPLE.encode(), capture_output=True, timeout=60)
    assert told.returncode == 0 and b"[model]" in told.stdout


@pytest.mark.parametrize("more", ["--allow-code\n./evil.py", "--checkpoint-dir=/home", "-h", "--"])
def test_a_join_file_gives_no_option_but_where_the_run_is(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes from a run's owner, and may be a stranger's."""
    (file := tmp_path / "join.txt").write_text(f"--run\n{RUN}\n--join\n{JOIN}\n{more}\n")
    with pytest.raises(SystemExit, match=str(int(Exit.USAGE))):
        build_parser(["peer"]).parse_args(["peer", f"@{file}"])
    assert "is not what a bootstrap writes with --join-file" in capsys.readouterr().err


async def test_variables_of_the_environment_are_not_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six peers of a demo must not share one key."""
    monkeypatch.setenv("SWARM_IDENTITY", "mine.key")
    seen: list[dict[str, str]] = []

    async def start(*_: Any, env: dict[str, str], **__: Any) -> None:
        seen.append(env)
        raise OSError

    monkeypatch.setattr("asyncio.create_subprocess_exec", start)
    with pytest.raises(OSError):
        await Child.spawn(["peer"], lambda *_: None, environment={"SWARM_STOP": "1"})
    assert "SWARM_IDENTITY" not in seen[0] and seen[0]["SWARM_STOP"] == "1" and "PATH" in seen[0]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_and_their_arguments(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(re.search(rf"\b{command}\b", script) for command in COMMANDS)
    assert "--checkpoint-dir" in script and "--die-with-parent" not in script
    if shell == "bash":
        ask = "COMP_WORDS=(swarm {0}); COMP_CWORD={1}; _shtab_swarm 2>/dev/null; echo ${{COMPREPLY[*]}}"
        for words, at, found in (("stat", 1, "status"), ("peer --check", 2, "--checkpoint-dir")):
            asked = ["bash", "-c", f"{script}\n{ask.format(words, at)}"]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
            assert done.stdout.split() == [found]


def given(command: str, *more: str) -> Any:
    return options_from(options_of(command), parse(command, *more))


def test_repeated_addresses_and_files_become_tuples(tmp_path: Path) -> None:
    got = given("peer", "--join", JOIN[:-1] + "M", "--announce", "1.2.3.4:5", "--stage", "2")
    assert (got.join, got.announce) == ((JOIN, JOIN[:-1] + "M"), ("1.2.3.4:5",))
    assert (got.stage, got.max_inflight) == (2, "auto")
    files = tmp_path / "a", tmp_path / "b"
    for file in files:
        file.touch()
    assert given("train", "--data", *map(str, files)).data == files
    assert given("demo", "--data", str(files[0]), "--data", str(files[1])).data == files


def test_what_is_not_given_is_as_the_dataclass_has_it() -> None:
    assert given("check") == tool_options.CheckOptions()
    assert given("generate") == tool_options.GenerateOptions(checkpoint_dir=Path("ckpt"))
    model = Path("model.safetensors")
    assert given("export") == tool_options.ExportOptions(checkpoint_dir=Path("ckpt"), out=model)
    assert given("eval") == tool_options.EvalOptions(model=model)
    assert given("dashboard") == tool_options.DashboardOptions(run=RUN, join=(JOIN,))
    assert given("status") == tool_options.StatusOptions(run=RUN, join=(JOIN,))
    for text in ("8080", ":8080", "127.0.0.1:8080"):
        assert given("dashboard", "--web", text).web == ("127.0.0.1", 8080)
    assert given("dashboard", "--metrics", "[::1]:9").metrics == ("::1", 9)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_frozen_and_every_argument_is_one(command: str) -> None:
    built = given(command)
    names = [field.name for field in dataclasses.fields(built)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(built, names[0], None)
    extra = set(vars(parse(command))) - set(names)
    process = {field.name for field in dataclasses.fields(options.ProcessOptions)}
    assert extra == {"command", "version", "traceback"} | (process if command in ROLES else set())


BEFORE_TORCH = """
import builtins, sys
plain = builtins.__import__
def watched(name, *rest, **more):
    assert name.partition(".")[0] not in ("torch", "hivemind"), f"imports {name}"
    return plain(name, *rest, **more)
builtins.__import__ = watched
from peers.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (
            ["peer", "--run", RUN, "--join", "192.0.2.7:31337"],
            Exit.SETUP,
            "the id of the peer that listens there is missing. Write --join /ip4/192.0.2.7/tcp/31337/p2p/ID",
        ),
        (
            ["status", "--run", RUN, "--join", "swarm.example.org:1"],
            Exit.SETUP,
            "Write --join /dns4/swarm.example.org/tcp/1/p2p/ID: that peer printed its ID in its first line",
        ),
        (
            ["status", "--run", RUN, "--join", "localhost:99999"],
            Exit.SETUP,
            "--join 'localhost:99999' cannot be: a port is a number from 1 to 65535, and 99999 is none",
        ),
        (
            ["status", "--run", RUN, "--join", f"/ip4/192.0.2.7/tcp/0/p2p/{PEER}"],
            Exit.SETUP,
            "cannot be: a port is a number from 1 to 65535, and 0 is none",
        ),
        (
            ["train", "--run", RUN, "--join", "foo"],
            Exit.SETUP,
            "--join 'foo' is not the address of a peer: it ends in /p2p/ and a peer id",
        ),
        (
            ["train", *NEEDED["train"], "--data", "nowhere.txt"],
            Exit.SETUP,
            "--data nowhere.txt cannot be read: there is no such file",
        ),
        (
            ["peer", *NEEDED["peer"], "--token", "swarm-invitation-x"],
            Exit.SETUP,
            "--token admits one key: give --identity FILE too (made if missing); keep it",
        ),
        (
            ["peer", *NEEDED["peer"], "--device", "cuda"],
            Exit.SETUP,
            "--device cuda: this machine has no CUDA",
        ),
        (
            ["demo", "--stages", "99", "--peers", "99"],
            Exit.SETUP,
            "99 stages of 99 peers are 9803 processes with torch, on",
        ),
        (["demo", "--data", sys.executable], Exit.SETUP, "is not text: it has null bytes; give a text file"),
        (["init", "x", "--data", sys.executable], Exit.SETUP, "is not text: it has null bytes; give a text"),
        (["init", "x", "--manifest", "no", "--data", sys.executable], Exit.SETUP, "is not text: it has null"),
        (["init", "x", "--eval-data", sys.executable], Exit.SETUP, "is not text: it has null bytes; give a"),
        (["demo", "--eval-data", sys.executable], Exit.SETUP, "is not text: it has null bytes; give a text"),
        (
            ["audit", *NEEDED["audit"], "--identity", "typo.key"],
            Exit.SETUP,
            "--identity typo.key cannot be read: there is no such file",
        ),
        (
            ["eval", "--model", "nowhere.safetensors"],
            Exit.SETUP,
            "--model nowhere.safetensors cannot be read: there is no such file",
        ),
        (
            ["export", "--checkpoint-dir", "nowhere", "--out", "model.safetensors"],
            Exit.SETUP,
            "--checkpoint-dir nowhere cannot be read: there is no such file or folder",
        ),
        (
            ["peer", *NEEDED["peer"], "--checkpoint-dir", __file__],
            Exit.SETUP,
            "test_cli.py is a file: give a folder",
        ),
        (
            ["tokenize", "nowhere", "--out", "x"],
            Exit.SETUP,
            "tokenize: FILE nowhere cannot be read: there is no",
        ),
        (
            ["peer", "@"],
            Exit.USAGE,
            "@: '', which a bootstrap writes with --join-file, cannot be read: Is a directory",
        ),
        (
            ["peer", "@nofile"],
            Exit.USAGE,
            "@nofile: 'nofile', which a bootstrap writes with --join-file, cannot be read: No such file",
        ),
        (
            ["peer", "@/"],
            Exit.USAGE,
            "@/: '/', which a bootstrap writes with --join-file, cannot be read: Is a",
        ),
        (["peer", "@/dev/null"], Exit.USAGE, "@/dev/null: '/dev/null' is not what a bootstrap"),
        (["demo", "up"], Exit.USAGE, "swarm demo: unrecognized arguments: up\nSee: swarm demo --help"),
    ],
)
@pytest.mark.slow  # it starts processes
def test_what_is_known_to_be_wrong_is_said_before_torch_is_imported(
    argv: list[str], code: Exit, said: str
) -> None:
    if "cuda" in argv and ctypes.util.find_library("cuda"):
        pytest.skip("this machine has CUDA's driver")
    command = [sys.executable, "-c", BEFORE_TORCH, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr


def test_what_begins_is_said_before_torch_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["init", str(tmp_path / "mine")]) == Exit.OK
    capsys.readouterr()
    for name in ("peers.api.local_swarm", "peers.api.run"):  # whatever imports them fails
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo"]) == main(["up", str(tmp_path / "mine")]) == Exit.FAILED
    assert capsys.readouterr().out == (
        "swarm demo: 3 stages × 2 peers, 300 steps\nmine: 3 stages, 300 steps\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["init", ""],
        ["up", ""],
        ["tokenize", "", "--out", "x"],
        ["demo", "--data", ""],
        ["keeper", *NEEDED["keeper"], "--dir", ""],
    ],
)
def test_an_empty_name_is_not_taken_for_this_folder(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == Exit.USAGE
    assert "'' is not the name of a file or folder" in capsys.readouterr().err


def test_ctrl_c_is_an_end_like_any_other_before_anything_is_imported() -> None:
    """What is imported outside of `main` is interrupted with a traceback."""
    root = str(Path(cli.__file__).parents[1])
    code = "import sys; sys.path.insert(0, sys.argv[1]); had = {*sys.modules}; import peers.__main__; "
    command = [sys.executable, "-I", "-S", "-c", code + "print(sorted({*sys.modules} - had))", root]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['__future__', 'peers', 'peers.__main__']\n"


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, flag in (("keeper", "--dir"), ("peer", "--checkpoint-dir")):
        words = [command, *NEEDED[command][:4], flag]
        assert main([*words, "model.safetensors/ckpt"]) == Exit.SETUP
        assert f"{flag} {tmp_path}/model.safetensors is a file: give a folder" in capsys.readouterr().err
        (tmp_path / "disk").unlink(missing_ok=True)
        (tmp_path / "disk").symlink_to(tmp_path / "unmounted")
        assert main([*words, "disk/ckpt"]) == Exit.SETUP
        assert f"{flag} {tmp_path}/disk leads to nothing (is a disk to be mo" in capsys.readouterr().err
        with monkeypatch.context() as patch:
            patch.setattr(options.os, "access", lambda path, mode: mode == os.F_OK)  # of root all is writable
            assert main([*words, "ckpt"]) == Exit.SETUP
        said = f"{flag} ckpt cannot be written: make {tmp_path}/ckpt yours, or give another folder"
        assert said in capsys.readouterr().err


def test_a_home_that_the_shell_left_as_it_was_written_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Shells leave the ~ of `--dir=~/ckpt`, of `@~/join.txt` and of a quoted value."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "join.txt").write_text(f"--run\n{RUN}\n--join\n{JOIN}")
    given = build_parser().parse_args(["keeper", "@~/join.txt", "--dir=~/ckpt", "--identity", "~no one/x"])
    assert (given.dir, given.identity) == (tmp_path / "ckpt", Path("~no one/x"))
    for name, folder in ((CACHE_ENV, cache_folder), (RESULTS_ENV, results_folder)):
        monkeypatch.setenv(name, "~/kept")
        assert folder() == tmp_path / "kept"


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "--from", "0", "--to", "1", "--transcript"],
        ["eval", "--data"],
        ["manifest"],
        ["dashboard", "--replay"],
        ["peer", "@"],
    ],
)
def test_a_pipe_that_nobody_writes_to_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    words = [f"@{pipe}" if word == "@" else word for word in words]
    if str(pipe) not in words[-1]:
        words.append(str(pipe))
    if words[0] == "eval":
        words += ["--model", __file__]
    assert main(words) == Exit.SETUP
    assert f"{pipe} is a pipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SetupError("x"), Exit.SETUP),
        (Unreachable("x"), Exit.NETWORK),
        (PeerGone("12D3KooWabcdef", "x"), Exit.NETWORK),
        (Busy("x"), Exit.NETWORK),
        (Refused("x"), Exit.NETWORK),
        (SwarmError("x"), Exit.FAILED),
        (ZeroDivisionError(), Exit.FAILED),
    ],
)
def test_errors_have_exit_codes(error: BaseException, code: Exit) -> None:
    assert exit_code(error) == code


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_an_error_is_one_line_and_a_traceback_is_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_run_tool", raising(SetupError("the port is taken: choose another")))
    assert main(["demo"]) == Exit.SETUP
    assert capsys.readouterr().err == "swarm demo: the port is taken: choose another\n"
    monkeypatch.setattr(cli, "_run_tool", raising(Refused("go\x1b[2J away")))
    assert main(["demo"]) == Exit.NETWORK
    assert capsys.readouterr().err == "swarm demo: go?[2J away\n"
    monkeypatch.setattr(cli, "_run_tool", raising(SetupError("the port is taken: choose another")))
    with pytest.raises(SetupError):
        main(["demo", "--traceback"])


STUCK = """
import asyncio, os, signal, sys, threading
from peers import cli
from swarm.errors import DeviceHangs

class Stuck:
    def __init__(self):
        self.left = asyncio.Event()

    async def run(self):
        # A loop's end waits for the one, Python's for the other.
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        threading.Thread(target=threading.Event().wait).start()
        print("hello")
        if os.environ["ENDS_BY"] == "hang":
            raise DeviceHangs("the device hangs")
        os.kill(os.getpid(), signal.SIGINT)
        await self.left.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    async def leave(self):
        self.left.set()

    preparing = False

cli._role = lambda *_: Stuck()
sys.exit(cli.main(sys.argv[1:]))
"""


def ended(by: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", STUCK, "peer", *NEEDED["peer"], *words]
    env = {**os.environ, "ENDS_BY": by}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def test_a_process_whose_device_hangs_ends_without_waiting_for_its_threads() -> None:
    done = ended("hang")
    assert (done.returncode, done.stdout, done.stderr) == (
        Exit.SETUP, "hello\n", "swarm peer: the device hangs\n",
    )  # fmt: skip
    done = ended("hang", "--traceback")
    assert (done.returncode, done.stdout) == (Exit.SETUP, "hello\n")
    assert done.stderr.startswith("Traceback") and "DeviceHangs: the device hangs" in done.stderr


def test_a_second_signal_ends_a_process_whose_threads_are_stuck() -> None:
    done = ended("signals")
    assert (done.returncode, done.stderr) == (Exit.STOPPED, "")
    assert done.stdout.startswith("hello\n")


def test_a_bug_says_that_it_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_run_tool", raising(ZeroDivisionError("division by zero")))
    assert main(["demo"]) == Exit.FAILED
    assert "a bug in swarm: ZeroDivisionError: division by zero" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        main(["demo", "--traceback"])
    monkeypatch.setattr(cli, "_run_tool", raising(KeyboardInterrupt()))
    assert main(["demo"]) == Exit.STOPPED


@pytest.mark.parametrize(("number", "told"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max")])
@pytest.mark.parametrize("path", [None, "/tmp/x"])
def test_a_lack_of_file_descriptors_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, told: str, path: Any
) -> None:
    """A demo said so of its bootstrap, which the shell's `ulimit -n` had left none."""
    monkeypatch.setattr(cli, "_run_tool", raising(OSError(number, "Too many open files", path)))
    assert main(["demo"]) == Exit.SETUP
    said = capsys.readouterr().err
    assert "no free file descriptors" in said and told in said and "bug" not in said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    ],
)
def test_a_lack_of_memory_is_no_bug(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer on a small machine said that it is."""
    monkeypatch.setattr(cli, "_run_tool", raising(error))
    monkeypatch.setattr(cli, "_no_more_output", lambda stream: None)
    assert main(["demo"]) == Exit.FAILED, "a fleet starts a peer again that had too little for a moment"
    said = capsys.readouterr().err
    assert "no memory is left: end other programs" in said and "bug" not in said


@pytest.mark.parametrize(
    ("words", "who"),
    some(
        [("manifest", "swarm manifest"), ("--version", "swarm"), ("peer --help", "swarm peer")],
        quick=[("manifest", "swarm manifest")],
    ),
)
def test_a_full_disk_is_no_bug(words: str, who: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "peers", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (Exit.SETUP, f"{who}: the disk is full: make room\n")


@pytest.mark.parametrize(("words", "code"), [("dance", Exit.USAGE), ("manifest nowhere", Exit.SETUP)])
def test_an_error_that_cannot_be_said_is_still_in_the_exit_code(words: str, code: Exit) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "peers", *words.split()]
        assert subprocess.run(command, stderr=full, check=False).returncode == code


def test_output_may_be_larger_than_a_shell_allows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_run_tool", raising(OSError(errno.EFBIG, "File too large")))
    monkeypatch.setattr(cli, "_no_more_output", lambda stream: None)
    assert main(["manifest"]) == Exit.SETUP
    assert capsys.readouterr().err == "swarm manifest: the output may not be that large\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("No usable temporary directory found in ['/tmp', '/var/tmp']", "set TMPDIR to a folder of yours"),
        ("No such file or directory", "the folder that you are in is gone"),
    ],
)
def test_a_machine_without_room_for_temporary_files_or_without_this_folder_is_no_bug(
    wrong: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Python says of both names no file."""
    monkeypatch.setattr(cli, "_run_tool", raising(FileNotFoundError(errno.ENOENT, wrong)))
    monkeypatch.setattr(cli, "_no_more_output", lambda stream: None)
    assert main(["manifest"]) == Exit.SETUP
    assert capsys.readouterr().err.rstrip().endswith(said)


def test_output_that_is_closed_or_knows_few_characters_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["manifest"]) == Exit.OK
    sys.stdout.close()
    few = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", few)
    with pytest.raises(SystemExit) as stopped:
        main(["peer", "--help"])
    assert stopped.value.code == 0 and b"--stages N,N,?" in few.buffer.getvalue()


@pytest.mark.parametrize("closed", [(0,), (0, 1, 2)])
def test_a_program_whose_standard_streams_are_closed_gives_their_numbers_to_no_file(
    closed: tuple[int, ...],
) -> None:
    """A trainer that was started with `<&-` aborted: uvloop closes no socket of a number up to 2. And what
    libraries write to 2 would have gone into a file or to another peer."""
    code = f"import os, sys; [os.close(number) for number in {closed}]; sys.path[:0] = sys.argv[1:]\n"
    code += "from peers.cli import main; main(['--version']); os._exit(os.open(os.devnull, os.O_RDONLY))"
    command = [sys.executable, "-c", code, str(Path(cli.__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert done.returncode == 3


@pytest.mark.parametrize("words", [("eval", "--model"), ("up",), ("generate", "--checkpoint-dir")])
def test_a_path_that_cannot_be_is_no_bug(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "x" * 300]) == Exit.SETUP
    assert re.fullmatch(rf"swarm {words[0]}: x+(/run.toml)?: File name too long\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "content", [b"\x9a\x00\xff", b"[model]\nstages = 2\n", b"@join.txt\n", b"swarm peer --run x", None]
)
def test_a_file_of_arguments_that_no_bootstrap_wrote_is_refused_in_words(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("join.txt" if content is not None else "x" * 300)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["status", f"@{path}"])
    assert stopped.value.code == Exit.USAGE
    wrong = f"@{path}: '{path}' is not what a bootstrap writes with --join-file. Or type --run and --join"
    if content is None:
        wrong = f"@{path}: '{path}', which a bootstrap writes with --join-file, cannot be read: File name too"
    assert wrong in capsys.readouterr().err


def test_a_file_of_arguments_may_have_gone_through_a_windows_mailbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "join it.txt"
    path.write_bytes(f"--run\r\n{RUN}\r\n--join\r\n{JOIN}\r\n\r\n".encode())
    args = said_by(["status", f"@{path}"], monkeypatch)
    assert (args.run, args.join) == (RUN, [JOIN])


def test_where_events_are_json_the_error_is_one_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_run_role", raising(SetupError("no route")))
    assert main(["peer", *NEEDED["peer"], "--log-format", "json"]) == Exit.SETUP
    shown = capsys.readouterr()
    assert parse_event(shown.out.strip()) == Failed(text="no route")
    assert shown.err == "swarm peer: no route\n"


def test_a_manifest_is_printed_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifest"]) == 0
    path = tmp_path / "run.toml"
    path.write_text(capsys.readouterr().out)
    assert main(["manifest", str(path)]) == 0
    shown = capsys.readouterr()
    assert "[optimizer]" in shown.out
    assert "M parameters" in shown.err
    path.write_text("stages = 3\n")
    assert main(["manifest", str(path)]) == Exit.SETUP
    assert "run.toml" in capsys.readouterr().err


def test_a_manifest_of_a_brought_model_tells_what_is_pinned_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "run.toml", example_run().to_toml()
    before, _, after = text.partition("[model]")
    model = '[model]\nkind = "code"\nsource = "cats.models:build"\nstages = 3\n\n[data]'
    path.write_text(before + model + after.partition("[data]")[2])
    assert main(["manifest", str(path)]) == 0
    shown = capsys.readouterr()
    assert 'source = "cats.models:build"' in shown.out and 'weights = ""' in shown.out
    assert "cats.models:build, 32,768 tokens a step; the id changes when swarm bootstrap pins" in shown.err
    assert shown.err.endswith("pins the model and the data\n")


def test_a_peer_does_not_join_a_run_that_leaves_its_model_open() -> None:
    model = CustomModelSpec(kind="code", source="cats.models:build", stages=3)
    run = dataclasses.replace(example_run(), model=model)

    class Node:
        async def manifest(self) -> Run:
            return run

    with pytest.raises(SetupError, match=rf"^run {run.id} does not say which data or model it has"):
        asyncio.run(manifest(Node(), ["cats"]))  # type: ignore[arg-type]


CODE = dataclasses.replace(
    example_run(),
    model=CustomModelSpec(kind="code", source="cats.models:build", stages=3),
    data=DataSpec(source="code", code="cats.data:samples", sequence_length=1),
)


@pytest.mark.parametrize("allowed", [["cats"], ["cats.models", "cats.data"], list(CODE.code)])
def test_a_manifest_may_name_the_code_that_a_volunteer_allows(allowed: list[str]) -> None:
    check_allowed(CODE.code, allowed)
    check_allowed(example_run().code, [])


@pytest.mark.parametrize("allowed", [[], ["cat"], ["cats.model", "cats.data"], ["cats.models:other"], [""]])
def test_a_manifest_that_names_other_code_is_refused_with_what_allows_it(allowed: list[str]) -> None:
    with pytest.raises(SetupError, match=r"names code that is installed here: cats.*\. If you trust the run "
                       r"with it, add --allow-code cats$"):  # fmt: skip
        check_allowed(CODE.code, allowed)


def test_a_file_that_the_owner_handed_over_is_run_only_if_it_is_the_one_that_the_run_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file, and as a folder. Other files than the manifest names are not touched."""
    path = tmp_path / "handed_over.py"
    path.write_text("import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n")
    version = f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    ran, told = tmp_path / "handed_over.ran", f"--allow-code {path}"

    def run_of(version: str) -> Run:
        model = CustomModelSpec(kind="code", source="handed_over:build", stages=3, version=version)
        return dataclasses.replace(example_run(), model=model)

    with pytest.raises(SetupError, match=r"add --allow-code handed_over$"):
        check_code(run_of(version), [str(tmp_path / "other.py")])
    with pytest.raises(
        SetupError, match=f"{told} is not the file that the run's owner has: it has {version}"
    ):
        check_code(run_of(f"sha256 {'0' * 64}"), [str(path)])
    assert not ran.exists()
    check_code(run_of(version), [str(path), "/nowhere/at/all.py"])
    assert ran.exists() and sys.modules["handed_over"].__file__ == str(path)
    path.write_text("1 / 0")
    with pytest.raises(SetupError, match=f"{told}: another module handed_over is there already: rename"):
        check_code(run_of(""), [str(path)])
    del sys.modules["handed_over"]
    with pytest.raises(SetupError, match=f"{told} cannot be imported: division by zero"):
        check_code(run_of(""), [str(path)])
    folder = tmp_path / "handed_over"
    folder.mkdir()
    path.rename(folder / "__init__.py")
    with pytest.raises(SetupError, match="handed_over cannot be imported: division by zero"):
        check_code(run_of(""), [str(folder)])
    with pytest.raises(
        SetupError, match=r"--allow-code /nowhere/handed_over.py cannot be read: No such file"
    ):
        check_code(run_of(""), ["/nowhere/handed_over.py"])


def test_code_that_a_package_declares_for_swarms_needs_no_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        async def manifest(self) -> Run:
            return CODE

    declared = [EntryPoint("m", "cats.models:build", "swarm.models")]
    monkeypatch.setattr(
        manifest_pinning, "entry_points", lambda group: declared if group == "swarm.models" else []
    )
    with pytest.raises(SetupError, match=r"names code that is installed here: cats\.data:samples\."):
        asyncio.run(manifest(Node()))  # type: ignore[arg-type]
    for more, allowed in ((["cats.data:samples"], []), ([], ["cats.data"])):
        declared += [EntryPoint("d", one, "swarm.models") for one in more]
        with pytest.raises(SetupError, match="does not say which data or model it has"):  # the next check
            asyncio.run(manifest(Node(), allowed))  # type: ignore[arg-type]
        del declared[1:]


async def test_a_stage_that_the_run_has_not_is_refused_while_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, imported = demo_run(), threading.Event()

    class Node:
        run_id, peer_id, addresses = run.id, JOIN[-52:], (JOIN,)

        async def manifest(self) -> Run:
            return run

        def __init__(self, **_: object) -> None: ...

        async def __aenter__(self) -> Node:
            return self

        async def __aexit__(self, *_: object) -> None: ...

    monkeypatch.setattr(roles, "Node", Node)
    monkeypatch.setattr(roles.Daemon, "spawn", lambda *_, **__: None)
    monkeypatch.setattr("peers.programs.roles.choose_device", lambda _: imported.wait())
    peer = roles.Peer(options.PeerOptions(run=run.id, join=(JOIN,), stage=7), emit=lambda _: None)
    try:
        with pytest.raises(SetupError, match=r"--stage 7: run 'demo' has stages 0 to 2"):
            await peer.run()
        assert peer.preparing
    finally:
        imported.set()


def test_the_version_is_the_packages_and_what_others_have_to_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--version"]) == 0
    said = f"swarm {swarm.__version__}, protocol {PROTOCOL_VERSION}, torch {version('torch')}, "
    assert capsys.readouterr().out.startswith(f"{said}hivemind {version('hivemind')}, Python 3.")

    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", nothing)
    assert main(["--version"]) == 0
    assert ", no torch, no hivemind, Python 3." in capsys.readouterr().out


def test_check_prints_json_and_its_code_says_how_it_went(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from peers.programs import check

    bad = check.Finding("port", "taken", "another")
    monkeypatch.setattr(check, "check_all", lambda options: [bad])
    assert main(["check", "--json"]) == Exit.CHECK
    assert json.loads(capsys.readouterr().out)["ok"] is False


# --- signals ---


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A program ignores signals once its work is done; this one goes on."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class Work:
    """A role that works until it is told to leave; `stubborn`: and then goes on."""

    def __init__(self, *, stubborn: bool = False, broken: bool = False) -> None:
        self.stubborn, self.broken = stubborn, broken
        self.left = asyncio.Event()
        self.said: list[str] = []

    async def run(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await self.left.wait()
        if self.stubborn:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        self.said.append("finished")

    async def leave(self) -> None:
        if self.broken:
            raise ZeroDivisionError("in leave")
        self.left.set()


def test_the_first_signal_lets_the_work_finish() -> None:
    work = Work()
    assert cli._with_signals(work.run, work.leave, on_leave=lambda: work.said.append("leaving")) == Exit.OK
    assert work.said == ["leaving", "finished"]
    os.kill(os.getpid(), signal.SIGTERM)  # as the process ends: -15 would look like a crash


def test_what_a_server_has_modules_warn_of_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert logging.lastResort is not None
    said = "the data at http://a/: it cannot be had: HTTP Error 500: \x1b]0;a title\x07\x1b[31m"
    record = logging.LogRecord("peers", logging.WARNING, "", 0, "%s", (said,), None)
    assert logging.lastResort.format(record) == said.replace("\x1b", "?").replace("\x07", "?")


def test_under_nohup_the_end_of_the_terminal_is_not_for_us() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    work = Work()

    async def run() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert not work.left.is_set()
        await work.run()

    assert cli._with_signals(run, work.leave) == Exit.OK
    assert work.said == ["finished"]


def test_what_a_shutdown_sends_besides_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()

    async def run() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        await work.run()  # with SIGINT, as from the parent of several devices

    monkeypatch.setattr(cli, "_end_now", lambda code: pytest.fail("it ends at once"))
    assert cli._with_signals(run, work.leave) == Exit.OK
    assert work.said == ["finished"]


def test_the_second_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(stubborn=True)
    ended: list[int] = []
    monkeypatch.setattr(cli, "_end_now", ended.append)
    assert cli._with_signals(work.run, work.leave) == Exit.STOPPED
    assert work.said == [] and ended == [Exit.STOPPED]


def test_the_first_signal_ends_what_others_do_not_count_on_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(stubborn=True)
    ended: list[int] = []
    monkeypatch.setattr(cli, "_end_now", ended.append)
    code = cli._with_signals(
        work.run, work.leave, on_leave=lambda: work.said.append("leaving"), preparing=lambda: True
    )
    assert code == Exit.STOPPED and ended == [Exit.STOPPED]
    assert work.said == [] and not work.left.is_set()


async def test_a_bootstrap_hears_signals_while_it_traces_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def heard() -> None:
        assert bootstrap.preparing

    def traced(*_: object) -> NoReturn:
        asyncio.run_coroutine_threadsafe(heard(), loop).result(timeout=5)
        raise SetupError("cannot be traced")

    monkeypatch.setattr(roles, "pinned", traced)
    loop, manifest = asyncio.get_running_loop(), tmp_path / "run.toml"
    manifest.write_text(demo_run().to_toml())
    bootstrap = roles.Bootstrap(options.BootstrapOptions(manifest=manifest), emit=lambda _: None)
    with pytest.raises(SetupError, match="cannot be traced"):
        await bootstrap.run()


def test_a_farewell_that_fails_does_not_leave_the_process_running() -> None:
    work = Work(broken=True)
    with pytest.raises(ZeroDivisionError, match="in leave"):
        cli._with_signals(work.run, work.leave)


def test_without_a_farewell_the_first_signal_cancels_and_cleans_up() -> None:
    cleaned: list[bool] = []

    async def run() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    assert cli._with_signals(run, None) == Exit.STOPPED
    assert cleaned == [True]


def test_an_exit_code_of_the_work_is_passed_on() -> None:
    async def run() -> int:
        return Exit.CHECK

    assert cli._with_signals(run, None) == Exit.CHECK


def test_an_error_of_the_work_is_passed_on() -> None:
    async def run() -> None:
        raise SetupError("no disk")

    with pytest.raises(SetupError, match="no disk"):
        cli._with_signals(run, None)


def test_output_that_nobody_reads_is_no_traceback() -> None:
    code = "import sys; from peers.cli import main; sys.exit(main(['manifest']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-u", "-c", code],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (Exit.FAILED, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --run demo@short --join 127.0.0.1:1", "NAME@FINGERPRINT, with 20 letters after the @"),
        ("ban nobody", "a peer id (12D3KooW..., 52 characters)"),
        (f"eval --join {JOIN}", "--join needs --run: both are in the file of a bootstrap's --join-file"),
        (
            f"peer --run {RUN} --join {JOIN} --device cpu,cpu --health x",
            "--health answers for one peer: with several devices start a program for each",
        ),
    ],
)
def test_what_is_typed_wrong_is_told_with_what_is_right(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(words.split()) == Exit.SETUP
    assert said in " ".join(capsys.readouterr().err.split())
