"""Imports point down only. The files are read, not run, so that imports inside functions count too.

scripts → peers/cli and other wiring
  → peers/{trainer,stage,transfer,...} | peers/{net,storage}
    → peers/ports
      → swarm/policy | swarm/plan | swarm/wire | swarm/model
        → swarm/{ids,errors,records,codecs,manifest,data}
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("swarm", "peers")
BASE = (
    *("swarm.ids", "swarm.errors", "swarm.records", "swarm.codecs", "swarm.manifest", "swarm.data"),
    *("swarm.installed", "swarm.charter", "swarm.merkle", "swarm.digest", "swarm.floats"),
)

SHARED = (
    *(
        "swarm.wire",
        "peers.ports",
        "peers.clock",
        "peers.system",
        "peers.events",
        "peers.options",
        "peers.waiting",
        "msgspec",
    ),
    "numpy",
)

MAY_IMPORT = {
    # folder or module: what it may import besides the standard library and itself
    **dict.fromkeys(BASE, (*BASE, "msgspec", "tomli", "numpy", "blake3", "typing_extensions")),
    "swarm.policy": (*BASE, "swarm.protocol"),
    "swarm.protocol": (*BASE, "swarm.policy", "msgspec"),
    # What peers say of themselves when they are asked is a message.
    "swarm.monitoring": (*BASE, "swarm.policy", "swarm.protocol", "swarm.wire.messages", "msgspec"),
    "swarm.plan": (*BASE, "numpy", "scipy", "tomli"),
    "swarm.wire": (*BASE, "swarm.protocol", "msgspec", "numpy", "torch", "bitsandbytes", "typing_extensions"),
    # What a stage computes includes the codec at its boundaries: an undo has to see the very bytes again.
    "swarm.model": (*BASE, "swarm.wire", "msgspec", "numpy", "torch", "bitsandbytes"),
    "swarm.audit": (*BASE, "swarm.model", "swarm.protocol", "swarm.wire", "msgspec", "numpy", "torch"),
    "peers.ports": (*BASE, "swarm.protocol.statements", "swarm.wire.buffers"),
    "peers.net": (
        *BASE,
        *SHARED,
        "swarm.policy.backoff",
        "peers.record_table",
        "hivemind",
        "base58",
        "cryptography",
        "google.protobuf",
        "msgpack",
        "psutil",
        "uvloop",
    ),
    "peers.storage": (
        *BASE,
        *SHARED,
        "swarm.evaluation",
        "swarm.model",
        "swarm.tales",
        "peers.progress",
        "fsspec",
        "torch",
        "safetensors",
        "tokenizers",
    ),
}
"""The longest name that fits a module holds; modules without one are bound by the other rules only."""

IMPURE = frozenset(
    {"asyncio", "logging", "multiprocessing", "random", "select", "shutil", "signal", "socket", "subprocess"}
    | {"tempfile", "threading", "time", "uuid"}
)
"""Parts of the standard library that `swarm` has no use for: clock, chance, sockets, processes, logs."""

WIRING = (
    *("peers.cli", "peers.watch.dashboard", "peers.api.processes"),
    *(f"peers.programs.{name}" for name in ("check", "status", "roles", "trained", "charter", "verify")),
)
"""Modules that put the loops and the world together, besides `scripts`."""

ROLES = ("peers.trainer", "peers.stage", "peers.transfer.keeper", "peers.watch.monitor")


ROLE_PROGRAMS = ("peers.cli", "peers.programs.roles")
"""What `swarm peer`, `train`, `bootstrap` and `keeper` begin with."""

TOOLS = (
    *("swarm.model.graph", "swarm.plan", "swarm.monitoring"),
    *("peers.api", "peers.programs", "peers.sim", "peers.tokenize", "peers.watch"),
)
"""Nothing of them is imported by a role; `CORE` is excepted."""
CORE = (
    "peers.programs.roles",
    *("peers.programs.stage_choice", "peers.programs.manifest_pinning", "peers.programs.fleet"),
)

FRONT_DOOR = [("swarm", f"peers.api.{name}") for name in ("joining", "local_swarm", "run", "steps")]
"""The only imports that point up: `swarm` offers the names that a notebook needs. They are lazy, and for
callers from outside: no module of ours takes them from there."""

DOORS = frozenset(
    (
        *FRONT_DOOR,
        ("swarm.model.custom", "swarm.model.graph.custom_model"),
        ("peers.cli", "peers.watch.metrics"),
        ("peers.cli", "peers.owner.health_socket"),
        ("peers.cli", "peers.programs.fleet"),
        ("peers.programs.roles", "peers.owner.gpu_contention"),
        ("peers.programs.roles", "swarm.policy.contention"),
    )
)
"""(importer, tool): lazy imports that a role needs only for what it is asked for: a user's model, --metrics,
--health, several devices, --pause-when-busy."""

MAX_ROLE_LINES = 39_769
"""Of all that the four roles import; the goal is 20 500. Lower it whenever something is cut."""
MAX_LINES = 60_295
"""Of `swarm` and `peers`; the goal is 31 000."""
MAX_METHODS = 30
MAX_FILES = 20


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


def imports_of(name: str, tree: ast.Module, known: frozenset[str]) -> Iterator[Import]:
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

    yield from walk(tree, True, True)


MODULES = modules()


@cache
def parsed(name: str) -> ast.Module:
    """A module's source."""
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def all_imports() -> list[Import]:
    """Those of all modules; not made before a test asks, since every worker imports this file."""
    known = frozenset(MODULES)
    return [found for name in MODULES for found in imports_of(name, parsed(name), known)]


def inside(name: str, *packages: str) -> bool:
    """Whether a module is one of these or in one of these."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def of(*importers: str) -> list[Import]:
    """Imports made in these modules or folders."""
    return [found for found in all_imports() if inside(found.importer, *importers)]


def said(wrong: list[Import]) -> str:
    """The broken rule, a line each."""
    return "\n".join(map(str, wrong))


def test_swarm_never_imports_peers() -> None:
    wrong = [
        found
        for found in of("swarm")
        if inside(found.name, "peers", "scripts", "tests") and (found.importer, found.name) not in FRONT_DOOR
    ]
    assert not wrong, said(wrong)


def test_nothing_inside_takes_the_front_door() -> None:
    offered = {alias.name for node in ast.walk(parsed("swarm")) if isinstance(node, ast.ImportFrom)
               for alias in node.names}  # fmt: skip
    wrong = [
        f"{name}:{node.lineno}"
        for name in MODULES
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.ImportFrom) and node.module == "swarm"
        if offered & {alias.name for alias in node.names}
    ]
    assert "Run" in offered and not wrong


def test_swarm_has_no_clock_no_chance_no_socket_no_process() -> None:
    wrong = [found for found in of("swarm") if found.name.split(".")[0] in IMPURE]
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
        for found in all_imports()
        if inside(found.name, "hivemind") and not inside(found.importer, "peers.net")
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
    for found in all_imports():
        if found.runtime and found.top_level and found.name in MODULES and found.name != found.importer:
            below[found.importer].add(found.name)
    left = dict(below)
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import one another: {sorted(left)}"


def reached(*programs: str) -> set[str]:
    """Modules that are imported by these and by what they import, in functions too; not through `DOORS`."""
    by_importer: dict[str, list[Import]] = {}
    for found in all_imports():
        by_importer.setdefault(found.importer, []).append(found)
    seen: set[str] = set()
    waiting = list(programs)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in MODULES:
            continue
        seen.add(name)
        waiting += [name.rpartition(".")[0]]  # its package
        waiting += [
            found.name
            for found in by_importer.get(name, [])
            if found.runtime and (found.importer, found.name) not in DOORS
        ]
    return seen


def lines_of(names: Iterable[str]) -> int:
    return sum(len(MODULES[name].read_text(encoding="utf-8").splitlines()) for name in names)


def test_the_roles_import_no_tool() -> None:
    roles = reached(*ROLE_PROGRAMS)
    tools = {name for name in roles if inside(name, *TOOLS) and not inside(name, *CORE)}
    packages = {name for name in tools if MODULES[name].name == "__init__.py"}
    wrong = [found for found in all_imports() if found.importer in roles and found.name in tools - packages]
    assert not wrong, said(wrong)


@pytest.mark.parametrize(("importer", "tool"), sorted(DOORS))
def test_a_door_is_lazy_and_there(importer: str, tool: str) -> None:
    doors = [found for found in of(importer) if found.name == tool]
    assert doors and not any(found.top_level and found.runtime for found in doors)


def test_the_roles_and_the_whole_do_not_grow() -> None:
    assert lines_of(reached(*ROLE_PROGRAMS)) <= MAX_ROLE_LINES
    assert lines_of(MODULES) <= MAX_LINES


def test_no_class_has_too_many_methods() -> None:
    found = {
        f"{name}.{node.name}": sum(
            isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) for item in node.body
        )
        for name in MODULES
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.ClassDef)
    }
    wrong = {name: n for name, n in found.items() if n > MAX_METHODS}
    assert not wrong, f"split these: {wrong}"


def test_no_folder_has_too_many_files() -> None:
    paths = [*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    files = Counter(str(path.parent.relative_to(ROOT)) for path in paths)
    wrong = {name: n for name, n in files.items() if n > MAX_FILES}
    assert not wrong, f"split these: {wrong}"


def test_nothing_is_unpickled() -> None:
    banned = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
    wrong = [found for found in all_imports() if inside(found.name, *banned)]
    assert not wrong, said(wrong)
    for name in MODULES:
        for node in ast.walk(parsed(name)):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "load"
                and ast.unparse(node)
                in (
                    "torch.load",
                    "np.load",
                    "numpy.load",
                )
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


def loaded(*programs: str) -> Iterator[Import]:
    """What is imported with these: by them, by their packages, and so on."""
    seen, waiting = {""}, list(programs)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        waiting.append(name.rpartition(".")[0])
        for found in all_imports():
            if found.importer == name and found.runtime and found.top_level:
                yield found
                waiting.append(found.name)


def test_a_trainer_and_who_only_looks_need_no_torch() -> None:
    programs = ("peers.trainer", "peers.programs.status", "peers.storage.dataset", "peers.net.node")
    wrong = [found for found in loaded(*programs) if inside(found.name, "torch")]
    assert not wrong, said(wrong)


@pytest.mark.parametrize("tool", ["graph", "plan", "simulate", "trained"])
def test_a_tool_that_can_do_without_a_network_loads_none(tool: str) -> None:
    wrong = [found for found in loaded(f"peers.programs.{tool}") if inside(found.name, "peers.net")]
    assert not wrong, said(wrong)


def test_the_reader_of_imports_sees_all_forms() -> None:
    source = (
        "from __future__ import annotations\n"
        "import a.b, c\n"
        "from d import e, f\n"
        "if TYPE_CHECKING:\n    import g\n"
        "def h():\n    from i.j import k\n"
        "try:\n    import m\nexcept ImportError:\n    import n\n"
    )
    found = list(imports_of("x", ast.parse(source), frozenset({"d.e"})))
    assert [one.name for one in found] == ["__future__", "a.b", "c", "d.e", "d", "g", "i.j", "m", "n"]
    assert [one.name for one in found if not one.runtime] == ["g"]
    assert [one.name for one in found if not one.top_level] == ["i.j"]
