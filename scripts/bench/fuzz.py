"""Coverage-guided fuzzing of every decoder of strangers' bytes, with atheris (libFuzzer).

    python scripts/bench/fuzz.py                        a minute of every target of tests/fuzz/targets.py
    python scripts/bench/fuzz.py --target records --seconds 600
    python scripts/bench/fuzz.py --executions 5000000 --json docs/benchmarks/fuzzing.json
    python scripts/bench/fuzz.py --target records --replay crash-0a1b2c

Each target runs in a process of its own, one after the other. An input that fails, takes more than a second
or more than 4 times its length and 1 MiB of memory is written to the folder of `--found`, and replayed
exactly by `--replay`. New inputs that reach new code stay in `--corpus`, a folder for each target.

Needs `pip install -e .[fuzz]`. The tests need none of it: they replay the inputs of tests/fuzz/corpus, and
mutate plainly.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SLOW_S = 1.0
MEMORY_SAMPLES = 2000
"""Inputs of the corpus whose memory is measured: tracemalloc makes each ten times slower."""


def fuzz(name: str, folder: Path, arguments: list[str]) -> None:
    """Fuzz one target in this process, which ends with it."""
    import atheris  # type: ignore

    with atheris.instrument_imports(include=["swarm", "peers"]):  # type: ignore
        from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    for number, seed in enumerate(known(name)):
        (folder / f"seed-{number:03d}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *arguments, str(folder)], target.run)
    atheris.Fuzz()


def known(name: str) -> list[bytes]:
    """The honest inputs of a target, and the interesting ones in the repository."""
    from tests.fuzz.targets import TARGETS, corpus_of

    return [*TARGETS[name].seeds(), *corpus_of(name)]


def replay(name: str, path: Path) -> None:
    """Run one input, with its time and memory; what it raises is shown."""
    data = path.read_bytes()
    took_s, peak = measured(name, data)
    print(f"{len(data)} bytes: {took_s * 1000:.1f} ms, {peak} bytes of memory at most")


def measured(name: str, data: bytes) -> tuple[float, int]:
    """Seconds without, and bytes with a look at its memory."""
    from tests.fuzz.targets import TARGETS

    run = TARGETS[name].run
    run(data)
    began = time.perf_counter()
    run(data)
    took_s = time.perf_counter() - began
    tracemalloc.start()
    try:
        run(data)
        return took_s, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def run_one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fuzz a target in a process of its own, then measure the memory of what it kept. A row of the table."""
    from tests.fuzz.targets import FOLDER, TARGETS

    folder = options.corpus / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    options.found.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={options.seconds}"] if options.seconds else []
    limits += [f"-runs={options.executions}"] if options.executions else []
    arguments = [
        *limits,
        "-print_final_stats=1",
        f"-timeout={SLOW_S:g}",
        "-rss_limit_mb=3000",
        "-max_len=65536",
        f"-artifact_prefix={options.found}/{name.replace(' ', '-')}-",
        f"-seed={options.seed}",
        "-verbosity=0",
    ]
    command = [sys.executable, __file__, "--inside", name, str(folder), *arguments]
    began = time.monotonic()
    ended = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=ROOT
    )
    told, _ = ended.communicate()
    for left in FOLDER.parent.glob(f"swarm-fuzz-{ended.pid}-*"):  # atheris ends a process where it stands
        shutil.rmtree(left)
    count = re.search(r"stat::number_of_executed_units:\s*(\d+)", told)
    kept = sorted(folder.iterdir())
    most, slowest_s, failed = 0.0, 0.0, ended.returncode != 0
    for path in kept[:: max(1, len(kept) // MEMORY_SAMPLES)]:
        data = path.read_bytes()
        try:
            took_s, peak = measured(name, data)
        except Exception as error:  # noqa: BLE001  whatever the target finds
            print(f"{path}: {error!r}", file=sys.stderr)
            failed = True
            continue
        slowest_s = max(slowest_s, took_s)
        most = max(most, peak / (4 * len(data) + TARGETS[name].spare_bytes))
    if failed:
        print(told[-6000:], file=sys.stderr)
    return {
        "target": name,
        "executions": int(count[1]) if count else 0,
        "seconds": round(time.monotonic() - began),
        "kept": len(kept),
        "memory": round(most, 2),
        "slowest_ms": round(slowest_s * 1000, 1),
        "failed": "yes" if failed else "no",
    }


def main() -> int:
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="this one; may be repeated"
    )
    parser.add_argument(
        "--seconds", type=int, help="at most so long for each target (60, if nothing is said)"
    )
    parser.add_argument("--executions", type=int, help="at most so many for each target")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument(
        "--corpus", type=Path, default=ROOT / "fuzz-corpus", help="what is kept between calls"
    )
    parser.add_argument("--found", type=Path, default=ROOT / "fuzz-found", help="where inputs that fail go")
    parser.add_argument("--replay", type=Path, help="run this input of the only --target")
    parser.add_argument("--json", type=Path, help="the table whose rows are renewed")
    options = parser.parse_args()
    options.seconds = options.seconds or (0 if options.executions else 60)
    names = options.target or list(TARGETS)
    if options.replay:
        for name in names:
            replay(name, options.replay)
        return 0
    rows = []
    for name in names:
        rows.append(run_one(name, options))
        print(json.dumps(rows[-1]), flush=True)
        if options.json:
            renew(options.json, rows[-1])
    return any(row["failed"] == "yes" for row in rows)


def renew(path: Path, row: dict[str, Any]) -> None:
    """Replace the row of a target; its executions are added up while nothing failed."""
    topic = json.loads(path.read_text())
    table = topic["tables"][0]
    rows = {one["target"]: one for one in table["rows"]}
    before = rows.get(row["target"])
    if before is not None and before["failed"] == row["failed"] == "no":
        row = {**row, **{key: before[key] + row[key] for key in ("executions", "seconds")}}
    rows[row["target"]] = row
    table["rows"] = list(rows.values())
    table["date"], table["machine"] = time.strftime("%Y-%m-%d"), _machine()
    path.write_text(json.dumps(topic, indent=1, ensure_ascii=False) + "\n")


def _machine() -> str:
    return f"AMD EPYC, {os.cpu_count()} cores, Python {platform.python_version()}, atheris 3.0.0"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        fuzz(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    sys.exit(main())
