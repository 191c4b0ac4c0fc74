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
from packaging.requirements import Requirement

from peers.watch.tracking import TRACKERS
from swarm.manifest import tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without network from a copy, so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
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


def test_the_wheel_holds_every_module_of_both_packages_and_what_they_read(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if name.endswith((".py", "py.typed", ".toml", ".css"))}
    tree = {
        str(path.relative_to(ROOT))
        for package in ("swarm", "peers")
        for kind in ("*.py", "py.typed", "*.toml", "*.css")
        for path in (ROOT / package).rglob(kind)
    }
    assert inside == tree
    assert {"swarm/manifest/run.py", "peers/cli.py", "swarm/py.typed"} <= inside


def test_the_wheel_has_the_licence_and_says_it(wheel: zipfile.ZipFile) -> None:
    (licence,) = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    (metadata,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    said = wheel.read(metadata).decode().partition("\n\n")[0].splitlines()
    assert {f"Name: {PROJECT['name']}", "License-Expression: Apache-2.0", "Classifier: Typing :: Typed"} <= {
        *said
    }
    assert 'licenses="Apache-2.0"' in (ROOT / "Dockerfile").read_text()


def test_ranges_end_below_the_next_major_version_of_what_breaks_with_one() -> None:
    """Exact versions are in constraints.txt, and here for what is known for one release only."""
    extras = PROJECT["optional-dependencies"]
    needs = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    more = {one.name: one.specifier for extra in extras.values() for one in map(Requirement, extra)}
    assert [name for name, versions in needs.items() if "==" in str(versions)] == ["hivemind"]
    for name, next_major in {"torch": "3.0", "transformers": "6.0", "nicegui": "4.0"}.items():
        versions = {**needs, **more}[name]
        assert next_major not in versions
        assert all(re.split("==| ; ", line)[1] in versions for line in pins()[name])


def test_a_message_that_says_what_to_install_names_what_there_is() -> None:
    said = [
        found
        for folder in ("swarm", "peers", "docs")
        for path in (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md"))
        for found in re.findall(r"pip install '([\w-]+\[[^{]+?\])'", path.read_text())
    ]
    assert len(said) >= 4
    for one in map(Requirement, said):
        assert one.name == PROJECT["name"] and one.extras <= PROJECT["optional-dependencies"].keys()
    assert TRACKERS.keys() <= PROJECT["optional-dependencies"].keys()


def test_the_wheel_has_the_command(wheel: zipfile.ZipFile) -> None:
    """Under the name of the package too, which is what `uvx` starts."""
    entry = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    for name in ("swarm", PROJECT["name"]):
        assert f"\n{name} = peers.__main__:main" in wheel.read(entry).decode()


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

    waiting = [
        Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"])
    ]
    seen: set[tuple[str, str]] = set()
    known = pins()
    while waiting:
        need = waiting.pop()
        if need.name == PROJECT["name"]:  # an extra that takes in another one
            groups = [PROJECT["optional-dependencies"][extra] for extra in need.extras]
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
