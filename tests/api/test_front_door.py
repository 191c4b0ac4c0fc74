"""`import swarm` offers the names of the API, and costs nothing until one is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import swarm
from peers import api


def test_swarm_has_the_names_of_the_api() -> None:
    assert set(swarm.__all__) == set(api.__all__) <= set(dir(swarm))
    for name in swarm.__all__:
        assert getattr(swarm, name) is getattr(api, name)
        assert getattr(swarm, name).__doc__
    with pytest.raises(AttributeError, match="module 'swarm' has no attribute 'Runn'"):
        swarm.Runn  # type: ignore[attr-defined]  # noqa: B018


def test_importing_swarm_imports_neither_torch_nor_a_program() -> None:
    code = "import sys, swarm; print([m for m in ('torch', 'peers', 'msgspec') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
