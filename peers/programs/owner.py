"""`swarm pause`, `swarm resume` and `swarm health`: questions to the programs of this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import msgspec

from peers.owner.control_socket import DONE_S, MAX_BYTES, QUESTION_S, Do, PeerAnswer, control_folder
from peers.owner.health_socket import Health
from peers.programs.tool_options import HealthOptions, PauseOptions, ResumeOptions
from peers.storage.atomic_file import as_setup_error
from peers.waiting import within
from swarm.errors import MALFORMED, SetupError

T = TypeVar("T")


async def ask(path: Path, named: str, answer: type[T], do: Do = "look", *, limit_s: float) -> T:
    """What the program at `path` answers; `named` is that program in errors.

    Raises:
        SetupError: it does not answer in time, or not what a program of ours says.
        OSError: no program is there any more.
    """

    async def call() -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_BYTES)
        try:
            writer.write(msgspec.json.encode(do) + b"\n")
            return await reader.readline()
        finally:
            writer.close()

    try:
        return msgspec.json.decode(await within(call(), limit_s), type=answer)
    except asyncio.TimeoutError:
        raise SetupError(f"{named} does not answer within {limit_s:g} s: it hangs") from None
    except MALFORMED as error:
        raise SetupError(f"{named} is not of this version of swarm: ask it by its own ({error})") from None


# --- pause and resume ---


async def run_command(options: PauseOptions | ResumeOptions, *, question_s: float = QUESTION_S) -> None:
    """Pause or resume all peers that are meant, at once, and print what each says.

    Raises:
        SetupError: there is none, or one does not answer.
    """

    def ask_peer(path: Path, do: Do, limit_s: float) -> Awaitable[PeerAnswer]:
        return ask(path, f"the peer with pid {path.stem}", PeerAnswer, do, limit_s=limit_s)

    do: Do = "pause" if isinstance(options, PauseOptions) else "resume"
    found: dict[Path, PeerAnswer] = {}
    trouble: list[str] = []  # one that hangs must not keep the others from what their owner wants
    for path in sorted(control_folder().glob("*.sock")):
        if options.pid is not None and path.stem != str(options.pid):
            continue
        try:
            found[path] = await ask_peer(path, "look", question_s)
        except (ConnectionRefusedError, FileNotFoundError):
            if not Path("/proc", path.stem).exists():  # it was killed; one that starts listens in a moment
                path.unlink(missing_ok=True)
        except OSError as error:
            trouble.append(f"the peer with pid {path.stem} cannot be asked: {error.strerror or error}")
        except SetupError as error:
            trouble.append(error.text)
    key, device = options.identity and str(options.identity.absolute()), options.device
    meant = [p for p, said in found.items() if key in (None, said.identity) and device in (None, said.device)]
    if not meant and not trouble:
        none = "none runs" if options.pid is None else f"none has pid {options.pid}"
        there = "; ".join(said.line() for said in found.values())
        raise SetupError(f"no peer of yours here is meant by that: {f'there is {there}' if there else none}")
    answers = await asyncio.gather(
        *(ask_peer(path, do, DONE_S + question_s) for path in meant), return_exceptions=True
    )
    for path, answer in zip(meant, answers, strict=True):
        if isinstance(answer, PeerAnswer):
            print(answer.line(), flush=True)
        elif isinstance(answer, SetupError):
            trouble.append(answer.text)
        elif isinstance(answer, OSError):
            trouble.append(f"the peer with pid {path.stem} ended meanwhile")
        else:
            raise answer
    if trouble:
        raise SetupError("; ".join(trouble))


# --- health ---


async def ask_health(path: Path, *, limit_s: float = QUESTION_S) -> Health:
    """What the program that answers at `path` says.

    Raises:
        SetupError: none answers there, or not in time, or not what a program of ours says.
    """
    with as_setup_error(f"no program answers at {path}"):
        return await ask(path, f"the program at {path}", Health, limit_s=limit_s)


async def run_health(options: HealthOptions) -> bool:
    """Ask, print, and say whether it is well; that none answers is ill, too: Docker takes 1 for that."""
    try:
        health = await ask_health(options.socket)
    except SetupError as error:
        print(f"swarm health: {error.text}", file=sys.stderr)
        return False
    if options.json:
        print(msgspec.json.encode({"well": not health.ill, **msgspec.to_builtins(health)}).decode())
    else:
        print(health.words())
    return not health.ill
