"""`import swarm` offers the names of the API, and costs nothing until one is asked for."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

import swarm
from tests.test_docs import ROOT, blocks


def test_swarm_has_the_names_of_the_api() -> None:
    assert set(swarm.__all__) == set(swarm._MODULES) <= set(dir(swarm))
    for name in swarm.__all__:
        assert getattr(swarm, name).__module__ == f"peers.api.{swarm._MODULES[name]}"
        assert getattr(swarm, name).__doc__
    with pytest.raises(AttributeError, match="module 'swarm' has no attribute 'Runn'"):
        swarm.Runn  # type: ignore[attr-defined]  # noqa: B018


def calls(text: str) -> Iterator[ast.Call]:
    """Those of names of `swarm`, but for alternative constructors."""
    for node in ast.walk(ast.parse(text)):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) == "swarm":
            assert isinstance(node, ast.Call)
            yield node


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/notebook.ipynb"])
def test_what_the_pages_call_is_there_and_takes_that(page: str) -> None:
    if page.endswith("ipynb"):
        cells = json.loads((ROOT / page).read_text())["cells"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    else:
        texts = blocks(page, "python")
    found = [call for text in texts for call in calls(text)]
    assert {ast.unparse(call.func) for call in found} >= {"swarm.Run", "swarm.local", "swarm.reference"}
    for call in found:
        target = getattr(swarm, call.func.attr)  # type: ignore[attr-defined]
        names = {str(keyword.arg) for keyword in call.keywords}
        signature = inspect.signature(target)
        signature.bind(*call.args, **dict.fromkeys(names))
        assert names <= set(signature.parameters), "a name that only the manifest knows is in no example"


def test_importing_swarm_imports_neither_torch_nor_a_program() -> None:
    code = """import sys, swarm
print([m for m in ('torch', 'peers', 'msgspec') if m in sys.modules])
swarm.Run
swarm.reference
print([m for m in ('peers.net', 'peers.programs.roles', 'hivemind', 'uvloop') if m in sys.modules])
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n[]\n"
