#!/usr/bin/env python
"""The planner against DT-FM's layouts: cost and CPU seconds, with the devices' ids shuffled.

    scripts/bench/plan/plan.py                          # six cases and six irregular layouts, 3 shuffles each
    scripts/bench/plan/plan.py --networks mine.json --budget 10
    scripts/bench/plan/plan.py --overlap                # the same layouts, transfers behind compute
    scripts/bench/plan/plan.py --made 20                # layouts made by seeds; 4 CPU minutes
    scripts/bench/plan/plan.py --scale                  # 16 to 1024 devices, 2 to 64 stages, made-up networks

The file has the form of `../shared/data/networks/dtfm.json`: `cost_model` (stages, dp, grad_GB,
act_GB_as_coded), `cases` and `irregular`. No known cost is used by the search: they are printed beside it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is loaded: seconds are those of one core
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from scripts.bench.plan.additive_objective import AdditiveTerms, additive_cost, additive_terms
from scripts.bench.plan.additive_search import megatron_grid, random_grid, search_additive
from swarm.errors import SetupError
from swarm.plan.network import Device, Network, StepWork
from swarm.plan.overlapped import Overlap
from swarm.plan.search import search_overlapped

ROOT = Path(__file__).resolve().parents[3]
DTFM = ROOT.parent / "shared" / "data" / "networks" / "dtfm.json"
SHUFFLES = 3
RESERVE_S = 0.02
"""Of a budget: a search ends with the step that it is in, and what it found is counted once more."""
SCALE = ((16, 2), (16, 4), (64, 2), (64, 8), (64, 32), (256, 4), (256, 16), (1024, 8), (1024, 32), (1024, 64))
"""Devices and stages of `--scale`."""
OVERLAP_BUDGET_S, SCALE_BUDGET_S = 5.0, 27.0
V100_FLOPS_PER_S = 50e12
"""What DT-FM's V100s reach on its model, about half of their half-precision peak."""
MICROBATCHES = 448
GRADIENT_BYTES = 4
"""Of a weight: single precision."""
TOKEN_BYTES = 4096
"""A token's activations at a boundary: a width of 2048 in half precision."""


def load(path: Path) -> dict[str, Any]:
    """The file's object.

    Raises:
        SetupError: missing, not JSON, or without what a layout needs.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read the networks {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise SetupError(f"{path} is not JSON: {error}") from None
    model = loaded.get("cost_model") if isinstance(loaded, dict) else None
    wanted = ("stages", "dp", "grad_GB", "act_GB_as_coded")
    if not isinstance(model, dict) or not all(isinstance(model.get(key), int | float) for key in wanted):
        raise SetupError(f"{path}: cost_model must be an object with the numbers {', '.join(wanted)}")
    for key in ("cases", "irregular"):
        if not isinstance(loaded.setdefault(key, []), list):
            raise SetupError(f"{path}: {key} must be a list of layouts")
    if not loaded["cases"] and not loaded["irregular"]:
        raise SetupError(f"{path}: there is no layout in cases or irregular")
    return loaded


def network_of(case: dict[str, Any], data: dict[str, Any]) -> Network:
    """The network of one layout; every device is a region where lines differ by jitter.

    Raises:
        SetupError: something that the form asks for is missing, or cannot be; with the layout's name.
    """
    name = case.get("name", "?")
    try:
        groups: list[str] = (
            [entry["group"] for entry in case["layout"] for _ in range(entry["count"])]
            if "layout" in case
            else list(case["device_group"])
        )
        pairs = data[case["pairs"]] if isinstance(case.get("pairs"), str) else case.get("pairs") or []
        lines = {(p[a], p[b]): p for p in pairs for a, b in (("a", "b"), ("b", "a"))}
        regions = tuple(dict.fromkeys(groups))
        size = len(regions)
        latency_s, bandwidth_bps = np.zeros((size, size)), np.zeros((size, size))
        for i, a in enumerate(regions):
            for j, b in enumerate(regions):
                line = case["intra"] if a == b else lines.get((a, b), case.get("inter"))
                if line is None:
                    raise SetupError(f"layout {name!r}: nothing is said of the line from {a!r} to {b!r}")
                latency_s[i, j], bandwidth_bps[i, j] = line["delay_ms"] / 1e3, line["gbps"] * 1e9
        region_N = np.array([regions.index(group) for group in groups])
        model = data["cost_model"]
        if len(groups) != model["stages"] * model["dp"]:
            raise SetupError(
                f"layout {name!r} has {len(groups)} devices; cost_model says {model['stages']} stages of "
                f"{model['dp']}"
            )
        names = [f"{group}/{i}" for i, group in enumerate(groups)]
        if case.get("jitter"):
            jitter, count = case["jitter"], len(groups)
            z = np.triu(np.random.default_rng(jitter["seed"]).standard_normal((count, count)), 1)
            here = np.ix_(region_N, region_N)
            bandwidth_bps = bandwidth_bps[here] * np.exp(jitter["sigma"] * (z + z.T))
            latency_s, regions, region_N = latency_s[here], tuple(names), np.arange(count)
        devices = tuple(Device(n, int(r), 1e12) for n, r in zip(names, region_N, strict=True))
        return Network(devices, regions, latency_s, bandwidth_bps)
    except (KeyError, TypeError) as error:
        raise SetupError(f"layout {name!r} lacks or has a wrong {error}") from None
    except SetupError as error:
        raise SetupError(error.text if "layout" in error.text else f"layout {name!r}: {error.text}") from None


def known(case: dict[str, Any]) -> tuple[float | None, float | None]:
    """(the best that DT-FM's search found, the best that anybody did) as the file says."""
    seeds = case.get("dtfm_gcma_best_seeds0to4")
    dtfm = case.get("gcma_best_of_3", min(seeds) if seeds else None)
    return dtfm, case.get("proven_optimum", case.get("best_known"))


def shuffled(terms: AdditiveTerms, rng: np.random.Generator) -> AdditiveTerms:
    """The same prices with other ids."""
    order = rng.permutation(len(terms.exchange_s))
    here = np.ix_(order, order)
    return AdditiveTerms(terms.stages, terms.exchange_s[here], terms.transfer_s[here])


def measure(case: dict[str, Any], data: dict[str, Any], *, budget_s: float, seed: int) -> dict[str, Any]:
    """One row: the worst of the shuffles, in cost and in seconds."""
    model = data["cost_model"]
    network = network_of(case, data)
    straight = additive_terms(
        network,
        stages=int(model["stages"]),
        gradient_bytes=model["grad_GB"] * 1e9,
        activation_bytes=model["act_GB_as_coded"] * 1e9,
    )
    costs: list[float] = []
    seconds: list[float] = []
    starts: list[float] = []
    dtfm, best_known = known(case)
    for shuffle in range(SHUFFLES):
        rng = np.random.default_rng([seed, shuffle])
        terms = shuffled(straight, rng)
        began_s = time.process_time()
        found = search_additive(
            terms,
            seed=seed + shuffle,
            budget_s=budget_s - RESERVE_S,
            spent_s=lambda b=began_s: time.process_time() - b,
        )
        seconds.append(time.process_time() - began_s)
        # Counted again from the ids alone, so that nothing of the search is taken on trust.
        costs.append(additive_cost(terms, np.sort(found.cost.grid, axis=1)).total_s)
        starts.append(found.start_s)
    worst = int(np.argmax(costs))
    size, stages = len(network), straight.stages
    order = np.random.default_rng([seed, SHUFFLES])
    chance = [additive_cost(straight, random_grid(size, stages, order)).total_s for _ in range(10)]
    return {
        "name": str(case.get("name", "?")),
        "cost": max(costs),
        "cpu_s": max(seconds),
        "dtfm_best": dtfm,
        "best_known": best_known,
        "to_best_known": max(costs) / best_known if best_known else None,
        "to_dtfm": max(costs) / dtfm if dtfm else None,
        "best_start": starts[worst],
        "random": float(np.mean(chance)),
        "megatron": additive_cost(straight, megatron_grid(size, stages)).total_s,
        "costs": costs,
    }


def overlapped_job(model: dict[str, Any]) -> StepWork:
    """DT-FM's job for the overlapped objective: its bytes, and the arithmetic that belongs to them."""
    stages = int(model["stages"])
    parameters = model["grad_GB"] * 1e9 / GRADIENT_BYTES
    boundary_bytes = model["act_GB_as_coded"] * 1e9 * model["dp"] / MICROBATCHES
    return StepWork(
        stages=stages,
        microbatches=MICROBATCHES,
        forward_flops=(2 * parameters * boundary_bytes / TOKEN_BYTES,) * stages,
        forward_bytes=(boundary_bytes,) * (stages - 1),
        backward_bytes=(boundary_bytes,) * (stages - 1),
        gradient_bytes=(model["grad_GB"] * 1e9,) * stages,
        state_bytes=(4 * model["grad_GB"] * 1e9,) * stages,
        activation_bytes=(0.0,) * stages,
    )


def measure_overlap(
    case: dict[str, Any], data: dict[str, Any], *, budget_s: float, seed: int
) -> dict[str, Any]:
    """One row: predicted seconds of a step of the overlapped plan, and of other layouts."""
    model, network, job = data["cost_model"], network_of(case, data), overlapped_job(data["cost_model"])
    devices = tuple(Device(device.name, device.region, V100_FLOPS_PER_S) for device in network.devices)
    order = np.random.default_rng(seed).permutation(len(devices))
    straight = Network(devices, network.regions, network.latency_s, network.bandwidth_bps)
    network = Network(
        tuple(devices[i] for i in order), network.regions, network.latency_s, network.bandwidth_bps
    )
    began_s = time.process_time()
    found = search_overlapped(
        network, job, seed=seed, budget_s=budget_s - RESERVE_S, spent_s=lambda: time.process_time() - began_s
    )
    cpu_s = time.process_time() - began_s
    terms = additive_terms(
        network,
        stages=job.stages,
        gradient_bytes=model["grad_GB"] * 1e9,
        activation_bytes=model["act_GB_as_coded"] * 1e9,
    )
    began_s = time.process_time()
    additive = search_additive(terms, seed=seed, budget_s=0.9, spent_s=lambda: time.process_time() - began_s)
    stage_of = np.empty(len(devices), dtype=np.int64)
    for stage, members in enumerate(additive.cost.grid):
        stage_of[members] = stage
    overlap = Overlap(network, job)
    by_index = np.arange(len(devices)) * job.stages // len(devices)
    chance = np.random.default_rng(seed + 1)
    random_s = [overlap.predict(chance.permutation(by_index)).total_s for _ in range(10)]
    additive_s, cost = overlap.predict(stage_of).total_s, found.step.total_s
    return {
        "name": str(case.get("name", "?")),
        "cost": cost,
        "cpu_s": cpu_s,
        "dtfm_best": None,
        "best_known": None,
        "additive_layout": additive_s,
        "faster_than_additive": additive_s / cost - 1.0,
        "fence": found.starts["fence"],
        "megatron": Overlap(straight, job).predict(by_index).total_s,
        "random": float(np.mean(random_s)),
        "limit": found.step.limit,
        "replicas": np.bincount(found.stage_of[found.stage_of >= 0]).tolist(),
    }


MADE_BUDGETS_S = (1.0, 10.0)
"""Of which the least cost is the best known."""


def made_case(data: dict[str, Any], seed: int) -> dict[str, Any]:
    """Another layout in the form of the file: devices anywhere, cities of very different size, or lines that
    all differ; over the lines between its cities."""
    rng = np.random.default_rng([seed, 99])
    cities = sorted({pair["a"] for pair in data["worldwide_pairs"]})
    count = int(data["cost_model"]["stages"] * data["cost_model"]["dp"])
    kind = ("anywhere", "uneven", "jitter 0.3", "jitter 0.6")[seed % 4]
    if kind == "anywhere":
        groups = rng.choice(cities, count)
    elif kind == "uneven":
        groups = rng.choice(rng.choice(cities, 4, replace=False), count, p=(0.55, 0.25, 0.13, 0.07))
    else:
        groups = np.repeat(rng.choice(cities, count // 8, replace=False), 8)
    case = {"name": f"{kind} {seed}", "device_group": [str(group) for group in groups],
            "intra": {"delay_ms": 5, "gbps": 2.0}, "pairs": "worldwide_pairs"}  # fmt: skip
    if kind.startswith("jitter"):
        case["jitter"] = {"sigma": float(kind.split()[1]), "seed": seed}
    return case


def measure_made(data: dict[str, Any], seed: int) -> dict[str, Any]:
    """One row of a layout that was made: what searches of so many CPU seconds cost, each of other ids."""
    case, model = made_case(data, seed), data["cost_model"]
    straight = additive_terms(
        network_of(case, data), stages=int(model["stages"]), gradient_bytes=model["grad_GB"] * 1e9,
        activation_bytes=model["act_GB_as_coded"] * 1e9,
    )  # fmt: skip
    costs: list[float] = []
    for budget_s in MADE_BUDGETS_S:
        terms = shuffled(straight, np.random.default_rng([seed, int(budget_s)]))
        began_s = time.process_time()
        found = search_additive(
            terms, seed=seed, budget_s=budget_s - RESERVE_S, spent_s=lambda b=began_s: time.process_time() - b
        )
        costs.append(found.cost.total_s)
        print(f"{case['name']}: {costs[-1]:.4f} in {budget_s:g} CPU-s", file=sys.stderr, flush=True)
    best = min(costs)
    return {"name": case["name"], "cost": best, "in_1_s": costs[0] / best, "in_10_s": costs[1] / best}


def made_up(devices: int, seed: int) -> Network:
    """Cities on a square, up to 16, with devices by chance; lines get slower with the distance."""
    rng = np.random.default_rng(seed)
    cities = max(2, min(16, devices // 8))
    at = rng.uniform(0.0, 1.0, (cities, 2))
    distance = np.sqrt(((at[:, None] - at[None]) ** 2).sum(axis=-1))
    return Network(
        tuple(Device(f"d{i}", int(city), 1e12) for i, city in enumerate(rng.integers(0, cities, devices))),
        tuple(f"city{i}" for i in range(cities)),
        0.002 + 0.12 * distance,
        2e9 / (1.0 + 6.0 * distance),
    )


def measure_scale(devices: int, stages: int, *, budget_s: float, seed: int) -> dict[str, Any]:
    """One row of a made-up network: what the search came to, against starts and baselines."""
    terms = additive_terms(
        made_up(devices, seed), stages=stages, gradient_bytes=0.65e9, activation_bytes=0.4712e9
    )
    began_s = time.process_time()
    found = search_additive(
        terms, seed=seed, budget_s=budget_s - RESERVE_S, spent_s=lambda: time.process_time() - began_s
    )
    cpu_s, rng = time.process_time() - began_s, np.random.default_rng(seed)
    chance = [additive_cost(terms, random_grid(devices, stages, rng)).total_s for _ in range(3)]
    cost = found.cost.total_s
    return {
        "name": f"{devices} × {stages}",
        "cost": cost,
        "cpu_s": cpu_s,
        "dtfm_best": None,
        "best_known": None,
        "best_start": found.start_s,
        "random": float(np.mean(chance)),
        "megatron": additive_cost(terms, megatron_grid(devices, stages)).total_s,
        "to_start": cost / found.start_s,
        "to_random": cost / float(np.mean(chance)),
        "turns": found.turns,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", type=Path, default=DTFM, metavar="FILE", help="default: DT-FM's")
    parser.add_argument(
        "--budget", type=float, default=None, metavar="CPU_S",
        help="of one search (default: 0.92; with --overlap 5, with --scale 27 for 1024 devices, else 5)",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--overlap", action="store_true", help="the overlapped objective")
    which.add_argument("--made", type=int, metavar="N", help="N layouts made by seeds, over the file's lines")
    which.add_argument("--scale", action="store_true", help="many devices and stages; reads no file")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="layouts whose name has this in it")
    args = parser.parse_args()
    if args.scale:
        from scripts.bench.common.harness import machine, report

        rows = [
            measure_scale(
                devices, stages, seed=args.seed,
                budget_s=args.budget or (SCALE_BUDGET_S if devices >= 1024 else OVERLAP_BUDGET_S),
            )
            for devices, stages in SCALE
            if args.only in f"{devices} × {stages}"
        ]  # fmt: skip
        print(machine())
        columns = ["name", "cost", "cpu_s", "best_start", "random", "megatron", "to_start", "to_random"]
        report(rows, columns, "additive objective by size, seconds a step")
        return 0
    measured = measure_overlap if args.overlap else measure
    budget_s = args.budget or (OVERLAP_BUDGET_S if args.overlap else 0.92)
    try:
        data = load(args.networks)
        if args.made:
            from scripts.bench.common.harness import machine, report

            rows = [measure_made(data, args.seed + number) for number in range(args.made)]
            print(machine())
            report(rows, ["name", "cost", "in_1_s", "in_10_s"], "additive objective, ÷ the least found")
            return 0
        rows = [
            measured(case, data, budget_s=budget_s, seed=args.seed)
            for case in (*data["cases"], *data["irregular"])
            if args.only in str(case.get("name", "?"))
        ]
    except SetupError as error:
        print(f"plan.py: {error.text}", file=sys.stderr)
        return 3
    from scripts.bench.common.harness import machine, report

    if args.overlap:
        print(machine())
        columns = ["name", "cost", "cpu_s", "additive_layout", "faster_than_additive", "fence", "megatron"]
        report(rows, [*columns, "random", "limit"], "overlapped objective, seconds a step")
        return 0
    irregular = {case.get("name") for case in data["irregular"]}
    ratios = [row["to_dtfm"] for row in rows if row["name"] in irregular and row["to_dtfm"]]
    print(f"{machine()}; worst of {SHUFFLES} shuffles")
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"irregular layouts: {mean:.3f} times DT-FM's best (geometric mean)")
    columns = ["name", "cost", "cpu_s", "dtfm_best", "best_known", "to_best_known", "to_dtfm"]
    report(rows, [*columns, "best_start", "random", "megatron"], "additive objective, seconds a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
