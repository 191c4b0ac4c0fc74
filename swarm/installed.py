"""Code that a manifest names, `package.module:function`: installed by this machine's user, never fetched.

A manifest may be a stranger's, and most functions that are installed somewhere were not made to be called by
strangers. So it cannot name Python's own modules (`os:abort`), and of all else only what the user of this
machine allows (`--allow-code`): packages by name, and files that the run's owner handed over; and functions
that an installed package declares as models or data of swarms (entry points of the group `swarm.models`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from swarm.errors import SetupError, clean

ENTRY_POINTS = "swarm.models"
"""Group of entry points, each of which is a function that manifests may name."""

_handed: dict[str, str] = {}
"""Module -> its version, of those that `import_file` imported."""


def check_allowed(specs: Collection[str], allowed: Collection[str]) -> None:
    """`allowed`: packages, modules or functions.

    Raises:
        SetupError: one of the functions is in none of these.
    """
    for spec in specs:
        module = spec.partition(":")[0]
        if not any(spec == one or f"{module}.".startswith(f"{one}.") for one in allowed):
            raise SetupError(
                f"the manifest, which may be a stranger's, names code that is installed here: {spec}. If you "
                f"trust the run with it, add --allow-code {module.partition('.')[0]}"
            )


def is_file_name(allowed: str) -> bool:
    """Whether a word of `--allow-code` is a file or a folder, not a package."""
    return "/" in allowed or allowed.endswith(".py")


def import_file(path: Path, version: str = "") -> None:
    """Import a module from a file, or a package from its folder, under the file's own name.

    Args:
        version: as `source_digest` gives it, if it is known; another file is not run.

    Raises:
        SetupError: it is not there, is another, or fails.
    """
    source = path / "__init__.py" if path.is_dir() else path
    name = path.stem
    try:
        found = _digest(source)
    except OSError as error:
        raise SetupError(f"--allow-code {path} cannot be read: {error.strerror}") from None
    if version not in ("", found):
        raise SetupError(f"--allow-code {path} is not the file that the run's owner has: it has {found}")
    if name in sys.modules and _handed.get(name) != found:
        raise SetupError(f"--allow-code {path}: another module {name} is there already: rename the file")
    _handed[name] = found
    places = [str(path)] if path.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise SetupError(f"--allow-code {path} is no file of Python's")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise SetupError(f"--allow-code {path} cannot be imported: {first_line(error)}") from error


def call(spec: str, what: str) -> Any:
    """Call the function without arguments and return its result. `what`: the word for the result, for
    messages.

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
    """The module of the function. Raises SetupError: there is no such module here, or it fails."""
    place, _, name = spec.partition(":")
    if not place or not name or "/" in place or place.endswith(".py"):  # a file is no module
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


def source_digest(module: ModuleType) -> str:
    """`sha256 …` of the module's source: the same whether the file is installed, editable or copied.

    A distribution's name and version would differ between a program that is started in the package's own
    folder, and imports the file there, and one that imports the installed copy.
    """
    return _digest(Path(module.__file__ or ""))


def _digest(source: Path) -> str:
    return f"sha256 {hashlib.sha256(source.read_bytes()).hexdigest()}"


def first_line(error: Exception) -> str:
    """The first line of an error's text, to be quoted in a message: some list all that they know."""
    return clean(str(error).strip().partition("\n")[0]) or type(error).__name__
