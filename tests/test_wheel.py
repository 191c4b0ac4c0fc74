"""What is installed is what is in the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without network from a copy, so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    for package in ("swarm", "peers"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, str(folder)],
        cwd=folder, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_every_module_of_both_packages(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if name.endswith(".py")}
    tree = {
        str(path.relative_to(ROOT))
        for package in ("swarm", "peers")
        for path in (ROOT / package).rglob("*.py")
    }
    assert inside == tree
    assert {"swarm/manifest.py", "peers/cli.py"} <= inside


def test_the_wheel_has_the_command(wheel: zipfile.ZipFile) -> None:
    entry = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "swarm = peers.__main__:main" in wheel.read(entry).decode()


def pins() -> dict[str, list[str]]:
    """Normalized name -> its lines in constraints.txt."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            found.setdefault(normal(line.partition("==")[0]), []).append(line)
    return found


def normal(name: str) -> str:
    """A package name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def test_every_line_of_the_constraints_is_an_exact_version() -> None:
    for lines in pins().values():
        for line in lines:
            assert re.fullmatch(
                r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*( ; python_version (<|>=) \"3\.11\")?", line
            ), line
        if len(lines) > 1:
            assert sorted(line.partition(" ; ")[2] for line in lines) == [
                'python_version < "3.11"',
                'python_version >= "3.11"',
            ]


def test_torch_is_pinned_to_2_13_0() -> None:
    assert pins()["torch"] == ["torch==2.13.0"]


def test_everything_that_is_needed_here_is_pinned() -> None:
    """Walks the metadata of what is installed, from the project's own needs on."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [
        Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])
    ]
    seen: set[tuple[str, str]] = set()
    known = pins()
    while waiting:
        need = waiting.pop()
        if need.name == project["name"]:  # an extra that takes in another one
            groups = [project["optional-dependencies"][extra] for extra in need.extras]
            waiting += [Requirement(text) for group in groups for text in group]
            continue
        for extra in ("", *need.extras):
            if (need.name, extra) in seen:
                continue
            seen.add((need.name, extra))
            assert normal(need.name) in known, f"{need.name} is not in constraints.txt"
            try:
                theirs = requires(need.name) or []
            except PackageNotFoundError:  # for another version of Python
                continue
            below = [Requirement(text) for text in theirs]
            waiting += [
                other for other in below if other.marker is None or other.marker.evaluate({"extra": extra})
            ]
