"""What the tests cost: CPU time of each file, alone.

    python scripts/bench/test_times.py tests/process/test_*.py   # those files: their rows are made anew
    python scripts/bench/test_times.py --quick                   # all of scripts/test --quick, as a row
    python scripts/bench/test_times.py --long                    # which tests take long: tests/long_tests.txt

CPU time (user and system, of all processes that the tests start) says more than the clock where other
programs run: on two idle cores a part takes half of it, if both are busy all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "benchmarks" / "tests.json"
LONG, LONG_S = ROOT / "tests" / "long_tests.txt", 0.3
SHORT = "not process and not net and not slow"
QUICK = f"{SHORT} and not long"


def used_s() -> float:
    """CPU time of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def played(arguments: list[str], profile: str) -> str:
    """What pytest says."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": profile}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True).stdout


def measured(what: str, arguments: list[str], profile: str = "swarm") -> dict[str, Any]:
    """Run pytest; a row of the table."""
    before, began = used_s(), time.monotonic()
    said = played(arguments, profile).strip()
    cpu_s, clock_s = used_s() - before, time.monotonic() - began
    last = said.splitlines()[-1] if said else "nothing was said"
    return {
        "what": what,
        "outcome": last.strip("= ").partition(" in ")[0],
        "cpu_s": round(cpu_s, 1),
        "clock_s": round(clock_s, 1),
    }


def long_tests() -> set[str]:
    """Functions of which a case takes more than `LONG_S` by the clock, in one process."""
    said = played(["-m", SHORT, "--durations=0"], "quick")
    took = re.findall(r"^([\d.]+)s (?:call|setup) +([^\s\[]+)", said, re.MULTILINE)
    return {test for seconds, test in took if float(seconds) > LONG_S}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    if args.long:
        LONG.write_text("".join(f"{test}\n" for test in sorted(long_tests())))
    topic = json.loads(TABLE.read_text())
    (table,) = (table for table in topic["tables"] if "clock_s" in table["columns"])
    rows = {row["what"]: row for row in table["rows"]}
    jobs = [("scripts/test --quick", ["-m", QUICK], "quick")] if args.quick else []
    jobs += [(str(Path(file)), [file], "swarm") for file in args.files]
    for what, arguments, profile in jobs:
        rows[what] = measured(what, arguments, profile)
        print(rows[what], flush=True)
        table["rows"] = sorted(rows.values(), key=lambda row: -row["cpu_s"])
        table["date"] = time.strftime("%Y-%m-%d")
        TABLE.write_text(json.dumps(topic, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
