"""The options of the roles: frozen dataclasses, from which parsers are made.

A field is an argument: name, default, how the text is read, help. The class's docstring is what `--help` says
of the command: a sentence, and examples. Imports nothing heavy, so that a wrong argument is refused at once.
Those of the tools are in `peers.programs.tool_options`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import inspect
import ipaddress
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from typing_extensions import dataclass_transform

from swarm.errors import SetupError
from swarm.ids import PEER_ID, RunName, Stage

MIN_UPLOAD_BPS = 256e3
"""Below that a peer would be taken for dead by those it answers."""

TOKEN_START = "swarm-invitation-"
TOKEN_VARIABLE = "SWARM_TOKEN"  # a command line can be read by all users of a machine
NO_TOKEN = f"none that swarm invite printed: that is one word that starts with {TOKEN_START}"
EXAMPLE_ADDRESS = "/ip4/192.0.2.7/tcp/31337/p2p/12D3KooW..."

RUN, WEIGHTS, NETWORK = "the run", "the weights", "network"
"""Headings of the help; arguments without one come first."""


# --- how the text of an argument is read ---


class OptionKind(NamedTuple):
    """What may stand after an option."""

    parse: Callable[[str], Any]
    """Raises ArgumentTypeError."""
    metavar: str
    check: Callable[[str, Any], None] | None = None
    """Raises SetupError: what was written can be, but not on this machine. Given the option's name, too."""


def wrong(text: str, wanted: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} is not {wanted}")


def whole(
    low: int, high: int = 1_000_000_000, *, or_auto: bool = False, wanted: str = ""
) -> Callable[[str], int | str]:
    """`high`: by default that of `steps` in a manifest; `wanted`: what it is, if not just a number."""

    def parse(text: str) -> int | str:
        if or_auto and text == "auto":
            return text
        if re.fullmatch("-?[0-9]{1,19}", text) and low <= int(text) <= high:
            return int(text)
        raise wrong(text, wanted or f"a whole number from {low} to {high}{' (or auto)' * or_auto}")

    return parse


def between(most: float, wanted: str, *, above: bool = False, below: bool = False) -> Callable[[str], float]:
    """`above`: not 0; `below`: not `most`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 <= (value := float(text)) <= most and not (
                (above and not value) or (below and value == most)
            ):
                return value
        raise wrong(text, wanted)

    return parse


_port = whole(0, 65535, wanted="a port: 1 to 65535, or 0 for any free one")


def listen(text: str) -> tuple[str, int]:
    """`8080`, `:8080`, `0.0.0.0:8080`, `[::1]:8080` -> (host, port)."""
    host, _, port = text.rpartition(":")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host.strip("[]") or "127.0.0.1")), int(_port(port))
    raise wrong(text, "a place to listen at: 8080, :8080 or 0.0.0.0:8080")


def _with_unit(text: str, units: dict[str, float], low: float, high: float, wanted: str) -> float:
    for unit, size in units.items():
        with contextlib.suppress(ValueError):
            if text.endswith(unit) and low <= (value := float(text.removesuffix(unit)) * size) <= high:
                return value
    raise wrong(text, wanted)


def _rate(text: str) -> float:
    """`20Mbit` -> bits a second."""
    wanted = "a rate of at least 256kbit a second, such as 800kbit, 20Mbit or 1Gbit"
    return _with_unit(text, {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}, MIN_UPLOAD_BPS, 1e12, wanted)


def _memory(text: str) -> int:
    """`6GiB` -> bytes."""
    wanted = "a size of memory: 800MiB or 6GiB"
    return int(_with_unit(text, {"MiB": 2.0**20, "GiB": 2.0**30}, 2.0**20, 2.0**50, wanted))


def _run_or_name(text: str) -> str:
    """A run id, or the name of a run and its owner's fingerprint."""
    if re.fullmatch("[0-9a-f]{32}", text):
        return text
    if "@" not in text:
        raise wrong(text, "a run id (32 hex digits); the bootstrap prints it in the line to join with")
    name = RunName.parse(text)
    if name is None:
        raise wrong(text, "NAME@FINGERPRINT, with 20 letters after the @; or a run id (32 hex digits)")
    return str(name)


def _peer_id(text: str) -> str:
    if not PEER_ID.fullmatch(text):
        raise wrong(text, "a peer id (12D3KooW..., 52 characters); each program prints its own")
    return text


def _token(text: str) -> str:
    """Whether it is one for this run is known once the run is."""
    if not re.fullmatch(f"{TOKEN_START}[\\w-]+", text.strip(), re.ASCII):
        raise argparse.ArgumentTypeError(NO_TOKEN)
    return text.strip()


def check_peer_address(flag: str, text: str) -> None:
    """Raise SetupError for an address without a peer id, or with a port that cannot be: p2pd dials none."""
    for port in re.findall("(?:/tcp/|:(?=[0-9]+$))([0-9]+)", text):
        if len(port) > 5 or not 0 < int(port) < 65536:
            raise SetupError(
                f"{flag} {text[:200]!r} cannot be: a port is a number from 1 to 65535, and {port[:20]} is "
                "none"
            )
    transport, found, peer = text.rpartition("/p2p/")
    if found and transport.startswith("/") and peer and "/" not in peer:
        return
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise SetupError(
            f"{flag} {text!r} is not the address of a peer: it ends in /p2p/ and a peer id, as in the line "
            "that the bootstrap printed"
        )
    try:
        name = f"ip{ipaddress.ip_address(host.strip('[]')).version}"
    except ValueError:
        name = "dns4"
    raise SetupError(
        f"{flag} {text!r} is not the address of a peer: the id of the peer that listens there is missing. "
        f"Write {flag} /{name}/{host.strip('[]')}/tcp/{port}/p2p/ID: that peer printed its ID in its first "
        "line, a bootstrap in its line `swarm peer ... --join ...`"
    )


def path(text: str) -> Path:
    """Nothing is no path, though Python takes it for this folder: a shell's variable was empty. And a shell
    leaves the `~` of --dir=~/ckpt and of @~/join.txt as it is.
    """
    if not text:
        raise wrong(text, "the name of a file or folder")
    with contextlib.suppress(RuntimeError):  # no user is called so: a file is
        return Path(text).expanduser()
    return Path(text)


def data_file(text: str) -> Path | str:
    """Text files and indexes are paths, or an address: https://, hf:// …"""
    return text if "://" in text else path(text)


def is_no_pipe(flag: str, path: Path) -> None:
    """One that no program writes to would be waited for, for ever; in /dev the shell has opened them."""
    if path.is_fifo() and path.parts[:2] != ("/", "dev"):
        raise SetupError(f"{flag} {path} is a pipe: give a file")


def is_there(flag: str, path: Path | str) -> None:
    if not isinstance(path, Path) or path.is_file() or path.is_dir():
        return
    if path.exists():  # these are read at many places, and more than once
        raise SetupError(f"{flag} {path} is a pipe or a device: give a file")
    if ":" not in path.name:  # package.module:function
        raise SetupError(f"{flag} {path} cannot be read: there is no such file or folder")


def can_be_folder(flag: str, path: Path) -> None:
    """What is saved hours later must not be lost for want of a place."""
    there = next(one for one in (path.absolute(), *path.absolute().parents) if os.path.lexists(one))
    if not (leads := os.access(there, os.F_OK)) or not there.is_dir():
        what = "is a file" if leads else "leads to nothing (is a disk to be mounted?)"
        raise SetupError(f"{flag} {there} {what}: give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SetupError(f"{flag} {path} cannot be written: make {there} yours, or give another folder")


def _may_be(flag: str, device: str) -> None:
    """CUDA cannot be where its driver is not; torch, which takes seconds to import, need not be asked."""
    from peers.device import check_word

    names = [name.strip() for name in device.split(",") if name.strip()] or [device]
    for name in names if device != "all" else ():
        check_word(name)
    if not any(name.startswith("cuda") for name in names):
        return
    if Path("/dev/kfd").exists():  # ROCm's torch calls its devices so, too
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise SetupError(
            f"{flag} {device}: this machine has no CUDA driver (libcuda.so.1): nvidia-smi must work; a "
            f"container needs --gpus all. Or take {flag} cpu"
        ) from None


def _stages(text: str) -> tuple[int | None, ...]:
    number = whole(0)
    return tuple(None if word == "-" else int(number(word)) for word in text.split(","))


WORD = OptionKind(str, "NAME")
TOKEN = OptionKind(_token, "TOKEN")
FILE = OptionKind(path, "FILE", is_no_pipe)
NEEDED_FILE = OptionKind(path, "FILE", is_there)
DATA = OptionKind(data_file, "FILE", is_there)
ANY_DIR = OptionKind(path, "DIR")
DIR = OptionKind(path, "DIR", can_be_folder)
NEEDED_DIR = OptionKind(path, "DIR", is_there)
SOCKET = OptionKind(path, "SOCKET")
IP = OptionKind(str, "IP")
PORT = OptionKind(_port, "N")
ADDRESS = OptionKind(str, "ADDR")
PEER_ADDRESS = OptionKind(str, "ADDR", check_peer_address)
LISTEN = OptionKind(listen, "[IP:]PORT")
ANY_RUN = OptionKind(_run_or_name, "ID|NAME@FINGERPRINT")
PEER_ID_KIND = OptionKind(_peer_id, "PEER")
COUNT = OptionKind(whole(1), "N")
NUMBER = OptionKind(whole(0), "N")
SEED = OptionKind(whole(0, 2**63 - 1), "N")
THREADS = OptionKind(whole(1, 1024), "N")
PID = OptionKind(int, "PID")
STAGE = OptionKind(whole(0, or_auto=True), "auto|N")
STAGES = OptionKind(_stages, "N,N,…")
COUNT_OR_AUTO = OptionKind(whole(1, or_auto=True), "auto|N")
SECONDS = OptionKind(between(86_400, "a number of seconds, 0 to 86400"), "S")
RATE = OptionKind(_rate, "RATE")
MEMORY = OptionKind(_memory, "SIZE")
DEVICE = OptionKind(str, "auto|cpu|cuda[:N]|mps", _may_be)
DEVICES = OptionKind(str, "auto|cpu|cuda[:N]|mps|all", _may_be)


# --- how a field says what its argument is ---


def option(
    kind: OptionKind | None, help: str, default: Any = MISSING, *, group: str = "", one_of: str = "",
    positional: bool = False, variable: str = "", unless: tuple[str, ...] = (), **more: Any,
) -> Any:  # fmt: skip
    """A field that is an argument; without a default it is required.

    Args:
        kind: None: it takes no value.
        one_of: at most one of a class's options with the same word here can be given; exactly one with a `!`.
        variable: of the environment, whose words stand for the values of one that is not typed.
        unless: options beside which the variable means nothing.
        more: for argparse.
    """
    help = f"{help} (or ${variable})" if variable else help
    told = {"kind": kind, "help": help, "group": group, "one_of": one_of, "more": more}
    told |= {"positional": positional, "variable": variable, "unless": unless}
    return field(default=default, metadata=told)


def optional(kind: OptionKind, help: str, **more: Any) -> Any:
    """One that is None unless it is given."""
    return option(kind, help, None, **more)


def switch(help: str, **more: Any) -> Any:
    """One that is off unless it is given."""
    return option(None, help, False, action="store_true", **more)


def repeated(kind: OptionKind, help: str, default: Any = (), **more: Any) -> Any:
    """A tuple: the option can be given several times."""
    return option(kind, help, default, action="append", **more)


def several(kind: OptionKind, help: str, **more: Any) -> Any:
    """A tuple: the option takes several values."""
    return option(kind, help, (), nargs="+", **more)


Listen: TypeAlias = tuple[str, int]
Reach: TypeAlias = Literal["auto", "public", "relay"]
"""What a user says of a peer: find out; others can dial it; they cannot."""
RUN_HELP = "run id, 32 hex digits; or its name and its owner's fingerprint"
JOIN_HELP = "a bootstrap or any peer of it; repeatable"
DATA_HELP = "text files, in the order that the manifest pins; or an index: its folder or its address"
TOKEN_HELP = "made by the owner with swarm invite; keep your --identity"
ALLOW_HELP = "a package, or a file of the owner's, that the manifest may name; repeatable"
TOKENIZER_HELP = "tokenizer.json, if the run has one"
EVAL_HELP = "text that the run is evaluated on, if its manifest says so"
START_HELP = "folder of the weights that the run starts from, or a file of them"


# --- what several commands have ---


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Options:
    """Base of all options: a class of these is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class ProcessOptions(Options):
    """Of a role: what its process does besides. Not for the role itself."""

    log_format: str = option(None, "events: words or JSON (default: text)", "text", choices=("text", "json"))
    metrics: Listen | None = optional(LISTEN, "numbers for Prometheus at /metrics (default IP: 127.0.0.1)")
    health: Path | None = optional(SOCKET, "answer `swarm health SOCKET`, on a unix socket made there")
    die_with_parent: int | None = optional(PID, argparse.SUPPRESS)


class RunOptions(Options):
    """Which run, and where it is met."""

    run: str = option(ANY_RUN, RUN_HELP, group=RUN, variable="SWARM_RUN")
    join: tuple[str, ...] = repeated(PEER_ADDRESS, JOIN_HELP, MISSING, group=RUN, variable="SWARM_JOIN")


class MemberOptions(RunOptions):
    """The same, of a role in it."""

    token: str | None = optional(TOKEN, TOKEN_HELP, group=RUN, variable=TOKEN_VARIABLE)
    allow_code: tuple[str, ...] = repeated(WORD, ALLOW_HELP, group=RUN)
    max_upload: float | None = optional(
        RATE, "send no more than this, such as 20Mbit a second (default: no limit)", group=NETWORK
    )
    """Bits a second."""

    def __post_init__(self) -> None:
        """Raises SetupError: a key that is gone when this program ends would use the token up."""
        if self.token is not None and getattr(self, "identity", None) is None:
            raise SetupError("--token admits one key: give --identity FILE too (made if missing); keep it")


class NetworkOptions(Options):
    """How a role is reached."""

    host: str = option(
        IP, "listen here (default: 0.0.0.0; :: if all is IPv6; 127.0.0.1 if all is here)", "", group=NETWORK
    )
    port: int = option(PORT, "listen at this (default: any free port)", 0, group=NETWORK)
    announce: tuple[str, ...] = repeated(
        ADDRESS, "tell others this address (behind a router), HOST:PORT; repeatable", group=NETWORK
    )
    reach: Reach = option(
        None,
        "can others dial this machine? auto = ask those to join at; relay = no (default: auto)",
        "auto",
        group=NETWORK,
        choices=("auto", "public", "relay"),
    )
    no_relay: bool = switch("carry no traffic of peers that cannot be dialled", group=NETWORK)
    direct_port: int = option(
        PORT, "for direct connections, which cost less CPU time (default: any free port)", 0, group=NETWORK
    )
    no_direct: bool = switch("send all by p2pd: no direct connections", group=NETWORK)
    identity: Path | None = optional(
        FILE, "key file, made if missing; default: a new key", group=NETWORK, variable="SWARM_IDENTITY"
    )


class WeightsOptions(Options):
    """Which weights: one of `model` and `checkpoint_dir`."""

    model: Path | None = optional(
        NEEDED_FILE, "a file that swarm export made", group=WEIGHTS, one_of="weights!"
    )
    checkpoint_dir: Path | None = optional(
        NEEDED_DIR, "or a folder with the checkpoints of all stages", group=WEIGHTS, one_of="weights!"
    )
    run: str | None = optional(ANY_RUN, "which run (default: the only one there)", group=WEIGHTS)
    step: int | None = optional(
        NUMBER, "which step (default: the newest that all stages have)", group=WEIGHTS
    )
    start: Path | None = optional(NEEDED_FILE, START_HELP + ", if it trains not all of them", group=WEIGHTS)


# --- the roles ---


class BootstrapOptions(NetworkOptions):
    """Start a run: publish its manifest, print the join line.

    swarm bootstrap --manifest run.toml --data corpus.txt --join-file join.txt
    """

    manifest: Path = option(FILE, "the terms of the run (TOML): swarm manifest prints an example")
    """`-` reads it from standard input."""
    data: tuple[Path | str, ...] = several(DATA, DATA_HELP)
    tokenizer: Path | None = optional(NEEDED_FILE, TOKENIZER_HELP)
    eval_data: tuple[Path | str, ...] = several(DATA, EVAL_HELP)
    start: Path | None = optional(NEEDED_FILE, START_HELP)
    join: tuple[str, ...] = repeated(PEER_ADDRESS, "another bootstrap of the same network; repeatable")
    charter: Path | None = optional(
        NEEDED_FILE, "publish this too: swarm init made it, and newer ones are written there"
    )
    join_file: Path | None = optional(FILE, "also write the arguments to join with there: swarm peer @FILE")


class PeerOptions(MemberOptions, NetworkOptions):
    """Join a run and serve one stage on this machine's device.

    swarm peer @join.txt
    swarm peer --run 5a7c... --join ADDRESS
    swarm peer @join.txt --device all --identity keys/
    """

    stage: Literal["auto"] | int = option(STAGE, "serve it (default: the one that needs a peer most)", "auto")
    device: str = option(
        DEVICES, "all, or cuda:0,cuda:2: a peer for each (default: CUDA if there is, else CPU)", "auto"
    )
    stages: tuple[int | None, ...] = option(
        STAGES, "with several devices: the stage of each, such as 0,1,2,3; - for no peer on it", ()
    )
    start: Path | None = optional(NEEDED_FILE, START_HELP + " (default: ask others)")
    recompute: bool = switch("keep only stage inputs and run forwards twice: less memory")
    recompute_layers: bool = switch(
        "keep the input of each layer of a built-in decoder, and run it twice: less memory"
    )
    host_sums: bool = switch("add gradients up in the machine's memory: 8 bytes a weight less on a GPU")
    threads: int | None = optional(THREADS, "cores to compute on, each a microbatch (default: all)")
    max_inflight: Literal["auto"] | int = option(
        COUNT_OR_AUTO, "microbatches admitted at once (default: by measured memory)", "auto"
    )
    checkpoint_dir: Path | None = optional(DIR, "save checkpoints here, and resume from here")
    keep: int = option(COUNT, "checkpoints to keep (default: %(default)s)", 2)
    leave_within: float = option(SECONDS, "seconds to finish in on Ctrl-C (default: %(default)s)", 25.0)
    pause_within: float = option(SECONDS, "seconds to finish in on swarm pause (default: %(default)s)", 5.0)
    pause_when_busy: bool = switch("pause while other programs want the GPU (needs nvidia-ml-py)")
    max_vram: int | None = optional(
        MEMORY, "use no more of the device's memory than this, such as 6GiB (default: what is free)"
    )
    """Bytes."""


class TrainOptions(MemberOptions, NetworkOptions):
    """Join a run as a trainer: bring the data, drive the steps.

    swarm train @join.txt --data corpus.txt
    """

    data: tuple[Path | str, ...] = several(DATA, DATA_HELP)
    tokenizer: Path | None = optional(NEEDED_FILE, TOKENIZER_HELP)
    cache_size: int = option(
        MEMORY, "keep so much of the data of other machines on this disk (default: 32GiB)", 32 << 30
    )
    no_share: bool = switch("of an index: give no blocks to other trainers of the run")
    eval_data: tuple[Path | str, ...] = several(DATA, EVAL_HELP)
    window: Literal["auto"] | int = option(
        COUNT_OR_AUTO, "microbatches in flight (default: twice what the swarm works on at once)", "auto"
    )
    steps: int | None = optional(
        COUNT, "stop when the run, not this trainer, has taken so many steps (default: all of the run's)"
    )


class KeeperOptions(MemberOptions, NetworkOptions):
    """Keep a run's checkpoints on this disk, for newcomers; no GPU.

    swarm keeper @join.txt --dir ckpt
    """

    dir: Path = option(DIR, "keep them here; also what swarm export reads")
    keep: int = option(
        COUNT, "versions of each stage (default: %(default)s); the newest that all have always stays", 2
    )
    stages: tuple[Stage, ...] = several(NUMBER, "keep these only (default: all)")
    data: Path | str | None = optional(
        DATA, "an index: give trainers what this machine has of it, beside it or in the cache"
    )


# --- from the classes to a parser and back ---


def description(cls: type) -> tuple[str, str, list[str]]:
    """What a command does, its usage after its name, and examples: the docstring, and what is positional."""
    text, *more = inspect.cleandoc(cls.__doc__ or "").splitlines()
    usage = "[options]"
    for one in fields(cls):
        if one.metadata["positional"]:
            word = one.metadata["kind"].metavar + " ..." * ("nargs" in one.metadata["more"])
            usage += f" {word}" if one.default is MISSING else f" [{word}]"
    return text, usage, [line.strip().replace("ADDRESS", EXAMPLE_ADDRESS) for line in more if line]


def flag_of(name: str) -> str:
    return "--" + name.rstrip("_").replace("_", "-")  # `from` is a word of Python


VARIABLES = ("SWARM_RUN", "SWARM_JOIN", "SWARM_IDENTITY", TOKEN_VARIABLE)
"""They speak to the program that a user starts; those that it starts are told everything as arguments."""


def from_environment(cls: type, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The arguments that variables of the environment stand for, if the words of a command have none of them.
    A word with an @ is a file with a run and addresses.

    Raises:
        SetupError: a variable stands for nothing that its option can be.
    """
    typed = {word.partition("=")[0] for word in words}
    if any(word.startswith("@") for word in words):
        typed |= {"--run", "--join"}
    found: list[str] = []
    for one in fields(cls):
        name, kind = one.metadata["variable"], one.metadata["kind"]
        no = {flag := flag_of(one.name), *one.metadata["unless"], "-h", "--help"}
        if typed & no or not environment.get(name):
            continue
        listed = one.metadata["more"].get("action") == "append"
        for value in environment[name].split() if listed else [environment[name]]:
            try:
                parsed = kind.parse(value)
                if kind.check is not None:
                    kind.check(f"${name}", parsed)
            except argparse.ArgumentTypeError as error:
                raise SetupError(f"${name}: {error}") from None
            found += [flag, value]
    return found


def add_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """The arguments of the fields of a class above."""
    told = [(one, one.metadata) for one in fields(cls)]
    places: dict[str, Any] = {"": parser}
    names = dict.fromkeys(option["group"] for _, option in told if option["group"])
    for name in sorted(names, key=lambda name: (name == NETWORK) - (name == RUN)):  # in any subclass
        places[name] = parser.add_argument_group(name)
    for one, option in told:
        where, rest = places[option["group"]], dict(option["more"], help=option["help"])
        if set_of := option["one_of"]:
            if set_of not in places:
                places[set_of] = where.add_mutually_exclusive_group(required=set_of.endswith("!"))
            where = places[set_of]
        listed = rest.get("action") == "append" or "nargs" in rest
        if option["kind"] is not None:
            rest.update(type=option["kind"].parse, metavar=option["kind"].metavar)
        if one.default is not MISSING or listed:
            rest["default"] = [] if listed and one.default is not None else one.default
        if option["positional"]:
            where.add_argument(one.name, **rest, **({} if one.default is MISSING else {"nargs": "?"}))
        else:
            where.add_argument(flag_of(one.name), dest=one.name, required=one.default is MISSING, **rest)


def options_from(cls: Callable[..., Any], args: argparse.Namespace) -> Any:
    """The options of a class above from what was parsed; repeated ones become tuples.

    Raises:
        SetupError: this machine does not have what an option names.
    """
    given: dict[str, Any] = {}
    for one in fields(cls):  # type: ignore[arg-type]
        value = given[one.name] = getattr(args, one.name)
        if isinstance(value, list):
            value = given[one.name] = tuple(value)
        kind: OptionKind | None = one.metadata["kind"]
        if kind is not None and kind.check is not None:
            for each in value if isinstance(value, tuple) else (value,):
                if each is not None:
                    kind.check(kind.metavar if one.metadata["positional"] else flag_of(one.name), each)
    return cls(**given)
