"""The `swarm` command: arguments -> options -> a program, and errors -> one clear line and an exit code.

The only module that knows all programs. Each is imported when its command runs, so that `swarm --help` does
not wait for torch. Its options are a dataclass of `peers.options` or `peers.programs.tool_options`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import enum
import errno
import importlib
import inspect
import io
import itertools
import logging
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import swarm
from peers import options
from peers.options import ProcessOptions, add_options, description, from_environment, is_no_pipe, options_from
from peers.system import shortage
from peers.waiting import end_tasks
from swarm.errors import (
    DeviceHangs,
    NotNow,
    PeerFault,
    Refused,
    SetupError,
    SwarmError,
    Unreachable,
    did_you_mean,
    printable,
)

if TYPE_CHECKING:
    from peers.events import Emit


class Exit(enum.IntEnum):
    """What the shell gets."""

    OK = 0
    """Done, or left in good order."""
    FAILED = 1
    """A bug of ours, or an error without a class of its own; `swarm health`: not well."""
    USAGE = 2
    """Unknown argument, or a value that cannot be."""
    SETUP = 3
    """The user has to change something; the text says what."""
    NETWORK = 4
    """Others could not be reached, or refused us."""
    CHECK = 5
    """`swarm check` found something wrong, or `swarm demo` or `verify` what is not as it must be."""
    STOPPED = 130
    """Ctrl-C or SIGTERM before the work was done."""


DESCRIPTION = "Train one model on many unreliable machines, and lose nothing when they die.\n"

OWNERS = ("invite", "ban", "unban", "charter", "revoke", "audit")
"""What the owner of a run does besides; one line in the help."""
OTHERS = ("manifest", "health", "graph", "simulate", "completion")
"""Those that few need; one line, too."""
UNLISTED = (*OWNERS, *OTHERS)

NO_TMP = "no folder for temporary files can be written: make room in /tmp, or set TMPDIR to a folder of yours"

PROGRAMS: dict[str, str] = {
    "demo": "peers.programs.demo.run_demo",
    "init": "peers.programs.charter.run_init",
    "up": "peers.programs.demo.run_up",
    "check": "peers.programs.check.run_check",
    "tokenize": "peers.tokenize.make.run_tokenize",
    "manifest": "peers.programs.manifest.run_manifest",
    **{name: f"peers.programs.charter.run_{name}" for name in OWNERS},
    "unban": "peers.programs.charter.run_ban",
    "bootstrap": "peers.programs.roles.Bootstrap",
    "peer": "peers.programs.roles.Peer",
    "train": "peers.programs.roles.Train",
    "keeper": "peers.programs.roles.Keeper",
    "audit": "peers.programs.audit.Audit",
    "pause": "peers.programs.owner.run_command",
    "resume": "peers.programs.owner.run_command",
    "health": "peers.programs.owner.run_health",
    "status": "peers.programs.status.run_status",
    "dashboard": "peers.watch.dashboard.run_dashboard",
    **{name: f"peers.programs.trained.run_{name}" for name in ("export", "generate", "eval")},
    **{name: f"peers.programs.{name}.run_{name}" for name in ("verify", "plan", "simulate", "graph")},
    "completion": "peers.cli.print_completion",
}
"""In the order of `swarm --help`. A role is a class, constructed with its options without side effects, whose
`run` does everything; any other command is a function of them, perhaps a coroutine. False or an int is how
either ends."""
COMMANDS = tuple(PROGRAMS)
ROLES = ("bootstrap", "peer", "train", "keeper", "audit")


def options_of(command: str) -> type:
    """The dataclass of a command's options; those of tools are not imported for a role."""
    name = f"{command.capitalize()}Options"
    module = options if hasattr(options, name) else importlib.import_module("peers.programs.tool_options")
    return getattr(module, name)


def takes_join_file(command: str) -> bool:
    """Whether `@FILE` stands for the arguments that a bootstrap wrote with --join-file."""
    return {"run", "join"} <= {one.name for one in dataclasses.fields(options_of(command))}


_Help = partial(argparse.RawDescriptionHelpFormatter, max_help_position=26)


class _Parser(argparse.ArgumentParser):
    """argparse with our exit code, and the fix in the message."""

    def __init__(self, **terms: Any) -> None:
        super().__init__(formatter_class=_Help, allow_abbrev=False, **terms)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in itertools.takewhile(lambda word: word != "--", args or ()):
            flag = word.partition("=")[0]
            if self._subparsers is None and flag.startswith("--") and flag not in self._option_string_actions:
                self.error(f"unknown option {flag}{did_you_mean(flag, [*self._option_string_actions])}")
        found, others = super().parse_known_args(args, namespace)
        if others and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return found, others

    def _read_args_from_files(self, arg_strings: list[str]) -> list[str]:
        return [one for word in arg_strings for one in (_file(self, word) if word[:1] == "@" else [word])]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [*map(str, action.choices)]
            text = f"invalid choice: {value!r}{(near := did_you_mean(value, names))}"
            if not near or len(names) < 10:  # commands are many
                text += f"; choose from {', '.join(names)}"
            raise argparse.ArgumentError(action, text)

    def error(self, message: str) -> NoReturn:
        if "required: --run" in message or message.endswith("--join"):
            message += "; or @FILE, which a bootstrap wrote with --join-file"
        _tell(f"{self.prog}: {message}\nSee: {self.prog} --help")
        raise SystemExit(Exit.USAGE)

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file, flush=True)  # argparse's own hides that it is not read


def _file(parser: _Parser, word: str) -> list[str]:
    """The arguments in a file that a bootstrap wrote, a line each. It comes from a stranger: other options,
    such as code to run or a file to write, are the user's alone."""
    text, wrong = "", f"{word[1:]!r} is not what a bootstrap writes with --join-file"
    try:
        is_no_pipe("@FILE", path := options.path(word[1:] or "."))
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(1 << 16)  # hundreds of addresses
    except OSError as error:
        wrong = f"{word[1:]!r}, which a bootstrap writes with --join-file, cannot be read: {error.strerror}"
    words = [*filter(None, map(str.strip, text.splitlines()))]
    if {one for one in words if one[:1] == "-"} != {"--run", "--join"}:
        parser.error(f"{word}: {wrong}. Or type --run and --join, as the bootstrap printed them")
    return words


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The command line of these commands. Imports nothing heavy."""
    described = {name: description(options_of(name)) for name in commands}
    listed = [
        f"\n  {name:<11}{text[0].lower()}{text[1:-1]}"
        for name, (text, _, _) in described.items()
        if name not in UNLISTED
    ]
    if set(OWNERS) & set(described):
        listed.append(f"\n  for a run's owner: {', '.join(OWNERS)}\n  and: {', '.join(OTHERS)}")
    parser = _Parser(
        prog="swarm", description=DESCRIPTION + "".join(listed), usage=argparse.SUPPRESS, add_help=False,
        epilog="Start: swarm demo   Help: swarm COMMAND --help   Version: swarm --version",
    )  # fmt: skip
    # The last line tells of these two: the commands take all of a screen.
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="store_true", help=argparse.SUPPRESS)
    # The commands are listed in the description: argparse would break their lines.
    each = parser.add_subparsers(
        dest="command", metavar="COMMAND", help=argparse.SUPPRESS, parser_class=_Parser
    )
    for name, (text, usage, examples) in described.items():
        one = each.add_parser(
            name, prog=f"swarm {name}", help=text, description=text, usage=f"swarm {name} {usage}",
            epilog="\n  ".join(("examples:" if examples[1:] else "example:", *examples)),
            fromfile_prefix_chars="@" if takes_join_file(name) else None,
        )  # fmt: skip
        add_options(one, options_of(name))
        if name in ROLES:
            add_options(one, ProcessOptions)
        one.add_argument(
            "--traceback", action="store_true", help="show where in the code an error comes from"
        )
    return parser


def print_completion(given: Any) -> None:
    """`swarm completion`."""
    import shtab

    parser = build_parser()
    (each,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    each.help = ""  # what is suppressed is not completed
    for action in (action for one in each.choices.values() for action in one._actions):
        if action.metavar in ("FILE", "DIR", "SOCKET"):
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
    print(shtab.complete(parser, given.shell))


# --- from arguments to programs ---


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _role(args: argparse.Namespace, emit: Emit) -> Any:
    """Raises SetupError: this machine does not have what an option names."""
    given = options_from(options_of(args.command), args)
    if _is_several(args):
        from peers.programs.fleet import Fleet

        if args.health is not None:
            raise SetupError("--health answers for one peer: with several devices start a program for each")
        return Fleet(given, args.words[1:], args.metrics, emit=emit)
    return _imported(PROGRAMS[args.command])(given, emit=emit)


def _is_several(args: argparse.Namespace) -> bool:
    """Whether it is a peer for each of several devices."""
    return args.command == "peer" and (args.device == "all" or "," in args.device)


def _run_role(args: argparse.Namespace) -> int:
    from peers.events import Emitter, Note, StopNow, said_in_logs
    from peers.system import die_with_parent, tune_malloc

    if args.die_with_parent is not None:
        die_with_parent(args.die_with_parent)
    emit: Emit = Emitter(args.log_format)
    if args.command != "bootstrap":
        tune_malloc()  # before torch starts threads
    with contextlib.ExitStack() as stack:
        if args.metrics is not None and not _is_several(args):
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

        def ends_now(error: SwarmError) -> bool:
            """Report an error while threads work that no signal ends; then the process has to."""
            if not (isinstance(error, DeviceHangs) or role.preparing):
                return False
            with contextlib.suppress(OSError):  # no reader is left: the memory matters more
                _ = traceback.print_exception(error) if args.traceback else _say(args, error.text)
            return True

        return _with_signals(
            run, role.leave, on_leave=lambda: emit(StopNow(role=args.command)), ends_now=ends_now,
            preparing=lambda: role.preparing,
        )  # fmt: skip


def _run_tool(args: argparse.Namespace) -> int:
    given, called = options_from(options_of(args.command), args), _imported(PROGRAMS[args.command])

    def ended(result: object) -> int:
        failed = Exit.FAILED if args.command == "health" else Exit.CHECK
        return result if type(result) is int else failed if result is False else Exit.OK

    if not inspect.iscoroutinefunction(called):
        return ended(called(given))

    async def coroutine() -> int:
        return ended(await called(given))

    return _with_signals(coroutine, None)


SAME_S = 1.0
"""At a shutdown all get SIGTERM, a session SIGHUP too, and several peers SIGINT from what started them."""


def _with_signals(
    run: Callable[[], Coroutine[Any, Any, Any]], leave: Callable[[], Coroutine[Any, Any, None]] | None, *,
    on_leave: Callable[[], None] = lambda: None, ends_now: Callable[[SwarmError], bool] = lambda _: False,
    preparing: Callable[[], bool] = lambda: False,
) -> int:  # fmt: skip
    """Run to the end. First SIGINT or SIGTERM: `leave()`, or cancel without one. Second, or while it is
    `preparing`: cancel at once. One of another kind within `SAME_S` is no second one.

    An int that `run` returns is the exit code. Leaving in good order exits with 0. Where it was cancelled at
    once, and after an error of which `ends_now` says so, the process ends here.
    """

    async def main() -> int:
        work = asyncio.ensure_future(run())
        leaving: asyncio.Future[None] | None = None
        failure: BaseException | None = None
        stopped, asked = False, (0, -math.inf)

        def has_left(done: asyncio.Future[None]) -> None:
            nonlocal failure
            failure = None if done.cancelled() else done.exception()
            if failure is not None:
                work.cancel()  # else the process would run for ever

        def stop(signum: int) -> None:
            nonlocal leaving, stopped, asked
            now = asyncio.get_running_loop().time()
            if signum != asked[0] and now - asked[1] < SAME_S:
                return
            asked = signum, now
            if leave is not None and leaving is None and not preparing():
                on_leave()
                leaving = asyncio.ensure_future(leave())
                leaving.add_done_callback(has_left)
                return
            stopped = True
            work.cancel()

        with _signals_call(stop):
            try:
                result = await work
            except asyncio.CancelledError:
                if stopped and leave is not None:
                    _end_now(Exit.STOPPED)
                if failure is not None and not stopped:
                    raise failure from None
                return Exit.STOPPED
            except SwarmError as error:
                if ends_now(error):
                    _end_now(exit_code(error))
                raise
            finally:
                if leaving is not None:
                    await end_tasks([leaving])
        return int(result) if isinstance(result, int) else Exit.OK

    import uvloop

    return uvloop.run(main())


@contextlib.contextmanager
def _signals_call(stop: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, SIGINT, SIGTERM and SIGHUP call `stop` with their number; then they do nothing:
    torch takes a while to end a process that is done, and an impatient user must not make it fail.
    """
    loop, numbers = asyncio.get_running_loop(), [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup the terminal's end is not for us
        numbers.append(signal.SIGHUP)
    for signum in numbers:
        loop.add_signal_handler(signum, stop, signum)
    try:
        yield
    finally:
        for signum in numbers:
            loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_IGN)


def _end_now(code: Exit) -> NoReturn:
    """End the process, and wait for nothing: a loop's end waits for its threads, Python's for CUDA too, and
    CUDA for the device. One that hangs would keep the process, and its memory, for ever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def exit_code(error: BaseException) -> Exit:
    if isinstance(error, PeerFault | NotNow | Refused | Unreachable):
        return Exit.NETWORK
    return Exit.SETUP if isinstance(error, SetupError) else Exit.FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code (`Exit`)."""
    _open_output()
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    known = bool(words) and words[0] in COMMANDS
    args = argparse.Namespace(command=words[0] if known else "", traceback=False)
    try:
        parser = build_parser(words[:1] if known else COMMANDS)
        if known:
            words += from_environment(options_of(words[0]), words, os.environ)
        parser.parse_args(words, args)
        args.words = words
        if args.version or not args.command:
            print(_version() if args.version else parser.format_help().rstrip())
            code = Exit.OK if args.version else Exit.USAGE
        else:
            code = (_run_role if args.command in ROLES else _run_tool)(args)
        sys.stdout.flush()  # here a full disk can still be told
        return code
    except KeyboardInterrupt:
        return Exit.STOPPED
    except BrokenPipeError:
        _no_more_output(sys.stdout)
        return Exit.FAILED
    except Exception as error:
        if args.traceback:
            raise
        if isinstance(error, SwarmError):
            _say(args, error.text)
            return exit_code(error)
        full = {errno.ENOSPC: "the disk is full: make room", errno.EFBIG: "the output may not be that large"}
        if isinstance(error, FileNotFoundError) and not error.filename:
            full[errno.ENOENT] = NO_TMP if "temporary" in str(error) else "the folder that you are in is gone"
        text = shortage(error)
        if isinstance(error, OSError) and not text:
            text = full.get(error.errno or 0) or (error.filename and f"{error.filename}: {error.strerror}")
        if text:
            _say(args, text)
            _no_more_output(sys.stdout)  # where memory was lacking for a moment a peer may start again
            return Exit.SETUP if isinstance(error, OSError) and error.errno != errno.ENOMEM else Exit.FAILED
        _say(args, f"a bug in swarm: {type(error).__name__}: {error} (add --traceback to see where)")
        return Exit.FAILED


class _Printable(logging.Formatter):
    """What modules warn of: it may quote a server, or a stranger's index."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _open_output() -> None:
    """Have both streams take everything: closed ones, and characters that a terminal's encoding has not."""
    if logging.lastResort is not None:  # of programs whose logs are no events
        logging.lastResort.setFormatter(_Printable())
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # of a socket of such a number uvloop aborts
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            with contextlib.suppress(OSError):  # a pipe in the place of a file, which has no position
                stream.reconfigure(errors="replace")


def _no_more_output(stream: TextIO) -> None:
    """The reader ended, or the disk is full: keep Python from complaining again while it shuts down."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _version() -> str:
    """The versions that decide whether two programs can work together, and with equal results."""
    from importlib.metadata import PackageNotFoundError, version

    from swarm.wire.version import PROTOCOL_VERSION

    said = [f"swarm {swarm.__version__}", f"protocol {PROTOCOL_VERSION}"]
    for name in ("torch", "hivemind"):
        try:
            said.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            said.append(f"no {name}")
    return ", ".join((*said, f"Python {sys.version.partition(' ')[0]}"))


def _say(args: argparse.Namespace, text: str) -> None:
    """The one line about an error: on stderr for people, as an event where events are JSON."""
    if getattr(args, "log_format", "text") == "json":
        from peers.events import Emitter, Failed

        Emitter("json")(Failed(text=text))
    _tell(f"{f'swarm {args.command}'.strip()}: {printable(text)}")


def _tell(text: str) -> None:
    """On stderr, if that takes it: the exit code says it, too."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        _no_more_output(sys.stderr)
