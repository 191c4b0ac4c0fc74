# ruff: noqa: RUF009 (the functions called in the classes make fields)
"""What each subcommand of `swarm` can be told: one frozen dataclass each, from which its parser is made.

A field says all of its argument: the name, the default, how the text is read, the help. Imports nothing
heavy, so that a wrong argument is refused at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from swarm.codecs import KNOWN, parse_codec
from swarm.errors import SetupError
from swarm.ids import Stage

MIN_UPLOAD_BPS = 256e3
"""Below that a peer would be taken for dead by those it answers."""
HISTORY_BYTES = 1 << 30
"""Of a recorded history, before the next file is begun."""

RUN, WEIGHTS, NETWORK = "the run", "the weights", "network"
FACES, HISTORY = "faces, besides the terminal", "history"
MINE = "which peers (default: all that you run on this machine)"
GROUPS = (RUN, FACES, HISTORY, WEIGHTS, MINE, NETWORK)
"""Headings of the help, in their order; arguments without one come first."""


# --- how the text of an argument is read ---


@dataclass(frozen=True, slots=True)
class Kind:
    """What may stand after an option."""

    parse: Callable[[str], Any]
    """Raises ArgumentTypeError."""
    metavar: str
    check: Callable[[str, Any], None] | None = None
    """Raises SetupError: what was written can be, but not on this machine. Given the option's name, too."""


def _no(text: str, wanted: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} is not {wanted}")


def _at_least(low: int, *, or_auto: bool = False) -> Callable[[str], int | str]:
    def parse(text: str) -> int | str:
        if or_auto and text == "auto":
            return text
        if not text.isascii() or not text.isdigit() or int(text) < low:
            raise _no(text, f"a whole number of at least {low}" + " (or auto)" * or_auto)
        return int(text)

    return parse


def _between(most: float, wanted: str, *, above: bool = False, below: bool = False) -> Callable[[str], float]:
    """`above`: not 0; `below`: not `most`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 <= (value := float(text)) <= most and not (
                (above and not value) or (below and value == most)
            ):
                return value
        raise _no(text, wanted)

    return parse


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise _no(text, "a port: 1 to 65535, or 0 for any free one")
    return int(text)


def _listen(text: str) -> tuple[str, int]:
    """`8080`, `:8080`, `0.0.0.0:8080`, `[::1]:8080` -> (host, port)."""
    host, _, port = text.rpartition(":")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host.strip("[]") or "127.0.0.1")), _port(port)
    raise _no(text, "a place to listen at: 8080, :8080 or 0.0.0.0:8080")


def _codec(text: str) -> str:
    if parse_codec(text) is None:
        raise _no(text, f"a codec: {KNOWN}, such as topk:0.05")
    return text


def _gibibytes(text: str) -> int:
    wanted = "GiB of a file: above 0, up to 1000000"
    size_bytes = int(_between(1e6, wanted)(text) * 2**30)
    if not size_bytes:
        raise _no(text, wanted)
    return size_bytes


def _with_unit(text: str, units: dict[str, float], low: float, high: float, wanted: str) -> float:
    for unit, size in units.items():
        with contextlib.suppress(ValueError):
            if text.endswith(unit) and low <= (value := float(text.removesuffix(unit)) * size) <= high:
                return value
    raise _no(text, wanted)


def _rate(text: str) -> float:
    """`20Mbit` -> bits a second."""
    wanted = "a rate of at least 256kbit a second, such as 800kbit, 20Mbit or 1Gbit"
    return _with_unit(text, {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}, MIN_UPLOAD_BPS, 1e12, wanted)


def _memory(text: str) -> int:
    """`6GiB` -> bytes."""
    wanted = "a size of memory: 800MiB or 6GiB"
    return int(_with_unit(text, {"MiB": 2.0**20, "GiB": 2.0**30}, 2.0**20, 2.0**50, wanted))


def _run_id(text: str) -> str:
    if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
        raise _no(text, "a run id (32 hex digits); the bootstrap prints it in the line to join with")
    return text


def _is_peer_address(flag: str, text: str) -> None:
    """With the peer's id: an address alone could be anybody's, and p2pd dials none."""
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


def _is_there(flag: str, path: Path) -> None:
    if not path.exists() and ":" not in path.name:  # package.module:function
        raise SetupError(f"{flag} {path} cannot be read: there is no such file")


def _has_driver(flag: str, device: str) -> None:
    """CUDA cannot be where its driver is not; torch, which takes seconds to import, need not be asked."""
    if not any(name.strip().partition(":")[0] == "cuda" for name in device.split(",")):
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


WORD = Kind(str, "NAME")
TEXT = Kind(str, "PROMPT")
FILE = Kind(Path, "FILE")
NEEDED_FILE = Kind(Path, "FILE", _is_there)
DIR = Kind(Path, "DIR")
PNG = Kind(Path, "PNG")
SOCKET = Kind(Path, "SOCKET")
MODEL = Kind(str, "MODEL")
IP = Kind(str, "IP")
PORT = Kind(_port, "N")
ADDRESS = Kind(str, "ADDR")
PEER_ADDRESS = Kind(str, "ADDR", _is_peer_address)
LISTEN = Kind(_listen, "[IP:]PORT")
RUN_ID = Kind(_run_id, "ID")
COUNT = Kind(_at_least(1), "N")
NUMBER = Kind(_at_least(0), "N")
PID = Kind(int, "PID")
STAGE = Kind(_at_least(0, or_auto=True), "auto|N")
COUNT_OR_AUTO = Kind(_at_least(1, or_auto=True), "auto|N")
CODEC = Kind(_codec, "NAME")
SECONDS = Kind(_between(86_400, "a number of seconds, 0 to 86400"), "S")
HOURS = Kind(_between(10_000, "a number of hours: above 0, up to 10000", above=True), "H")
TEMPERATURE = Kind(_between(100, "a temperature: 0 to 100"), "X")
SPEED = Kind(_between(1e6, "a speed: above 0, up to 1000000", above=True), "X")
PART = Kind(_between(1, "a part of all numbers: above 0, below 1, such as 0.01", above=True, below=True), "R")
GIBIBYTES = Kind(_gibibytes, "GIB")
RATE = Kind(_rate, "RATE")
MEMORY = Kind(_memory, "SIZE")
DEVICE = Kind(str, "auto|cpu|cuda[:N]", _has_driver)
DEVICES = Kind(str, "auto|cpu|cuda[:N]|all", _has_driver)


# --- how a field says what its argument is ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Of a field: what argparse is told."""

    kind: Kind | None
    """None: it takes no value."""
    help: str
    group: str
    one_of: str
    """Of those of one class with the same word here at most one can be given; exactly one with a `!`."""
    flag: str
    """Where it is not the field's name; `-`: it has none, and is told by its position."""
    more: dict[str, Any]
    """For argparse."""


def option(
    kind: Kind | None,
    help: str,
    default: Any = MISSING,
    *,
    group: str = "",
    one_of: str = "",
    flag: str = "",
    **more: Any,
) -> Any:
    """A field that is an argument; without a default it is required."""
    made = Option(kind=kind, help=help, group=group, one_of=one_of, flag=flag, more=more)
    return field(default=default, metadata={"option": made})


def optional(kind: Kind, help: str, **more: Any) -> Any:
    """One that is None unless it is given."""
    return option(kind, help, None, **more)


def switch(help: str, **more: Any) -> Any:
    """One that is off unless it is given."""
    return option(None, help, False, action="store_true", **more)


def repeated(kind: Kind, help: str, default: Any = (), **more: Any) -> Any:
    """A tuple: the option can be given several times."""
    return option(kind, help, default, action="append", **more)


def several(kind: Kind, help: str, **more: Any) -> Any:
    """A tuple: the option takes several values."""
    return option(kind, help, (), nargs="+", **more)


Listen: TypeAlias = tuple[str, int]
Reach: TypeAlias = Literal["auto", "public", "relay"]
"""What a user says of a peer: find out; others can dial it; they cannot."""
_RUN_HELP, _JOIN_HELP = "run id, 32 hex digits", "a bootstrap or any peer of it; repeatable"
_JSON_HELP = "print one JSON object instead of lines"
_DATA_HELP = "text files, in the order that the manifest pins (default: Python's documentation)"
_TOKENIZER_HELP = "tokenizer.json, if the run has one"
_TERMS_HELP = "the terms of the run (TOML)"


# --- what several commands have ---


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Of a role: what its process does besides. Not for the role itself."""

    log_format: str = option(None, "events as words or as JSON lines", "text", choices=("text", "json"))
    metrics: Listen | None = optional(LISTEN, "numbers for Prometheus at /metrics (default IP: 127.0.0.1)")
    health: Path | None = optional(SOCKET, "answer `swarm health SOCKET`, on a unix socket made there")
    die_with_parent: int | None = optional(PID, argparse.SUPPRESS)


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Which run, and where it is met."""

    run: str = option(RUN_ID, _RUN_HELP, group=RUN)
    join: tuple[str, ...] = repeated(PEER_ADDRESS, _JOIN_HELP, MISSING, group=RUN)


@dataclass(frozen=True, kw_only=True)
class MaybeMembership:
    """The same, of commands that can do without."""

    run: str | None = optional(RUN_ID, _RUN_HELP, group=RUN)
    join: tuple[str, ...] = repeated(PEER_ADDRESS, _JOIN_HELP, group=RUN)


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where a program's p2pd listens."""

    host: str = option(
        IP, "listen here; 0.0.0.0 = for other machines (default: %(default)s)", "127.0.0.1", group=NETWORK
    )
    port: int = option(PORT, "default: any free port", 0, group=NETWORK)
    announce: tuple[str, ...] = repeated(
        ADDRESS, "tell others this address (behind a router), HOST:PORT; repeatable", group=NETWORK
    )


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(ListenOptions):
    """How a role is reached."""

    reach: Reach = option(
        None,
        "can others dial this machine? auto = ask those to join at; relay = no (default: auto)",
        "auto",
        group=NETWORK,
        choices=("auto", "public", "relay"),
    )
    no_relay: bool = switch("carry no traffic of peers that cannot be dialled", group=NETWORK)
    identity: Path | None = optional(FILE, "key file, made if missing (default: a new key)", group=NETWORK)


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    """Which weights: one of `model` and `checkpoint_dir`."""

    model: Path | None = optional(FILE, "a file that swarm export made", group=WEIGHTS, one_of="weights!")
    checkpoint_dir: Path | None = optional(
        DIR, "or a folder with the checkpoints of all stages", group=WEIGHTS, one_of="weights!"
    )
    run: str | None = optional(RUN_ID, "which run (default: the only one there)", group=WEIGHTS)
    step: int | None = optional(
        NUMBER, "which step (default: the newest that all stages have)", group=WEIGHTS
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(WeightsOptions):
    """Weights that are computed with."""

    tokenizer: Path | None = optional(FILE, _TOKENIZER_HELP, group=WEIGHTS)
    device: str = option(DEVICE, "default: %(default)s", "cpu", group=WEIGHTS)


# --- the roles ---


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions(NetworkOptions):
    """The entry point of a run."""

    manifest: Path = option(FILE, "the terms of the run (TOML): swarm manifest prints an example")
    """`-` reads it from standard input."""
    data: tuple[Path, ...] = several(NEEDED_FILE, _DATA_HELP)
    tokenizer: Path | None = optional(NEEDED_FILE, _TOKENIZER_HELP)
    join: tuple[str, ...] = repeated(PEER_ADDRESS, "another bootstrap of the same network; repeatable")
    join_file: Path | None = optional(
        FILE, "also write there what to join with, for others who read it: swarm peer @FILE"
    )


@dataclass(frozen=True, kw_only=True)
class PeerOptions(Membership, NetworkOptions):
    """One device that serves one stage."""

    stage: Literal["auto"] | int = option(STAGE, "default: the stage with the fewest peers", "auto")
    device: str = option(
        DEVICES, "default: CUDA if there is, else CPU; all, or cuda:0,cuda:2: a peer for each", "auto"
    )
    recompute: bool = switch("keep only stage inputs and run forwards twice: less memory")
    threads: int | None = optional(COUNT, "cores to compute on, each a microbatch (default: all)")
    max_inflight: Literal["auto"] | int = option(
        COUNT_OR_AUTO, "microbatches admitted at once (default: by measured memory)", "auto"
    )
    checkpoint_dir: Path | None = optional(DIR, "save checkpoints here, and resume from here")
    keep: int = option(COUNT, "checkpoints to keep (default: %(default)s)", 2)
    leave_within: float = option(
        SECONDS, "seconds to finish and hand over in on Ctrl-C (default: %(default)s)", 25.0
    )
    pause_within: float = option(SECONDS, "the same when you pause it (default: %(default)s)", 5.0)
    pause_when_busy: bool = switch("pause while other programs want the GPU (needs nvidia-ml-py)")
    max_vram: int | None = optional(
        MEMORY, "use no more of the device's memory than this, such as 6GiB (default: what is free)"
    )
    """Bytes."""
    max_upload: float | None = optional(
        RATE, "send no more than this, such as 20Mbit a second (default: no limit)"
    )
    """Bits a second."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Membership, NetworkOptions):
    """One source of microbatches."""

    data: tuple[Path, ...] = several(NEEDED_FILE, _DATA_HELP)
    tokenizer: Path | None = optional(NEEDED_FILE, _TOKENIZER_HELP)
    window: Literal["auto"] | int = option(
        COUNT_OR_AUTO, "microbatches in flight (default: as many as raise throughput)", "auto"
    )
    steps: int | None = optional(
        COUNT, "stop when the run, not this trainer, has taken so many steps (default: all of the run's)"
    )


@dataclass(frozen=True, kw_only=True)
class KeeperOptions(Membership, NetworkOptions):
    """One disk that keeps a run's checkpoints."""

    dir: Path = option(DIR, "keep them here; also what swarm export reads")
    keep: int = option(
        COUNT, "versions of each stage (default: %(default)s); the newest that all have always stays", 2
    )
    stages: tuple[Stage, ...] = several(NUMBER, "keep these only (default: all)")


# --- other commands ---


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """Which manifest to check."""

    manifest: Path | None = optional(
        FILE, "check this one: print its canonical text; without FILE, print an example to edit", flag="-"
    )


@dataclass(frozen=True, kw_only=True)
class OwnerOptions:
    """Which peers of this machine; all that are given must fit."""

    identity: Path | None = optional(FILE, "the one that was started with this key", group=MINE)
    pid: int | None = optional(COUNT, "the one of this process", group=MINE)
    device: str | None = optional(WORD, "those on this device, such as cuda:1", group=MINE)


@dataclass(frozen=True, kw_only=True)
class HealthOptions:
    """Whom to ask."""

    socket: Path = option(SOCKET, "what it was given as --health", flag="-")
    json: bool = switch("print one JSON object instead of a line")


@dataclass(frozen=True, kw_only=True)
class StatusOptions(Membership, ListenOptions):
    """Which run to look at, and how."""

    json: bool = switch("print one JSON object instead of the table")
    no_calls: bool = switch("directory records only: do not ask the peers themselves")


@dataclass(frozen=True, kw_only=True)
class DashboardOptions(MaybeMembership, ListenOptions):
    """What to look at, and where to show it."""

    web: Listen | None = optional(
        Kind(_listen, "[IP]:PORT"),
        "a web page, and /api/health (default IP: 127.0.0.1, for this machine only)",
        group=FACES,
    )
    metrics: Listen | None = optional(
        LISTEN, "numbers for Prometheus at /metrics (default IP: 127.0.0.1)", group=FACES
    )
    record: Path | None = optional(FILE, "append all that is seen to a file", group=HISTORY)
    record_max_bytes: int = option(
        GIBIBYTES,
        "of that file; a full one becomes FILE.1, in the place of an older one (default: 1)",
        HISTORY_BYTES,
        group=HISTORY,
        flag="--record-max",
    )
    replay: Path | None = optional(FILE, "show such a file instead of a run", group=HISTORY)
    speed: float = option(SPEED, "of a replay: times as fast (default: 1)", 1.0, group=HISTORY)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What the machine is going to do."""

    device: str = option(Kind(str, "auto|cpu|cuda[:N]"), "the device you will use", "auto")
    host: str = option(IP, "address to listen on (default: %(default)s)", "127.0.0.1")
    port: int = option(PORT, "port to listen on (default: any)", 0)
    join: tuple[str, ...] = repeated(
        PEER_ADDRESS, "a peer of the run that tries to dial this machine; several tell more of its router"
    )
    json: bool = switch(_JSON_HELP)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """None: as the manifest or the default demo has it."""

    stages: int | None = optional(COUNT, "stages of the model (default: 3)")
    peers: int = option(COUNT, "peers of each stage (default: %(default)s)", 2)
    steps: int | None = optional(COUNT, "optimizer steps")
    preempt: int = option(NUMBER, "peers to kill on the way (default: %(default)s)", 1)
    codec: str | None = optional(
        CODEC,
        "how activations and gradients travel: none, bf16, blockwise8 (default), or the largest of them "
        "only: topk:0.1, topk:0.1+blockwise8",
    )
    data: tuple[Path, ...] = repeated(
        NEEDED_FILE, "text to train on; repeatable (default: the prose in Python's own documentation)"
    )
    manifest: Path | None = optional(FILE, "train this run instead of the built-in one")
    seed: int | None = optional(NUMBER, "of weights, data and kills")
    yes: bool = switch("start as many processes as that takes, however few cores there are")
    json: bool = switch("print a JSON object as the last line of stdout")
    verify: bool = switch("train the same in one process too, and compare every loss and weight")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(WeightsOptions):
    """Which weights, and where to: one of `out` and `hf`."""

    model: Path | None = optional(FILE, "a file of --out, for --hf", group=WEIGHTS, one_of="weights!")
    checkpoint_dir: Path | None = optional(
        DIR, "with the checkpoints of all stages, such as a keeper's --dir", group=WEIGHTS, one_of="weights!"
    )
    join: tuple[str, ...] = repeated(
        PEER_ADDRESS,
        "a peer of the run: fetch the newest version that its peers and keepers can give; needs --run",
        group=WEIGHTS,
        one_of="weights!",
    )
    out: Path | None = optional(
        FILE, "a .safetensors file; what it is will stand in a .json beside it", one_of="target!"
    )
    """Of checkpoints only."""
    hf: Path | None = optional(
        DIR,
        "a new folder for transformers' from_pretrained; for runs of a model of transformers",
        one_of="target!",
    )
    tokenizer: Path | None = optional(FILE, "its JSON, to go into the folder of --hf")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """What to continue, and with which weights."""

    prompt: str = option(TEXT, "what to continue (default: %(default)r)", "The ", flag="-")
    tokens: int = option(COUNT, "how many to write (default: %(default)s)", 200)
    temperature: float = option(TEMPERATURE, "0 = always the likeliest (default: 0.8)", 0.8)
    seed: int = option(NUMBER, "default: %(default)s", 0)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(ModelOptions):
    """Which weights, and on which text."""

    data: tuple[Path, ...] = several(NEEDED_FILE, "any text files (default: the text of the training)")
    """Where code makes the samples: one `package.module:function` that makes others."""
    samples: int = option(COUNT, "how many, spread evenly over the text (default: %(default)s)", 64)
    threads: int | None = optional(COUNT, "cores to compute on (default: all)")
    json: bool = switch(_JSON_HELP)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(MaybeMembership, ListenOptions):
    """For whom to plan, and how long to search: a described run, or one as it is."""

    manifest: Path | None = optional(FILE, _TERMS_HELP)
    devices: Path | None = optional(FILE, "the machines and what lies between them (TOML)")
    seed: int = option(NUMBER, "default: %(default)s", 0)
    budget: float = option(SECONDS, "CPU seconds to search for (default: %(default)s)", 5.0)
    keep: float | None = optional(
        PART, "also say which codecs slow boundaries should have: a top-k, with at least this part"
    )
    json: bool = switch(_JSON_HELP)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What to simulate, and what to show."""

    manifest: Path = option(FILE, _TERMS_HELP)
    devices: Path = option(FILE, "the machines and their lines (TOML)")
    """`swarm.plan.network.EXAMPLE` shows one."""
    trace: Path | None = optional(
        FILE,
        "how many of them are up when: lines of `seconds,count`, or JSON with metadata.gap_seconds and "
        "data (default: all, for ever)",
    )
    hours: float = option(HOURS, "of virtual time (default: %(default)s)", 1.0)
    """A trace that is shorter ends it."""
    seed: int = option(NUMBER, "of all chance (default: %(default)s)", 0)
    plot: Path | None = optional(PNG, "draw it, too; needs matplotlib")
    json: bool = switch(_JSON_HELP)


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Which model, and what to show of it."""

    model: str = option(
        MODEL,
        "package.module:function of an installed package, hf:CONFIG.json of transformers, or a manifest "
        "(.toml); a function gives (module, inputs), or (module, inputs, loss, targets)",
    )
    stages: int = option(Kind(_at_least(1), "S"), "default: %(default)s", 1)
    rows: int = option(COUNT, "samples, for hf: (default: %(default)s)", 2)
    length: int = option(Kind(_at_least(1), "T"), "tokens, for hf: (default: %(default)s)", 128)
    calibrate: bool = switch(
        "time this machine (some 20 s): costs are seconds, and the slowest stage is as fast as can be"
    )
    png: Path | None = optional(FILE, "draw it; needs matplotlib")
    dot: bool = switch("print it for Graphviz", one_of="shown")
    json: bool = switch(_JSON_HELP, one_of="shown")


# --- from the classes to a parser and back ---


def add_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """The arguments of the fields of a class above."""
    fields: dict[str, Any] = cls.__dataclass_fields__
    told = [(name, one, one.metadata["option"]) for name, one in fields.items()]
    groups: dict[str, Any] = {"": parser}
    groups.update(
        (name, parser.add_argument_group(name)) for name in GROUPS if any(o.group == name for _, _, o in told)
    )
    one_of: dict[str, Any] = {}
    for name, one, made in told:
        where = groups[made.group]
        if made.one_of:
            if made.one_of not in one_of:
                required = made.one_of.endswith("!")
                one_of[made.one_of] = where.add_mutually_exclusive_group(required=required)
            where = one_of[made.one_of]
        words = dict(made.more, help=made.help)
        listed = words.get("action") == "append" or "nargs" in words
        if made.kind is not None:
            words.update(type=made.kind.parse, metavar=made.kind.metavar)
        if one.default is not MISSING or listed:
            words["default"] = [] if listed else one.default
        if made.flag == "-":
            where.add_argument(name, **words, **({} if one.default is MISSING else {"nargs": "?"}))
            continue
        if one.default is MISSING:
            words["required"] = True
        where.add_argument(made.flag or "--" + name.replace("_", "-"), dest=name, **words)


def options_from(cls: Callable[..., Any], args: argparse.Namespace) -> Any:
    """The options of a class above from what was parsed; repeated ones become tuples.

    Raises:
        SetupError: this machine does not have what an option names.
    """
    given: dict[str, Any] = {}
    for name, one in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        value = getattr(args, name)
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        kind: Kind | None = one.metadata["option"].kind
        if kind is not None and kind.check is not None:
            for each in values:
                if each is not None:
                    kind.check("--" + name.replace("_", "-"), each)
        given[name] = tuple(values) if isinstance(value, list) else value
    return cls(**given)
