"""Imports point down only. The files are read, not run, so that imports inside functions count too.

scripts → peers/cli and other wiring
  → peers/{trainer,stage,...} | peers/{net,disk,device}
    → peers/ports
      → swarm/policy | swarm/plan | swarm/wire | swarm/model
        → swarm/{ids,errors,records,codecs,run,data}
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("swarm", "peers")
BASE = (
    *("swarm.ids", "swarm.errors", "swarm.records", "swarm.codecs", "swarm.run", "swarm.data"),
    "swarm.installed",
)

SHARED = ("swarm.wire", "peers.ports", "peers.events", "peers.waiting", "msgspec", "numpy")

MAY_IMPORT = {
    # folder or module: what it may import besides the standard library and itself
    **dict.fromkeys(BASE, (*BASE, "msgspec", "tomli", "numpy")),
    "swarm.policy": BASE,
    # What peers say of themselves when they are asked is a message.
    **dict.fromkeys(
        ("swarm.policy.claims", "swarm.policy.health", "swarm.policy.observer"),
        (*BASE, "swarm.policy", "swarm.wire.messages", "msgspec"),
    ),
    "swarm.plan": (*BASE, "numpy", "scipy", "networkx", "tomli"),
    "swarm.wire": (*BASE, "msgspec", "numpy", "torch", "bitsandbytes", "typing_extensions"),
    # What a stage computes includes the codec at its boundaries: an undo has to see the very bytes again.
    "swarm.model": (*BASE, "swarm.wire", "msgspec", "numpy", "torch", "bitsandbytes"),
    "swarm.model.cost": (*BASE, "swarm.model", "numpy", "scipy"),
    "swarm.sim": ("swarm", "numpy"),
    "peers.ports": (*BASE, "swarm.wire.buffers"),
    "peers.net": (
        *BASE,
        *SHARED,
        "swarm.policy.claims",
        "hivemind",
        "cryptography",
        "google.protobuf",
        "msgpack",
        "psutil",
        "uvloop",
    ),
    "peers.disk": (*BASE, *SHARED, "torch", "safetensors", "tokenizers"),
}
"""The longest name that fits a module holds; modules without one are bound by the other rules only."""

IMPURE = frozenset(
    {"asyncio", "logging", "multiprocessing", "random", "select", "shutil", "signal", "socket", "subprocess"}
    | {"tempfile", "threading", "time", "uuid"}
)
"""Parts of the standard library that `swarm` has no use for: clock, chance, sockets, processes, logs."""

WIRING = frozenset(
    ("peers.cli", "peers.check", "peers.status", "peers.demo", "peers.roles", "peers.keeper", "peers.node")
) | {"peers.watch.dashboard"}
"""Modules that put the loops and the world together, besides `scripts`."""

PROGRAMS = ("swarm.sim.__main__",)
"""In `swarm`, but run by hand: it says how many seconds it took."""

ROLES = ("peers.trainer", "peers.stage", "peers.keeping", "peers.bootstrap", "peers.monitor")


@dataclass(frozen=True)
class Import:
    """One imported name, as far as it is a module of ours, and where."""

    importer: str
    name: str
    line: int
    runtime: bool
    """False under `if TYPE_CHECKING:`."""
    top_level: bool
    """False inside a function."""

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name}"


def modules() -> dict[str, Path]:
    """Module name -> file, of both packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, source: str, known: frozenset[str]) -> Iterator[Import]:
    """All imports in a module's source; `from a import b` is `a.b` if that is a module, else `a`."""

    def walk(node: ast.AST, runtime: bool, top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(name, alias.name, child.lineno, runtime, top)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{name}:{child.lineno}: relative imports hide the layer"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield Import(
                        name, full if full in known else str(child.module), child.lineno, runtime, top
                    )
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, False, top)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, runtime, top and not inside)

    yield from walk(ast.parse(source), True, True)


MODULES = modules()
IMPORTS = [
    found
    for name, path in MODULES.items()
    for found in imports_of(name, path.read_text(encoding="utf-8"), frozenset(MODULES))
]


def inside(name: str, *packages: str) -> bool:
    """Whether a module is one of these or in one of these."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def of(*importers: str) -> list[Import]:
    """Imports made in these modules or folders."""
    return [found for found in IMPORTS if inside(found.importer, *importers)]


def said(wrong: list[Import]) -> str:
    """The broken rule, a line each."""
    return "\n".join(map(str, wrong))


def test_swarm_never_imports_peers() -> None:
    wrong = [found for found in of("swarm") if inside(found.name, "peers", "scripts", "tests")]
    assert not wrong, said(wrong)


def test_swarm_has_no_clock_no_chance_no_socket_no_process() -> None:
    wrong = [
        found
        for found in of("swarm")
        if found.name.split(".")[0] in IMPURE and found.importer not in PROGRAMS
    ]
    assert not wrong, said(wrong)


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_only_what_is_below_it(layer: str) -> None:
    def owner(module: str) -> str:
        return max((known for known in MAY_IMPORT if inside(module, known)), key=len, default="")

    wrong = [
        found
        for found in of(layer)
        if owner(found.importer) == layer
        and found.name.split(".")[0] not in sys.stdlib_module_names
        and not inside(found.name, layer, *MAY_IMPORT[layer])
    ]
    assert not wrong, said(wrong)


def test_only_peers_net_imports_hivemind() -> None:
    wrong = [
        found
        for found in IMPORTS
        if inside(found.name, "hivemind") and not inside(found.importer, "peers.net")
    ]
    assert not wrong, said(wrong)


def test_only_the_planner_imports_networkx() -> None:
    wrong = [
        found
        for found in IMPORTS
        if inside(found.name, "networkx") and not inside(found.importer, "swarm.plan")
    ]
    assert not wrong, said(wrong)


def test_the_loops_see_ports_and_not_the_network() -> None:
    wrong = [
        found
        for found in of("peers")
        if inside(found.name, "peers.net") and not inside(found.importer, "peers.net", *WIRING)
    ]
    assert not wrong, said(wrong)


def test_roles_never_import_one_another() -> None:
    wrong = [
        found
        for role in ROLES
        for found in of(role)
        if inside(found.name, *(other for other in ROLES if other != role))
    ]
    assert not wrong, said(wrong)


def test_nothing_imports_the_command_line() -> None:
    wrong = [
        found
        for found in of(*PACKAGES)
        if inside(found.name, "peers.cli") and found.importer not in ("peers.cli", "peers.__main__")
    ]
    assert not wrong, said(wrong)


def test_there_is_no_circle_of_imports() -> None:
    below: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in IMPORTS:
        if found.runtime and found.top_level and found.name in MODULES and found.name != found.importer:
            below[found.importer].add(found.name)
    left = dict(below)
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import one another: {sorted(left)}"


def test_nothing_is_unpickled() -> None:
    banned = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
    wrong = [found for found in IMPORTS if inside(found.name, *banned)]
    assert not wrong, said(wrong)
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "torch.load",
                "np.load",
                "numpy.load",
            ):
                raise AssertionError(f"{name}:{node.lineno} uses {ast.unparse(node)}, which may unpickle")


def test_every_folder_of_the_packages_is_a_package() -> None:
    bare = {path.parent for path in MODULES.values() if not (path.parent / "__init__.py").exists()}
    assert not bare, f"without __init__.py these drop out of the wheel: {sorted(map(str, bare))}"


def test_the_command_line_starts_without_torch() -> None:
    heavy = ("torch", "hivemind", "numpy", "rich", "msgspec", "peers.net", "peers.stage", "peers.trainer")
    wrong = [
        found for found in of("peers.cli") if found.runtime and found.top_level and inside(found.name, *heavy)
    ]
    assert not wrong, said(wrong)


def test_a_trainer_and_who_only_looks_need_no_torch() -> None:
    seen, waiting = set(), ["peers.trainer", "peers.status", "peers.disk.dataset", "peers.net.node"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for found in IMPORTS:
            if found.importer == name and found.runtime and found.top_level:
                assert not inside(found.name, "torch"), str(found)
                waiting.append(found.name)


def test_the_reader_of_imports_sees_all_forms() -> None:
    source = (
        "from __future__ import annotations\n"
        "import a.b, c\n"
        "from d import e, f\n"
        "if TYPE_CHECKING:\n    import g\n"
        "def h():\n    from i.j import k\n"
        "try:\n    import m\nexcept ImportError:\n    import n\n"
    )
    found = list(imports_of("x", source, frozenset({"d.e"})))
    assert [one.name for one in found] == ["__future__", "a.b", "c", "d.e", "d", "g", "i.j", "m", "n"]
    assert [one.name for one in found if not one.runtime] == ["g"]
    assert [one.name for one in found if not one.top_level] == ["i.j"]
