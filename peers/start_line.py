"""The command `swarm` for a line to paste here: with its folder, where the shell does not find it."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from peers.options import flag_of

TRAINER_KEY = "trainer.key"
"""As `swarm init` calls it, in the folder of the owner's."""
TRAINED_ON = ("data", "tokenizer", "eval_data")
"""What a trainer is given as the bootstrap was, or `swarm init`."""


def program() -> str:
    """`swarm`, or `.venv/bin/swarm` in a clone."""
    here = Path(sys.executable).with_name("swarm")
    found = shutil.which("swarm")
    if not here.is_file() or (found is not None and here.samefile(found)):
        return "swarm"
    return shlex.quote(str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here))


def start_line(command: str, run: str, *addresses: str) -> str:
    """What starts another program of a run, which joins at any of these."""
    joined = [word for address in addresses for word in ("--join", address)]
    return f"{program()} {command} {shlex.join(['--run', run, *joined])}"


def allowing(code: Iterable[str]) -> str:
    """` --allow-code my_package`: what has a program of the owner's call the functions of a manifest."""
    packages = dict.fromkeys(spec.partition(":")[0].partition(".")[0] for spec in code)
    return "".join(f" --allow-code {package}" for package in packages)


def as_given(options: object, *names: str) -> str:
    """` --data a.txt b.txt`: those of a program's options that were given, for a line to paste."""
    words: list[str] = []
    for name in names:
        value = getattr(options, name)
        if value:
            words += [flag_of(name), *map(str, value if isinstance(value, tuple) else (value,))]
    return f" {shlex.join(words)}" if words else ""
