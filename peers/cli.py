"""The `swarm` command: arguments -> options -> a role, and errors -> one clear line and an exit code.

The only module that knows all roles. A role is imported when its subcommand runs, so that `swarm --help`
does not wait for torch. What each can be told is a dataclass of `peers.options`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import importlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from peers import options
from peers.options import add_options, options_from
from swarm.errors import DeviceHangs, NotNow, PeerFault, Refused, SetupError, SwarmError, printable

if TYPE_CHECKING:
    from peers.events import Emit


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

OPTIONS: dict[str, type] = {
    "manifest": options.ManifestOptions,
    "bootstrap": options.BootstrapOptions,
    "peer": options.PeerOptions,
    "train": options.TrainOptions,
    "keeper": options.KeeperOptions,
    "pause": options.OwnerOptions,
    "resume": options.OwnerOptions,
    "health": options.HealthOptions,
    "status": options.StatusOptions,
    "dashboard": options.DashboardOptions,
    "check": options.CheckOptions,
    "demo": options.DemoOptions,
    "export": options.ExportOptions,
    "generate": options.GenerateOptions,
    "eval": options.EvalOptions,
    "plan": options.PlanOptions,
    "simulate": options.SimulateOptions,
    "graph": options.GraphOptions,
}

ROLES = {
    "bootstrap": ("peers.programs.roles", "Bootstrap"),
    "peer": ("peers.programs.roles", "Peer"),
    "train": ("peers.programs.roles", "Train"),
    "keeper": ("peers.programs.keeper", "Keeper"),
}
"""Subcommand -> module and class."""

USAGE = {"manifest": "[FILE] [options]", "health": "SOCKET [options]", "generate": "[options] [PROMPT]"}
"""Of those that are told something by its position."""

JOINS = frozenset({"peer", "train", "keeper", "status", "dashboard", "export"})
"""Those that take `@FILE`, which a bootstrap wrote with --join-file."""

ADDRESS = "/ip4/192.0.2.7/tcp/31337/p2p/12D3Koo..."


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)


class _Parser(argparse.ArgumentParser):
    """argparse with our exit code, and the fix in the message."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in args or ():
            if self.fromfile_prefix_chars and word.startswith("@") and not Path(word[1:]).is_file():
                self.error(
                    f"{word}: there is no file {word[1:]!r}; a bootstrap writes it with --join-file. Or type "
                    "--run and --join, as the bootstrap printed them"
                )
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}\nSee: {self.prog} --help", file=sys.stderr)
        raise SystemExit(Exit.USAGE)


EXAMPLES = {
    "manifest": ("swarm manifest > run.toml", "swarm manifest run.toml"),
    "bootstrap": (
        "swarm bootstrap --manifest run.toml --host 0.0.0.0 --port 31337 --announce 192.0.2.7:31337",
    ),
    "peer": (f"swarm peer --run 5a7c... --join {ADDRESS}",),
    "train": (f"swarm train --run 5a7c... --join {ADDRESS}",),
    "keeper": (f"swarm keeper --run 5a7c... --dir ckpt --join {ADDRESS}",),
    "pause": ("swarm pause", "swarm pause --identity peer.key"),
    "resume": ("swarm resume", "swarm resume --identity peer.key"),
    "health": ("swarm health peer.sock",),
    "status": (f"swarm status --run 5a7c... --join {ADDRESS}",),
    "dashboard": (
        f"swarm dashboard --run 5a7c... --join {ADDRESS}",
        f"swarm dashboard --run 5a7c... --join {ADDRESS} --web :8080",
        "swarm dashboard --replay history.jsonl --speed 10",
    ),
    "check": (
        "swarm check --port 31337 --device cuda",
        f"swarm check --host 0.0.0.0 --port 31337 --join {ADDRESS}",
    ),
    "demo": ("swarm demo --stages 3 --peers 2 --preempt 2 --verify",),
    "export": (
        "swarm export --checkpoint-dir ckpt --out model.safetensors",
        "swarm export --checkpoint-dir ckpt --hf folder",
        "swarm export @join.txt --out model.safetensors",
    ),
    "generate": (
        "swarm generate --model model.safetensors 'The import '",
        "swarm generate --checkpoint-dir ckpt --tokens 500 'The import '",
    ),
    "eval": (
        "swarm eval --model model.safetensors",
        "swarm eval --model model.safetensors --data held-out.txt --samples 500 --json",
    ),
    "plan": (
        "swarm plan --manifest run.toml --devices devices.toml --budget 10",
        f"swarm plan --run 5a7c... --join {ADDRESS}",
    ),
    "simulate": (
        "swarm simulate --manifest run.toml --devices devices.toml",
        "swarm simulate --manifest run.toml --devices devices.toml --trace spot.json --plot x.png",
    ),
    "graph": (
        "swarm graph --model my_package.models:build --stages 4",
        "swarm graph --model hf:config.json --stages 3 --png model.png",
    ),
}


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
    for name, words in COMMANDS:
        heading = "example:" if len(EXAMPLES[name]) == 1 else "examples:"
        one = commands.add_parser(
            name,
            fromfile_prefix_chars="@" if name in JOINS else None,
            prog=f"swarm {name}",
            description=words[0].upper() + words[1:] + ("" if words.endswith("?") else "."),
            formatter_class=_Help,
            usage=f"swarm {name} {USAGE.get(name, '[options]')}",
            epilog="\n  ".join((heading, *EXAMPLES[name])),
            allow_abbrev=False,
        )
        add_options(one, OPTIONS[name])
        if name in ROLES:
            add_options(one, options.ProcessOptions)
        one.add_argument(
            "--traceback", action="store_true", help="show where in the code an error comes from"
        )
    return parser


# --- from arguments to roles ---


def _role(args: argparse.Namespace, emit: Emit) -> Role:
    """Raises SetupError: this machine does not have what an option names."""
    given = options_from(OPTIONS[args.command], args)
    if args.command == "peer" and _is_several(args.device):
        from peers.programs.fleet import Fleet, FleetOptions

        if args.health is not None:
            raise SetupError("--health answers for one peer: with several devices start a program for each")
        own = {
            "--device", "--identity", "--port", "--announce", "--metrics", "--max-upload",
            "--die-with-parent",
        }  # fmt: skip
        return Fleet(
            FleetOptions(
                device=args.device, words=without(args.words[1:], own), identity=args.identity,
                port=args.port, announce=tuple(args.announce), metrics=args.metrics,
                max_upload=args.max_upload,
            ),
            emit=emit,
        )  # fmt: skip
    module, role = ROLES[args.command]
    return getattr(importlib.import_module(module), role)(given, emit=emit)


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


def _run_role(args: argparse.Namespace) -> int:
    from peers.events import Emitter, Note, StopNow, said_in_logs

    emit: Emit = Emitter(args.log_format)
    if args.command != "bootstrap":
        from peers.device import tune_malloc

        tune_malloc()  # before torch starts threads
    several = args.command == "peer" and _is_several(args.device)
    with contextlib.ExitStack() as stack:
        if args.metrics is not None and not several:
            from peers.watch.metrics import RoleMetrics, served

            emit = metrics = RoleMetrics(args.command, emit)
            place = stack.enter_context(served(args.metrics, metrics.registry))
            emit(Note(text=f"metrics at {place}"))
        stack.enter_context(said_in_logs(emit))
        if args.health is None:
            role = _role(args, emit)
            run = role.run
        else:
            from peers.owner.health_socket import Pulse, answering

            emit = pulse = Pulse(args.command, emit)
            role = _role(args, emit)

            async def run() -> int | None:
                async with answering(args.health, lambda: pulse.health, role.connected):
                    return await role.run()

        return _with_signals(
            run,
            role.leave,
            on_leave=lambda: emit(StopNow(role=args.command)),
            on_hang=lambda error: _say_hang(args, error),
        )


def _run_manifest(args: argparse.Namespace) -> int:
    from swarm.manifest import EXAMPLE, CustomModelSpec, load_run, parameter_count

    if args.manifest is None:
        print(EXAMPLE, end="")
        return Exit.OK
    run = load_run(args.manifest)
    print(run.to_toml(), end="")
    if isinstance(run.model, CustomModelSpec):
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


def _run_health(args: argparse.Namespace) -> int:
    from peers.owner.health_socket import run_health

    try:
        return Exit.OK if asyncio.run(run_health(options_from(options.HealthOptions, args))) else Exit.FAILED
    except SetupError as error:
        _say(args, error.text)
        return Exit.FAILED  # what Docker's HEALTHCHECK takes for ill


def _run_owner(args: argparse.Namespace) -> int:
    from peers.owner.control_socket import run_wish

    return _with_signals(lambda: run_wish(args.command, options_from(options.OwnerOptions, args)), None)


def _program(
    module: str, function: str, *, failed: Exit = Exit.FAILED
) -> Callable[[argparse.Namespace], int]:
    """A command that is a function of its options, perhaps a coroutine. `failed`: what False ends with."""

    def run(args: argparse.Namespace) -> int:
        given = options_from(OPTIONS[args.command], args)
        called = getattr(importlib.import_module(module), function)
        if not inspect.iscoroutinefunction(called):
            called(given)
            return Exit.OK

        async def coroutine() -> int | None:
            result = await called(given)
            return result if type(result) is int else failed if result is False else Exit.OK

        return _with_signals(coroutine, None)

    return run


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
        say_leaving: asyncio.Future[None] | None = None
        stopped = False

        def hang_up(done: asyncio.Future[None]) -> None:
            # A farewell that fails must not leave the process running for ever.
            if not done.cancelled() and done.exception() is not None:
                work.cancel()

        def stop() -> None:
            nonlocal say_leaving, stopped
            if leave is not None and say_leaving is None:
                on_leave()
                say_leaving = asyncio.ensure_future(leave())
                say_leaving.add_done_callback(hang_up)
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
            if not stopped and say_leaving is not None and say_leaving.done() and not say_leaving.cancelled():
                say_leaving.result()  # raises what went wrong
            if stopped and leave is not None:
                _end_now(Exit.STOPPED)
            return Exit.STOPPED
        except DeviceHangs as error:
            with contextlib.suppress(OSError):  # nobody reads it: the memory matters more
                on_hang(error)
            _end_now(exit_code(error))
        finally:
            if say_leaving is not None:
                say_leaving.cancel()
                await asyncio.gather(say_leaving, return_exceptions=True)
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
    **dict.fromkeys(ROLES, _run_role),
    "pause": _run_owner,
    "resume": _run_owner,
    "health": _run_health,
    "status": _program("peers.programs.status", "run_status"),
    "dashboard": _program("peers.watch.dashboard", "run_dashboard"),
    "check": _program("peers.programs.check", "run_check", failed=Exit.CHECK),
    "demo": _program("peers.programs.demo", "run_demo"),
    "export": _program("peers.programs.export", "run_export"),
    "generate": _program("peers.programs.generate", "run_generate"),
    "eval": _program("peers.programs.evaluate", "run_eval"),
    "plan": _program("peers.programs.plan", "run_plan"),
    "simulate": _program("peers.programs.simulate", "run_simulate"),
    "graph": _program("peers.programs.graph", "run_graph"),
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

        from swarm.wire.version import PROTOCOL_VERSION

        try:
            print(f"swarm {version('swarm')}, protocol {PROTOCOL_VERSION}")
        except PackageNotFoundError:
            print(f"swarm, run from its folder without being installed, protocol {PROTOCOL_VERSION}")
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


def _say_hang(args: argparse.Namespace, error: DeviceHangs) -> None:
    if args.traceback:
        traceback.print_exception(error)
    else:
        _say(args, error.text)


if __name__ == "__main__":
    sys.exit(main())
