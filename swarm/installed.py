"""Code that a manifest names, `package.module:function`: it is installed here by this machine's user, never
fetched.

A manifest may be a stranger's. Python's own modules (`os:abort`) are not for it; whatever else is
installed is trusted by whoever installed it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from swarm.errors import SetupError


def call(spec: str, what: str) -> Any:
    """What the function returns, called without arguments. `what` it makes, for messages.

    Raises:
        SetupError: there is no such function here, or it fails.
    """
    module, name = import_module(spec, what), spec.partition(":")[2]
    function = getattr(module, name, None)
    if function is None:
        raise SetupError(f"{module.__name__} has no {name}: check the name after the colon of {spec}")
    if not inspect.isfunction(function):
        raise SetupError(f"{spec} is a {type(function).__name__}: it must be a function without arguments")
    try:
        return function()
    except Exception as error:
        raise SetupError(f"the {what} {spec} fails: {first_line(error)}") from error


def import_module(spec: str, what: str) -> ModuleType:
    """The module of the function.

    Raises:
        SetupError: there is no such module here, or it fails.
    """
    place, _, name = spec.partition(":")
    if not place or not name:
        raise SetupError(f"a {what} is given as package.module:function, not {spec!r}")
    if place.partition(".")[0] in sys.stdlib_module_names:
        raise SetupError(
            f"the {what} {spec} is Python's own and makes none: name a package that is installed"
        )
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise SetupError(
            f"the {what} {spec} cannot be imported here: {first_line(error)}; install its package"
        ) from error


def version_of(module: ModuleType) -> str:
    """`name version` of the distribution that installed the source of `module`; `sha256 …` of the source if
    none did: it lies in a folder of its user's own, or is installed to be edited."""
    file = Path(module.__file__ or "").resolve()
    for name in sorted(set(metadata.packages_distributions().get(module.__name__.partition(".")[0], ()))):
        distribution = metadata.distribution(name)
        for known in distribution.files or ():
            if known.name == file.name and Path(str(distribution.locate_file(known))).resolve() == file:
                return f"{name} {distribution.version}"
    return f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}"


def first_line(error: Exception) -> str:
    """What an error says, for a sentence of ours."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
