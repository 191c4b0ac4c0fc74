"""docs/notebook.ipynb runs as it is, cell by cell inside of a running loop, as a kernel runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.process.forkserver import ForkServer

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

NOTEBOOK = Path(__file__).resolve().parents[3] / "docs" / "notebook.ipynb"


async def test_the_notebook_trains_what_one_process_trains(
    tracing_server: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own last cell compares losses and weights."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        assert not cell.get("outputs"), "outputs are not kept"
        if cell["cell_type"] == "code":
            with tracing_server.fork_children():
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert float(names["right"]) > 0.9
    tally, run = names["s"].tally, names["run"]
    assert tally.missing(run.terms) == tally.duplicated() == 0 and tally.preemptions == 1
    assert len(names["losses"]) == run.terms.steps
    assert "died before step" in capsys.readouterr().out
