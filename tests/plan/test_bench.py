"""`scripts/bench/plan/plan.py`: files of DT-FM's form, the last line for programs, refusals in words."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from scripts.bench.plan.additive_objective import additive_cost, additive_terms
from swarm.errors import SetupError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "plan" / "plan.py"
DTFM = SCRIPT.parents[2].parent / "shared" / "data" / "networks" / "dtfm.json"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_plan", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small() -> dict[str, Any]:
    return {
        "cost_model": {"stages": 2, "dp": 3, "grad_GB": 0.5, "act_GB_as_coded": 0.25},
        "pairs": [{"a": "x", "b": "y", "delay_ms": 10, "gbps": 0.5}],
        "cases": [
            {"name": "two", "layout": [{"group": "x", "count": 3}, {"group": "y", "count": 3}],
             "intra": {"delay_ms": 1, "gbps": 4.0}, "pairs": "pairs", "proven_optimum": 1.0},
        ],
        "irregular": [
            {"name": "odd", "device_group": ["x", "y", "x", "x", "y", "x"],
             "intra": {"delay_ms": 1, "gbps": 4.0}, "inter": {"delay_ms": 20, "gbps": 0.25},
             "jitter": {"sigma": 0.5, "seed": 3}, "gcma_best_of_3": 9.0},
        ],
    }  # fmt: skip


@pytest.mark.slow  # it starts another process
def test_the_last_line_is_an_object_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "networks.json"
    file.write_text(json.dumps(small()))
    done = subprocess.run(
        [sys.executable, SCRIPT, "--networks", file, "--budget", "0.05"],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["name"] for row in rows] == ["two", "odd"]
    for row in rows:
        assert {"cost", "cpu_s", "dtfm_best", "best_known"} <= row.keys()
        assert row["cost"] <= min(row["best_start"], row["megatron"]) * (1 + 1e-9)
    assert rows[0]["best_known"] == 1.0 and rows[1]["dtfm_best"] == 9.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("cost_model"), "cost_model must be an object with the numbers stages, dp"),
        (lambda d: d["cost_model"].pop("dp"), "cost_model must be an object with the numbers stages, dp"),
        (lambda d: d.update(cases=[], irregular=[]), "there is no layout in cases or irregular"),
        (lambda d: d.update(cases={}), "cases must be a list of layouts"),
        (lambda d: d["cases"][0].pop("intra"), "layout 'two' lacks or has a wrong 'intra'"),
        (lambda d: d["cases"][0].pop("pairs"), "layout 'two': nothing is said of the line from 'x' to 'y'"),
        (
            lambda d: d["cases"][0]["layout"].pop(),
            "layout 'two' has 3 devices; cost_model says 2 stages of 3",
        ),
        (
            lambda d: d["pairs"][0].update(gbps=-1),
            "layout 'two': 'x' and 'y' cannot reach one another, by -1e+09 ",
        ),
        (
            lambda d: d["pairs"][0].update(gbps=math.nan),
            "layout 'two': 'x' and 'y' cannot reach one another, by nan bit/s",
        ),
        (lambda d: d["pairs"][0].update(gbps=0), "layout 'two': 'x' and 'y' cannot reach one another"),
        (lambda d: d["cost_model"].update(grad_GB=-1), "-1e+09 gradient bytes: they cannot be negative"),
    ],
)
def test_a_file_that_cannot_be_is_refused(bench: ModuleType, tmp_path: Path, change: Any, words: str) -> None:
    data = small()
    change(data)
    file = tmp_path / "networks.json"
    file.write_text(json.dumps(data))
    with pytest.raises(SetupError) as caught:
        loaded = bench.load(file)
        bench.measure(loaded["cases"][0], loaded, budget_s=0.0, seed=0)
    assert words in caught.value.text


@pytest.mark.parametrize(("content", "words"), [(None, "cannot read the networks"), ("{", "is not JSON")])
def test_a_file_that_cannot_be_read_is_said(
    bench: ModuleType,
    tmp_path: Path,
    content: str | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "networks.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(sys, "argv", ["plan.py", "--networks", str(file)])
    assert bench.main() == 3
    assert words in capsys.readouterr().err


@pytest.mark.skipif(not DTFM.exists(), reason="no ../shared/data/networks/dtfm.json")
def test_no_layout_costs_less_than_the_proven_optimum_and_one_costs_just_that(bench: ModuleType) -> None:
    data = bench.load(DTFM)
    for number, case in enumerate(data["cases"]):
        network = bench.network_of(case, data)
        model = data["cost_model"]
        terms = additive_terms(
            network,
            stages=model["stages"],
            gradient_bytes=model["grad_GB"] * 1e9,
            activation_bytes=model["act_GB_as_coded"] * 1e9,
        )
        grid = np.arange(64).reshape(8, 8)
        costs = [additive_cost(terms, rows).total_s for rows in (grid, grid.T)]
        assert min(costs) >= case["proven_optimum"] * (1 - 1e-9)
        if number in (0, 2, 3, 4, 5):  # where the index order, by stage or by pipeline, is as good as any
            assert min(costs) == pytest.approx(case["proven_optimum"], rel=1e-6)
