"""The bar of a run: in a terminal, and in a notebook, which is told by its shell."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from peers.api.steps import Progress, Step


def step(t: int) -> Step:
    return Step(t=t, steps=8, loss=1.25, losses=(1.25,), tokens_per_s=2345.6)


def test_a_notebook_has_one_bar_which_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    def display(content: Any, *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw and display_id
        shown.append(content)
        return SimpleNamespace(update=lambda content, raw: shown.append(content))

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    progress = Progress("<run>", 8)
    progress(step(0))
    progress(step(7))
    progress.close()
    assert [one["text/plain"] for one in shown] == [
        f"<run>: step {n} of 8, loss 1.2500, 2,346 a second" for n in (1, 8)
    ]
    assert shown[1]["text/html"] == (
        '<progress value="8" max="8"></progress> &lt;run&gt;: step 8 of 8, loss 1.2500, 2,346 a second'
    )


def test_elsewhere_it_is_a_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("run", 8)
    progress(step(0))
    progress.close()
    assert capsys.readouterr().out == ""
