"""The `swarm` command: arguments -> options -> a role, and errors -> one clear line and an exit code.

The only module that knows all roles. A role is imported when its subcommand runs, so that `swarm --help`
does not wait for torch. A role's options are a frozen dataclass in the role's own module; the names of its
fields are the names of the arguments here (`_options`), checked by a test.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import importlib
import ipaddress
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from swarm.codecs import KNOWN, parse_codec
from swarm.errors import DeviceHangs, NotNow, PeerFault, Refused, SetupError, SwarmError, printable

if TYPE_CHECKING:
    from peers.events import Emit

T = TypeVar("T")


class Exit(enum.IntEnum):
    """What the shell gets."""

    OK = 0
    FAILED = 1
    """A bug of ours, or an error without a class of its own."""
    USAGE = 2
    """Unknown argument, or a value that cannot be."""
    SETUP = 3
    """The user has to change something; the text says what."""
    NETWORK = 4
    """Others could not be reached, or refused us."""
    CHECK = 5
    """`swarm check` found something wrong, or `swarm demo` a number that is not what it must be."""
    STOPPED = 130
    """Ctrl-C or SIGTERM before the work was done."""


class Role(Protocol):
    """What `_serve` runs: constructed without side effects, `run()` does everything."""

    async def run(self) -> int | None:
        """Work until done or until `leave()`; raises SwarmError. An int is the exit code."""
        ...

    async def leave(self) -> None:
        """Finish what is in flight and hand over; `run()` returns soon after."""
        ...

    async def connected(self) -> int:
        """How many peers p2pd is connected to; raises SwarmError if p2pd cannot say."""
        ...


DESCRIPTION = """\
Train one model on many unreliable machines, and lose nothing when they die.
"""

COMMANDS: tuple[tuple[str, str], ...] = (
    ("demo", "a whole swarm on this machine: trains, kills peers, loses nothing"),
    ("check", "is this machine fit to be a peer, and if not, what to change"),
    ("manifest", "print an example of a run's manifest, or check one"),
    ("bootstrap", "start a run: publish its manifest, print the join line"),
    ("peer", "join a run and serve one stage on this machine's device"),
    ("train", "join a run as a trainer: bring the data, drive the steps"),
    ("keeper", "keep a run's checkpoints on this disk, for whoever comes; no GPU"),
    ("pause", "give this machine's device back to you; the peer keeps its place"),
    ("resume", "let a paused peer of this machine work again"),
    ("health", "whether a program of this machine is well: for containers"),
    ("status", "who serves what, and how far the run is"),
    ("dashboard", "watch a run: in this terminal, as a web page, for Prometheus"),
    ("export", "make one model file of the stages' checkpoints"),
    ("generate", "let a trained model continue a text"),
    ("eval", "how well a trained model knows a text"),
    ("plan", "which machine should serve which stage, and how fast that will be"),
    ("simulate", "how fast a run would be on machines that are only described"),
    ("graph", "a model as the operators it is made of, and cut into stages"),
)

JOINS = frozenset({"peer", "train", "keeper", "status", "dashboard"})
"""Those that take `@FILE`, which a bootstrap wrote with --join-file."""

ADDRESS = "/ip4/192.0.2.7/tcp/31337/p2p/12D3Koo..."


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)


class _Parser(argparse.ArgumentParser):
    """argparse with our exit code, and the fix in the message."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}\nSee: {self.prog} --help", file=sys.stderr)
        raise SystemExit(Exit.USAGE)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Imports nothing heavy."""
    parser = _Parser(
        prog="swarm",
        description=DESCRIPTION + "".join(f"\n  {name:<11}{words}" for name, words in COMMANDS),
        formatter_class=_Help,
        usage="swarm COMMAND [options]",
        epilog="Start here: swarm demo    Each command: swarm COMMAND --help    swarm --version",
        allow_abbrev=False,
        add_help=False,
    )
    # Said in the last line: the commands take all of a screen.
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="store_true", help=argparse.SUPPRESS)
    # The commands are listed in the description: argparse would break their lines.
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", help=argparse.SUPPRESS, parser_class=_Parser
    )
    add: dict[str, argparse.ArgumentParser] = {}
    for name, words in COMMANDS:
        add[name] = commands.add_parser(
            name,
            fromfile_prefix_chars="@" if name in JOINS else None,
            prog=f"swarm {name}",
            description=words[0].upper() + words[1:] + ("" if words.endswith("?") else "."),
            formatter_class=_Help,
            usage=f"swarm {name} [options]",
            allow_abbrev=False,
        )
    _manifest(add["manifest"])
    _bootstrap(add["bootstrap"])
    _peer(add["peer"])
    _train(add["train"])
    _wish(add["pause"])
    _wish(add["resume"])
    _health(add["health"])
    _status(add["status"])
    _dashboard(add["dashboard"])
    _check(add["check"])
    _demo(add["demo"])
    _keeper(add["keeper"])
    _export(add["export"])
    _generate(add["generate"])
    _eval(add["eval"])
    _plan(add["plan"])
    _simulate(add["simulate"])
    _graph(add["graph"])
    return parser


# --- arguments ---


def _manifest(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example:\n  swarm manifest > run.toml\n  swarm manifest run.toml"
    parser.usage = "swarm manifest [FILE] [options]"
    parser.add_argument(
        "manifest",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="check this one: print its canonical text; without FILE, print an example to edit",
    )
    _common(parser, events=False)


def _bootstrap(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "example:\n  swarm bootstrap --manifest run.toml --host 0.0.0.0 --port 31337 "
        "--announce 192.0.2.7:31337"
    )
    parser.add_argument(
        "--manifest",
        type=Path,
        required=True,
        metavar="FILE",
        help="the terms of the run (TOML): swarm manifest prints an example",
    )
    _data(parser)
    parser.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="ADDR",
        help="another bootstrap of the same network; repeatable",
    )
    parser.add_argument(
        "--join-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="also write there what to join with, for others who read it: swarm peer @FILE",
    )
    _network(parser, identity=True)
    _common(parser)


def _peer(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"example (the bootstrap prints this line):\n  swarm peer --run 5a7c... --join {ADDRESS}"
    _membership(parser)
    parser.add_argument(
        "--stage",
        type=_stage,
        default="auto",
        metavar="auto|N",
        help="default: the stage with the fewest peers",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="auto|cpu|cuda[:N]|all",
        help="default: CUDA if there is, else CPU; all, or cuda:0,cuda:2: a peer for each",
    )
    parser.add_argument(
        "--recompute", action="store_true", help="keep only stage inputs and run forwards twice: less memory"
    )
    parser.add_argument(
        "--threads", type=_at_least(1), default=None, metavar="N", help="torch threads (default: all cores)"
    )
    parser.add_argument(
        "--max-inflight",
        type=_auto_or(1),
        default="auto",
        metavar="auto|N",
        help="microbatches admitted at once (default: by measured memory)",
    )
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="save checkpoints here, and resume from here",
    )
    parser.add_argument(
        "--keep", type=_at_least(1), default=2, metavar="N", help="checkpoints to keep (default: %(default)s)"
    )
    parser.add_argument(
        "--leave-within",
        type=_seconds,
        default=25.0,
        metavar="S",
        help="seconds to finish and hand over in on Ctrl-C (default: %(default)s)",
    )
    parser.add_argument(
        "--pause-within",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="the same when you pause it (default: %(default)s)",
    )
    parser.add_argument(
        "--pause-when-busy",
        action="store_true",
        help="pause while other programs want the GPU (needs nvidia-ml-py)",
    )
    parser.add_argument(
        "--max-vram",
        type=_memory,
        default=None,
        metavar="SIZE",
        help="use no more of the device's memory than this, such as 6GiB (default: what is free)",
    )
    parser.add_argument(
        "--max-upload",
        type=_rate,
        default=None,
        metavar="RATE",
        help="send no more than this, such as 20Mbit a second (default: no limit)",
    )
    _network(parser, identity=True)
    _common(parser)


def _train(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"example:\n  swarm train --run 5a7c... --join {ADDRESS}"
    _membership(parser)
    _data(parser)
    parser.add_argument(
        "--window",
        type=_auto_or(1),
        default="auto",
        metavar="auto|N",
        help="microbatches in flight (default: as many as raise throughput)",
    )
    parser.add_argument(
        "--steps",
        type=_at_least(1),
        default=None,
        metavar="N",
        help="stop after this many steps (default: the run's)",
    )
    _network(parser, identity=True)
    _common(parser)


def _wish(parser: argparse.ArgumentParser) -> None:
    name = parser.prog.split()[-1]
    parser.epilog = f"example:\n  swarm {name}\n  swarm {name} --identity peer.key"
    group = parser.add_argument_group("which peers (default: all that you run on this machine)")
    group.add_argument(
        "--identity", type=Path, default=None, metavar="FILE", help="the one that was started with this key"
    )
    group.add_argument("--pid", type=_at_least(1), default=None, metavar="N", help="the one of this process")
    group.add_argument("--device", default=None, metavar="NAME", help="those on this device, such as cuda:1")
    _common(parser, events=False)


def _health(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example:\n  swarm health peer.sock"
    parser.usage = "swarm health SOCKET [options]"
    parser.add_argument("socket", type=Path, metavar="SOCKET", help="what it was given as --health")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line")
    _common(parser, events=False)


def _status(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"example:\n  swarm status --run 5a7c... --join {ADDRESS}"
    _membership(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--no-calls", action="store_true", help="directory records only: do not ask the peers themselves"
    )
    _network(parser, identity=False)
    _common(parser, events=False)


def _dashboard(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"examples:\n  swarm dashboard --run 5a7c... --join {ADDRESS}\n"
        f"  swarm dashboard --run 5a7c... --join {ADDRESS} --web :8080\n"
        "  swarm dashboard --replay history.jsonl --speed 10"
    )
    _membership(parser, required=False)
    group = parser.add_argument_group("faces, besides the terminal")
    group.add_argument(
        "--web",
        type=_listen,
        default=None,
        metavar="[IP]:PORT",
        help="a web page, and /api/health (default IP: 127.0.0.1, for this machine only)",
    )
    _metrics(group)
    group = parser.add_argument_group("history")
    group.add_argument(
        "--record", type=Path, default=None, metavar="FILE", help="append all that is seen to a file"
    )
    group.add_argument(
        "--record-max",
        dest="record_max_bytes",
        type=_gibibytes,
        default=1 << 30,
        metavar="GIB",
        help="of that file; a full one becomes FILE.1, in the place of an older one (default: 1)",
    )
    group.add_argument(
        "--replay", type=Path, default=None, metavar="FILE", help="show such a file instead of a run"
    )
    group.add_argument(
        "--speed", type=_speed, default=1.0, metavar="X", help="of a replay: times as fast (default: 1)"
    )
    _network(parser, identity=False)
    _common(parser, events=False)


def _metrics(parser: argparse._ActionsContainer, *, dest: str = "metrics") -> None:
    parser.add_argument(
        "--metrics",
        dest=dest,
        type=_listen,
        default=None,
        metavar="[IP:]PORT",
        help="numbers for Prometheus at /metrics (default IP: 127.0.0.1)",
    )


def _check(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "examples:\n  swarm check --port 31337 --device cuda\n"
        f"  swarm check --host 0.0.0.0 --port 31337 --join {ADDRESS}"
    )
    parser.add_argument(
        "--device", default="auto", metavar="auto|cpu|cuda[:N]", help="the device you will use"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="IP", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument("--port", type=_port, default=0, metavar="N", help="port to listen on (default: any)")
    parser.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="ADDR",
        help="a peer of the run that tries to dial this machine; several tell more of its router",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    _common(parser, events=False)


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example:\n  swarm demo --stages 3 --peers 2 --preempt 2 --verify"
    parser.add_argument(
        "--stages", type=_at_least(1), default=None, metavar="N", help="stages of the model (default: 3)"
    )
    parser.add_argument(
        "--peers",
        type=_at_least(1),
        default=2,
        metavar="N",
        help="peers of each stage (default: %(default)s)",
    )
    parser.add_argument("--steps", type=_at_least(1), default=None, metavar="N", help="optimizer steps")
    parser.add_argument(
        "--preempt",
        type=_at_least(0),
        default=1,
        metavar="N",
        help="peers to kill on the way (default: %(default)s)",
    )
    parser.add_argument(
        "--codec",
        type=_codec,
        metavar="NAME",
        default=None,
        help="how activations and gradients travel: none, bf16, blockwise8 (default), or the largest of them "
        "only: topk:0.1, topk:0.1+blockwise8",
    )
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="text to train on; repeatable (default: the prose in Python's own documentation)",
    )
    parser.add_argument(
        "--manifest",
        type=Path,
        default=None,
        metavar="FILE",
        help="train this run instead of the built-in one",
    )
    parser.add_argument(
        "--seed", type=_at_least(0), default=None, metavar="N", help="of weights, data and kills"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line of stdout")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="train the same in one process too, and compare every loss and weight",
    )
    _common(parser, events=False)


def _keeper(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"example:\n  swarm keeper --run 5a7c... --dir ckpt --join {ADDRESS}"
    _membership(parser)
    parser.add_argument(
        "--dir", type=Path, required=True, metavar="DIR", help="keep them here; also what swarm export reads"
    )
    parser.add_argument(
        "--keep",
        type=_at_least(1),
        default=2,
        metavar="N",
        help="versions of each stage (default: %(default)s); the newest that all have always stays",
    )
    parser.add_argument(
        "--stages",
        type=_at_least(0),
        nargs="+",
        default=[],
        metavar="N",
        help="keep these only (default: all)",
    )
    _network(parser, identity=True)
    _common(parser)


def _export(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "examples:\n  swarm export --checkpoint-dir ckpt --out model.safetensors\n"
        "  swarm export --checkpoint-dir ckpt --hf folder"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="with the checkpoints of all stages, such as a keeper's --dir",
    )
    source.add_argument(
        "--model", type=Path, default=None, metavar="FILE", help="a file of --out, for --hf"
    )
    _which_checkpoint(parser)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="FILE",
        help="a .safetensors file; what it is will stand in a .json beside it",
    )
    place.add_argument(
        "--hf",
        type=Path,
        default=None,
        metavar="DIR",
        help="a new folder for transformers' from_pretrained; for runs of a model of transformers",
    )
    parser.add_argument(
        "--tokenizer", type=Path, default=None, metavar="FILE", help="its JSON, to go into the folder of --hf"
    )
    _common(parser, events=False)


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "example:\n  swarm generate --model model.safetensors 'The import '\n"
        "  swarm generate --checkpoint-dir ckpt --tokens 500 'The import '"
    )
    parser.usage = "swarm generate [options] [PROMPT]"
    parser.add_argument(
        "prompt", nargs="?", default="The ", metavar="PROMPT", help="what to continue (default: %(default)r)"
    )
    _weights(parser)
    parser.add_argument(
        "--tokens",
        type=_at_least(1),
        default=200,
        metavar="N",
        help="how many to write (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.8,
        metavar="X",
        help="0 = always the likeliest (default: 0.8)",
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="default: %(default)s")
    _common(parser, events=False)


def _eval(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "example:\n  swarm eval --model model.safetensors\n"
        "  swarm eval --model model.safetensors --data held-out.txt --samples 500 --json"
    )
    _weights(parser)
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="any text files (default: the text of the training)",
    )
    parser.add_argument(
        "--samples",
        type=_at_least(1),
        default=64,
        metavar="N",
        help="how many, spread evenly over the text (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    _common(parser, events=False)


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "examples:\n"
        "  swarm plan --manifest run.toml --devices devices.toml --budget 10\n"
        f"  swarm plan --run 5a7c... --join {ADDRESS}"
    )
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="the terms of the run (TOML)")
    parser.add_argument(
        "--devices",
        type=Path,
        metavar="FILE",
        help="the machines and what lies between them (TOML)",
    )
    _membership(parser, required=False)
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--budget",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="CPU seconds to search for (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        type=_part,
        metavar="R",
        help="also say which codecs slow boundaries should have: a top-k, with at least this part",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    _network(parser, identity=False)
    _common(parser, events=False)


def _simulate(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "examples:\n"
        "  swarm simulate --manifest run.toml --devices devices.toml\n"
        "  swarm simulate --manifest run.toml --devices devices.toml --trace spot.json --plot x.png"
    )
    parser.add_argument(
        "--manifest", type=Path, required=True, metavar="FILE", help="the terms of the run (TOML)"
    )
    parser.add_argument(
        "--devices", type=Path, required=True, metavar="FILE", help="the machines and their lines (TOML)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="how many of them are up when: lines of `seconds,count`, or JSON with metadata.gap_seconds and "
        "data (default: all, for ever)",
    )
    parser.add_argument(
        "--hours", type=_hours, default=1.0, metavar="H", help="of virtual time (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=_at_least(0), default=0, metavar="N", help="of all chance (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw it, too; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    _common(parser, events=False)


def _graph(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "examples:\n"
        "  swarm graph --model my_package.models:build --stages 4\n"
        "  swarm graph --model hf:config.json --stages 3 --png model.png"
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="package.module:function of an installed package, hf:CONFIG.json of transformers, or a manifest "
        "(.toml); a function gives (module, inputs), or (module, inputs, loss, targets)",
    )
    parser.add_argument("--stages", type=_at_least(1), default=1, metavar="S", help="default: %(default)s")
    parser.add_argument(
        "--rows", type=_at_least(1), default=2, metavar="N", help="samples, for hf: (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=_at_least(1), default=128, metavar="T", help="tokens, for hf: (default: %(default)s)"
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="time this machine (some 20 s): costs are seconds, and the slowest stage is as fast as can be",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it; needs matplotlib")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--dot", action="store_true", help="print it for Graphviz")
    shown.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    _common(parser, events=False)


def _weights(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the weights")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", type=Path, default=None, metavar="FILE", help="a file that swarm export made"
    )
    source.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="or a folder with the checkpoints of all stages",
    )
    _which_checkpoint(group)
    group.add_argument(
        "--tokenizer", type=Path, default=None, metavar="FILE", help="tokenizer.json, if the run has one"
    )
    group.add_argument("--device", default="cpu", metavar="auto|cpu|cuda[:N]", help="default: %(default)s")


def _which_checkpoint(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--run", type=_run_id, default=None, metavar="ID", help="which run (default: the only one there)"
    )
    parser.add_argument(
        "--step",
        type=_at_least(0),
        default=None,
        metavar="N",
        help="which step (default: the newest that all stages have)",
    )


def _membership(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--run", required=required, type=_run_id, default=None, metavar="ID", help="run id, 32 hex digits"
    )
    group.add_argument(
        "--join",
        action="append",
        required=required,
        default=[],
        metavar="ADDR",
        help="a bootstrap or any peer of it; repeatable",
    )


def _data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="text files, in the order that the manifest pins (default: Python's documentation)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, default=None, metavar="FILE", help="tokenizer.json, if the run has one"
    )


def _network(parser: argparse.ArgumentParser, *, identity: bool) -> None:
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="IP",
        help="listen here; 0.0.0.0 = for other machines (default: %(default)s)",
    )
    group.add_argument("--port", type=_port, default=0, metavar="N", help="default: any free port")
    group.add_argument(
        "--announce",
        action="append",
        default=[],
        metavar="ADDR",
        help="tell others this address (behind a router), HOST:PORT; repeatable",
    )
    if identity:
        group.add_argument(
            "--reach",
            choices=("auto", "public", "relay"),
            default="auto",
            help="can others dial this machine? auto = ask those to join at; relay = no (default: auto)",
        )
        group.add_argument(
            "--no-relay", action="store_true", help="carry no traffic of peers that cannot be dialled"
        )
        group.add_argument(
            "--identity",
            type=Path,
            default=None,
            metavar="FILE",
            help="key file, made if missing (default: a new key)",
        )


def _common(parser: argparse.ArgumentParser, *, events: bool = True) -> None:
    if events:
        parser.add_argument(
            "--log-format", choices=("text", "json"), default="text", help="events as words or as JSON lines"
        )
        _metrics(parser, dest="role_metrics")
        parser.add_argument(
            "--health",
            type=Path,
            default=None,
            metavar="SOCKET",
            help="answer `swarm health SOCKET`, on a unix socket made there",
        )
        parser.add_argument("--die-with-parent", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error comes from")


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return parse


def _codec(text: str) -> str:
    if parse_codec(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a codec: {KNOWN}, such as topk:0.05")
    return text


def _auto_or(low: int) -> Callable[[str], int | str]:
    number = _at_least(low)

    def parse(text: str) -> int | str:
        if text == "auto":
            return text
        try:
            return number(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error} (or auto)") from None

    return parse


_stage = _auto_or(0)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 1 to 65535, or 0 for any free one")
    return int(text)


def _listen(text: str) -> tuple[str, int]:
    """`8080`, `:8080`, `0.0.0.0:8080`, `[::1]:8080` -> (host, port)."""
    host, _, port = text.rpartition(":")
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host.strip("[]") or "127.0.0.1"))
        return host, _port(port)
    raise argparse.ArgumentTypeError(f"{text!r} is not a place to listen at: 8080, :8080 or 0.0.0.0:8080")


def _speed(text: str) -> float:
    speed = _number(text, 1e6, "a speed: above 0, up to 1000000")
    if not speed:
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed: above 0, up to 1000000")
    return speed


def _gibibytes(text: str) -> int:
    said = "GiB of a file: above 0, up to 1000000"
    size_bytes = int(_number(text, 1e6, said) * 2**30)
    if not size_bytes:
        raise argparse.ArgumentTypeError(f"{text!r} is not {said}")
    return size_bytes


def _temperature(text: str) -> float:
    return _number(text, 100, "a temperature: 0 to 100")


def _part(text: str) -> float:
    part = _number(text, 1.0, "a part of all numbers: above 0, below 1, such as 0.01")
    if not 0.0 < part < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part of all numbers: above 0, below 1")
    return part


def _hours(text: str) -> float:
    hours = _number(text, 10_000.0, "a number of hours: above 0, up to 10000")
    if not hours:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours: above 0, up to 10000")
    return hours


def _seconds(text: str) -> float:
    return _number(text, 86_400, "a number of seconds, 0 to 86400")


RATES = {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}


def _rate(text: str) -> float:
    """`20Mbit` -> bits a second."""
    from peers.fleet import LEAST_BPS

    for unit, bps in RATES.items():
        with contextlib.suppress(ValueError):
            if text.endswith(unit):
                rate_bps = float(text.removesuffix(unit)) * bps
                if LEAST_BPS <= rate_bps <= 1e12:
                    return rate_bps
    words = "is not a rate of at least 256kbit a second, such as 800kbit, 20Mbit or 1Gbit"
    raise argparse.ArgumentTypeError(f"{text!r} {words}")


def _memory(text: str) -> int:
    """`6GiB` -> bytes."""
    for unit, size in {"MiB": 1 << 20, "GiB": 1 << 30}.items():
        with contextlib.suppress(ValueError):
            if text.endswith(unit) and 1 <= (number := float(text.removesuffix(unit))) <= 1e6:
                return int(number * size)
    raise argparse.ArgumentTypeError(f"{text!r} is not a size of memory: 800MiB or 6GiB")


def _number(text: str, most: float, wanted: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= most:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")


def _run_id(text: str) -> str:
    if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a run id (32 hex digits); the bootstrap prints it in the line to join with"
        )
    return text


# --- from arguments to roles ---

NOT_OPTIONS = frozenset(
    {"command", "version", "traceback", "log_format", "role_metrics", "health", "die_with_parent", "words"}
)
"""Arguments that this module deals with itself."""


def options(cls: Callable[..., T], args: argparse.Namespace) -> T:
    """The role's frozen options from the arguments of the same names; repeated ones become tuples."""
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name not in NOT_OPTIONS
    }
    return cls(**fields)


def _role(args: argparse.Namespace, module: str, role: str, emit: Emit) -> Role:
    if args.command == "peer" and _is_several(args.device):
        from peers.fleet import Fleet, FleetOptions

        if args.health is not None:
            raise SetupError("--health answers for one peer: with several devices start a program for each")
        own = {
            "--device", "--identity", "--port", "--announce", "--metrics", "--max-upload",
            "--die-with-parent",
        }  # fmt: skip
        return Fleet(
            FleetOptions(
                device=args.device, words=without(args.words[1:], own), identity=args.identity,
                port=args.port, announce=tuple(args.announce), metrics=args.role_metrics,
                max_upload=args.max_upload,
            ),
            emit=emit,
        )  # fmt: skip
    loaded = importlib.import_module(module)
    return getattr(loaded, role)(options(getattr(loaded, role + "Options"), args), emit=emit)


def _is_several(device: str) -> bool:
    return device == "all" or "," in device


def without(words: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """Arguments of a command line, without options of these names and their values."""
    left: list[str] = []
    skips = False
    for word in words:
        if skips:
            skips = False
        elif word in names:
            skips = True
        elif word.partition("=")[0] not in names:
            left.append(word)
    return tuple(left)


ROLES = {
    "bootstrap": ("peers.roles", "Bootstrap"),
    "peer": ("peers.roles", "Peer"),
    "train": ("peers.roles", "Train"),
    "keeper": ("peers.keeper", "Keeper"),
}
"""Subcommand -> module and class; the options are the class `<name>Options` of the same module."""


def _run_role(args: argparse.Namespace) -> int:
    from peers.events import Emitter, LeavingNow, Note, said_in_logs

    emit: Emit = Emitter(args.log_format)
    if args.command != "bootstrap":
        from peers.device import tune_malloc

        tune_malloc()  # before torch starts threads
    several = args.command == "peer" and _is_several(args.device)
    with contextlib.ExitStack() as stack:
        if args.role_metrics is not None and not several:
            from peers.metrics import RoleMetrics, served

            emit = metrics = RoleMetrics(args.command, emit)
            place = stack.enter_context(served(args.role_metrics, metrics.registry))
            emit(Note(text=f"metrics at {place}"))
        stack.enter_context(said_in_logs(emit))
        if args.health is None:
            role = _role(args, *ROLES[args.command], emit)
            run = role.run
        else:
            from peers.health import Pulse, answering

            emit = pulse = Pulse(args.command, emit)
            role = _role(args, *ROLES[args.command], emit)

            async def run() -> int | None:
                async with answering(args.health, lambda: pulse.health, role.connected):
                    return await role.run()

        return _with_signals(
            run,
            role.leave,
            on_leave=lambda: emit(LeavingNow(role=args.command)),
            on_hang=lambda error: _say_hang(args, error),
        )


def _run_demo(args: argparse.Namespace) -> int:
    demo = importlib.import_module("peers.demo")
    chosen = options(demo.DemoOptions, args)
    return _with_signals(lambda: demo.run_demo(chosen), None)


def _run_manifest(args: argparse.Namespace) -> int:
    from swarm.run import EXAMPLE, BroughtSpec, load_run, parameter_count

    if args.manifest is None:
        print(EXAMPLE, end="")
        return Exit.OK
    run = load_run(args.manifest)
    print(run.to_toml(), end="")
    if isinstance(run.model, BroughtSpec):
        words = run.model.source or "a model of transformers"
        open_ends = [] if run.model.pinned else ["the model"]
    else:
        millions = parameter_count(run.model, sequence_length=run.data.sequence_length) / 1e6
        words, open_ends = f"{millions:,.1f} M parameters", []
    if not run.data.sha256:
        open_ends.append("the data")
    each = "samples" if run.data.source == "code" else "tokens"
    more = f"; the id changes when swarm bootstrap pins {' and '.join(open_ends)}" if open_ends else ""
    print(f"run {run.id}: {words}, {run.tokens_per_step:,} {each} a step{more}", file=sys.stderr)
    return Exit.OK


def _run_check(args: argparse.Namespace) -> int:
    from peers.check import CheckOptions, run_check

    return Exit.OK if asyncio.run(run_check(options(CheckOptions, args))) else Exit.CHECK


def _run_wish(args: argparse.Namespace) -> int:
    from peers.owner_socket import WishOptions, run_wish

    return _with_signals(lambda: run_wish(args.command, options(WishOptions, args)), None)


def _run_health(args: argparse.Namespace) -> int:
    from peers.health import HealthOptions, run_health

    try:
        return Exit.OK if asyncio.run(run_health(options(HealthOptions, args))) else Exit.FAILED
    except SetupError as error:
        _say(args, error.text)
        return Exit.FAILED  # what Docker's HEALTHCHECK takes for ill


def _run_status(args: argparse.Namespace) -> int:
    from peers.status import StatusOptions, run_status

    return _with_signals(lambda: run_status(options(StatusOptions, args)), None)


def _run_dashboard(args: argparse.Namespace) -> int:
    from peers.watch.dashboard import DashboardOptions, run_dashboard

    return _with_signals(lambda: run_dashboard(options(DashboardOptions, args)), None)


def _run_generate(args: argparse.Namespace) -> int:
    from peers.generate import GenerateOptions, run_generate

    run_generate(options(GenerateOptions, args))
    return Exit.OK


def _run_export(args: argparse.Namespace) -> int:
    from peers.export import ExportOptions, run_export

    run_export(options(ExportOptions, args))
    return Exit.OK


def _run_eval(args: argparse.Namespace) -> int:
    from peers.evaluate import EvalOptions, run_eval

    run_eval(options(EvalOptions, args))
    return Exit.OK


def _run_plan(args: argparse.Namespace) -> int:
    from peers.plan import PlanOptions, run_plan

    return _with_signals(lambda: run_plan(options(PlanOptions, args)), None)


def _run_simulate(args: argparse.Namespace) -> int:
    from peers.simulate import SimulateOptions, run_simulate

    run_simulate(options(SimulateOptions, args))
    return Exit.OK


def _run_graph(args: argparse.Namespace) -> int:
    from peers.graph import GraphOptions, run_graph

    run_graph(options(GraphOptions, args))
    return Exit.OK


def _with_signals(
    run: Callable[[], Coroutine[Any, Any, Any]],
    leave: Callable[[], Coroutine[Any, Any, None]] | None,
    *,
    on_leave: Callable[[], None] = lambda: None,
    on_hang: Callable[[DeviceHangs], None] = lambda _: None,
) -> int:
    """Run to the end. First SIGINT or SIGTERM: `leave()`, or cancel without one. Second: cancel at once.

    An int that `run` returns is the exit code. Leaving in good order exits with 0. After a second signal, and
    when the device hangs, the process ends here.
    """

    async def main() -> int:
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(run())
        farewell: asyncio.Future[None] | None = None
        stopped = False

        def hang_up(done: asyncio.Future[None]) -> None:
            # A farewell that fails must not leave the process running for ever.
            if not done.cancelled() and done.exception() is not None:
                work.cancel()

        def stop() -> None:
            nonlocal farewell, stopped
            if leave is not None and farewell is None:
                on_leave()
                farewell = asyncio.ensure_future(leave())
                farewell.add_done_callback(hang_up)
                return
            stopped = True
            work.cancel()

        # Under nohup the terminal's end is not for us.
        hang_ups = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        numbers = (signal.SIGINT, signal.SIGTERM, *hang_ups)
        for signum in numbers:
            loop.add_signal_handler(signum, stop)
        try:
            result = await work
        except asyncio.CancelledError:
            if not stopped and farewell is not None and farewell.done() and not farewell.cancelled():
                farewell.result()  # raises what went wrong
            if stopped and leave is not None:
                _end_now(Exit.STOPPED)
            return Exit.STOPPED
        except DeviceHangs as error:
            with contextlib.suppress(OSError):  # nobody reads it: the memory matters more
                on_hang(error)
            _end_now(exit_code(error))
        finally:
            if farewell is not None:
                farewell.cancel()
                await asyncio.gather(farewell, return_exceptions=True)
            for signum in numbers:
                loop.remove_signal_handler(signum)
                # Torch takes a while to end a process that is done: an impatient user must not make it fail.
                signal.signal(signum, signal.SIG_IGN)
        return int(result) if isinstance(result, int) else Exit.OK

    import uvloop

    return uvloop.run(main())


def _end_now(code: Exit) -> NoReturn:
    """End the process, and wait for nothing: a loop's end waits for its threads, Python's for CUDA too, and
    CUDA for the device. One that hangs would keep the process, and its memory, for ever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "manifest": _run_manifest,
    "bootstrap": _run_role,
    "peer": _run_role,
    "train": _run_role,
    "pause": _run_wish,
    "resume": _run_wish,
    "health": _run_health,
    "status": _run_status,
    "dashboard": _run_dashboard,
    "check": _run_check,
    "demo": _run_demo,
    "generate": _run_generate,
    "keeper": _run_role,
    "export": _run_export,
    "eval": _run_eval,
    "plan": _run_plan,
    "simulate": _run_simulate,
    "graph": _run_graph,
}


def exit_code(error: BaseException) -> Exit:
    """The exit code that an error ends the process with."""
    if isinstance(error, SetupError):
        return Exit.SETUP
    if isinstance(error, PeerFault | NotNow | Refused):
        return Exit.NETWORK
    if isinstance(error, KeyboardInterrupt):
        return Exit.STOPPED
    return Exit.FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code (`Exit`)."""
    if os.getpid() == 1:
        # The first process of a container gets only signals that it handles: until a role does, stop.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = build_parser()
    args = parser.parse_args(argv)
    args.words = sys.argv[1:] if argv is None else list(argv)
    if args.version:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"swarm {version('swarm')}")
        except PackageNotFoundError:
            print("swarm, run from its folder without being installed")
        return Exit.OK
    if args.command is None:
        parser.print_help()
        return Exit.USAGE
    try:
        if getattr(args, "die_with_parent", None) is not None:
            from peers.device import die_with_parent

            die_with_parent(args.die_with_parent)
        return RUN[args.command](args)
    except SwarmError as error:
        if args.traceback:
            raise
        _say(args, error.text)
        return exit_code(error)
    except KeyboardInterrupt:
        return Exit.STOPPED
    except BrokenPipeError:
        # Whoever read our output went away; keep Python from complaining again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except Exception as error:
        if args.traceback:
            raise
        _say(args, f"a bug in swarm: {type(error).__name__}: {error} (add --traceback to see where)")
        return Exit.FAILED


def _say(args: argparse.Namespace, text: str) -> None:
    """The one line about an error: on stderr for people, as an event where events are JSON."""
    if getattr(args, "log_format", "text") == "json":
        from peers.events import Emitter, Failed

        Emitter("json")(Failed(text=text))
    print(f"swarm {args.command}: {printable(text)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())


def _say_hang(args: argparse.Namespace, error: DeviceHangs) -> None:
    if args.traceback:
        traceback.print_exception(error)
    else:
        _say(args, error.text)
