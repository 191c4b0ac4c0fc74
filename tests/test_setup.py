"""`scripts/setup`, with a Python that only pretends to install: once, after a change, two at once."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FAKE = """\
#!/usr/bin/env bash
# A python that makes a venv of itself, and writes down what it is asked to install.
case "$*" in
    *"-m venv"*) [ -e no-venv ] && exit 1
        echo venv >>log; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"-m pip install"*"constraints.txt uv"*) echo fetched >>log; [ -e no-uv ] && exit 1
        cp "$0" .venv/bin/uv ;;
    *"-m pip install"*) echo "pip $*" >>log; [ ! -e no-pip ] ;;
    *"-m pip config list") cat pip.conf ;;
    "pip install"*) echo "uv $*" >>log; env | grep ^UV_ >>uv.env; [ -e slow ] && sleep 0.5
        [ ! -e no-index ] ;;
    *unpack_p2pd*) echo unpack >>log ;;
    *version_info*) [ ! -e too-old ] ;;
    --version) echo "Python 3.99" ;;
esac
"""
INSTALLED = ["fetched", "uv", "unpack"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone with only what the set-up reads."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts")
    (tmp_path / "constraints.txt").write_text("a==1\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "pip.conf").write_text("global.timeout='5'\n")
    fake = tmp_path / "fake-python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    return tmp_path


def start(tree: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [tree / "scripts" / "setup"], cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHON": str(tree / "fake-python"), **env},
    )  # fmt: skip


def setup(tree: Path, **env: str) -> tuple[int, str]:
    """(exit code, stderr); stdout stays empty, since `demo --json` owns it."""
    running = start(tree, **env)
    out, err = running.communicate(timeout=60)
    assert out == ""
    return running.returncode, err


def log(tree: Path) -> list[str]:
    path = tree / "log"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_the_first_run_installs_with_the_constraints_and_the_second_does_nothing(tree: Path) -> None:
    assert setup(tree)[0] == 0
    assert log(tree) == ["venv", *INSTALLED]
    assert "--build-constraints constraints.txt --editable .[dev]" in (tree / "log").read_text()
    assert setup(tree) == (0, "")
    assert log(tree) == ["venv", *INSTALLED]


def test_a_changed_pin_is_installed(tree: Path) -> None:
    setup(tree)
    (tree / "constraints.txt").write_text("a==2\n")
    assert setup(tree)[0] == 0
    assert log(tree) == ["venv", *INSTALLED, *INSTALLED]


def test_an_installation_that_failed_is_said_and_done_again(tree: Path) -> None:
    (tree / "no-index").touch()
    (tree / "no-pip").touch()
    code, said = setup(tree)
    assert code == 3
    assert "Run the same command again" in said
    (tree / "no-index").unlink()
    assert setup(tree)[0] == 0
    assert log(tree) == ["venv", "fetched", "uv", "pip", *INSTALLED]


@pytest.mark.parametrize(("fault", "tried"), [("no-uv", []), ("no-index", ["uv"])])
def test_where_uv_cannot_install_pip_does(tree: Path, fault: str, tried: list[str]) -> None:
    (tree / fault).touch()
    code, said = setup(tree)
    assert code == 0 and "Going on with pip" in said
    assert log(tree) == ["venv", "fetched", *tried, "pip", "unpack"]
    assert "--constraint constraints.txt --editable .[dev]" in (tree / "log").read_text()


def test_uv_looks_for_packages_where_pip_was_told_to(tree: Path) -> None:
    (tree / "pip.conf").write_text(
        ":env:.find-links='/wheels'\nglobal.extra-index-url='\\nhttps://a/simple\\nhttps://b/simple'\n"
        "global.find-links='/other'\nglobal.index-url='https://mirror/simple'\n"
    )
    assert setup(tree)[0] == 0
    assert sorted((tree / "uv.env").read_text().splitlines()) == [
        "UV_DEFAULT_INDEX=https://mirror/simple",
        "UV_EXTRA_INDEX_URL=https://a/simple https://b/simple",
        "UV_FIND_LINKS=/wheels",
    ]


def test_two_first_runs_at_once_install_once(tree: Path) -> None:
    (tree / "slow").touch()
    both = [start(tree), start(tree)]
    errors = [one.communicate(timeout=60)[1] for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert log(tree) == ["venv", *INSTALLED]
    assert sum("waiting for it" in said for said in errors) <= 1  # 0: one was done before the other looked


def test_more_arguments_for_uv_and_pip_are_passed_on(tree: Path) -> None:
    (tree / "no-index").touch()
    setup(tree, SWARM_PIP_ARGS="--index-url https://example.invalid/cpu --no-cache-dir")
    given = "--editable .[dev] --index-url https://example.invalid/cpu --no-cache-dir"
    assert (tree / "log").read_text().count(given) == 2


@pytest.mark.parametrize(("forbidden", "pip", "uv"), [("", " --no-compile ", 0), ("1", " --compile ", 1)])
def test_what_is_imported_is_compiled_once(tree: Path, forbidden: str, pip: str, uv: int) -> None:
    """By Python, when it is first imported; by uv or pip, where Python may write nothing down."""
    (tree / "no-index").touch()
    setup(tree, PYTHONDONTWRITEBYTECODE=forbidden)
    assert pip in (tree / "log").read_text()
    assert (tree / "log").read_text().count(" --compile-bytecode ") == uv


def test_a_person_sees_how_far_it_is_and_a_log_does_not(tree: Path) -> None:
    setup(tree)
    assert "--quiet" in (tree / "log").read_text()
    (tree / "log").unlink()
    (tree / "constraints.txt").write_text("a==2\n")
    ours, terminal = pty.openpty()
    try:
        subprocess.run(
            [tree / "scripts" / "setup"], stderr=terminal, stdout=subprocess.DEVNULL, timeout=60, check=True,
            env={**os.environ, "PYTHON": str(tree / "fake-python")},
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(terminal)
    assert log(tree) == INSTALLED and "--quiet" not in (tree / "log").read_text()


def test_without_a_new_enough_python_it_is_said_what_to_install(tree: Path) -> None:
    (tree / "too-old").touch()
    code, said = setup(tree)
    assert code == 3
    assert "Python 3.10 or newer" in said
    assert "apt-get install python3" in said
    assert log(tree) == []


def test_without_the_venv_module_it_is_said_what_to_install(tree: Path) -> None:
    (tree / "no-venv").touch()
    code, said = setup(tree)
    assert code == 3
    assert "venv module is missing" in said
    assert "-venv" in said
