"""Which ring of tests notices each rule of the protocol when it is broken, and after how long.

    python scripts/bench/mutants.py --list
    python scripts/bench/mutants.py --only hand-over-and-keep
    python scripts/bench/mutants.py --ring protocol --json docs/benchmarks/mutants.json

A mutation (scripts/bench/mutations.py) changes one place of the shipped code, in a copy of the tracked files.
The rings, cheapest first; the first that notices it ends the matter:

    protocol   tests/protocol and tests/policy, for what lies in swarm/
    peers      the files of tests/peers that are about the code that is changed
    sim        random schedules of the shipped classes in virtual time, until one is violated

A test that fails without any mutation notices nothing: each ring runs once on the copy as it is, and what
fails there is left out. A ring that outlasts its limit has noticed as well: something waits for ever.
With --json the rows of mutations that were run replace theirs in the table; `tables.py` makes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.mutations import MUTATIONS, Mutation  # noqa: E402

RINGS = ("protocol", "peers", "sim")
LIMIT_S = {"protocol": 180.0, "peers": 300.0, "sim": 300.0}
"""Of one ring and mutation; many times what the ring takes on a machine with nothing else to do."""
SCHEDULES = 200
SCHEDULES_AT_ONCE = 40
ALL_PEERS = ("tests/peers",)
NOT_HERE = "not process and not net and not slow"
"""Tests that start processes are no part of what is measured here."""


class Verdict(NamedTuple):
    """What one ring said of one mutation."""

    ring: str
    noticed_by: str
    """Empty: it did not notice."""
    seconds: float


class Copy:
    """The tracked files, in a temporary folder, with one mutation at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True,
        )  # fmt: skip
        for name in filter(None, tracked.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, target)
        self._red: dict[tuple[str, ...], list[str]] = {}

    def mutate(self, mutation: Mutation) -> None:
        (self._folder / mutation.file).write_text(mutation.applied((ROOT / mutation.file).read_text()))

    def restore(self, mutation: Mutation) -> None:
        (self._folder / mutation.file).write_text((ROOT / mutation.file).read_text())

    def red(self, targets: Sequence[str]) -> list[str]:
        """The tests that fail without a mutation; asked once, before the first one."""
        key = tuple(targets)
        if key not in self._red:
            _, said = self._run(pytest_words(targets, [], stop=False), limit_s=1200)
            self._red[key] = failures(said)
            for test in self._red[key]:
                print(f"  left out, it fails as it is: {test}", flush=True)
        return self._red[key]

    def notice(self, ring: str, targets: Sequence[str]) -> Verdict:
        """Let one ring look at the copy as it is now."""
        began = time.monotonic()
        noticed = self._schedules() if ring == "sim" else self._tests(ring, targets)
        return Verdict(ring, noticed, round(time.monotonic() - began, 1))

    def _tests(self, ring: str, targets: Sequence[str]) -> str:
        words = pytest_words(targets, self._red.get(tuple(targets), []), stop=True)
        code, said = self._run(words, limit_s=LIMIT_S[ring])
        if code is None:
            return f"longer than {LIMIT_S[ring]:.0f} s"
        if code == 0:
            return ""
        return next(iter(failures(said)), f"pytest ended with {code}: {last_line(said)}")

    def _schedules(self) -> str:
        until = time.monotonic() + LIMIT_S["sim"]
        for seed in range(0, SCHEDULES, SCHEDULES_AT_ONCE):
            words = ["-m", "peers.sim", "--schedules", str(SCHEDULES_AT_ONCE), "--seed", str(seed)]
            code, said = self._run(words, limit_s=until - time.monotonic())
            if code is None:
                return f"longer than {LIMIT_S['sim']:.0f} s"
            if code != 0:
                return violation(said) or f"peers.sim ended with {code}: {last_line(said)}"
        return ""

    def _run(self, words: Sequence[str], *, limit_s: float) -> tuple[int | None, str]:
        """Exit code, None if it was ended at its limit, and all that was said."""
        env = {**os.environ, "PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1",
               "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, *words], cwd=self._folder, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            return None, said
        return process.returncode, said


def pytest_words(targets: Sequence[str], left_out: Iterable[str], *, stop: bool) -> list[str]:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", NOT_HERE, *targets]
    words += ["-x"] if stop else []
    return words + [f"--deselect={test}" for test in left_out]


def failures(said: str) -> list[str]:
    """The tests that a run of pytest names as failed or broken."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)


def violation(said: str) -> str:
    """The first violation in the last line of `peers.sim`."""
    try:
        found = json.loads(last_line(said))["rows"][0]["violations"]
    except (ValueError, LookupError):
        return ""
    return short(str(found[0])) if found else ""


def last_line(said: str) -> str:
    lines = said.strip().splitlines()
    return lines[-1] if lines else "nothing was said"


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 140 else f"{text[:137]}..."


def targets_of(ring: str, mutation: Mutation) -> tuple[str, ...]:
    """What a ring runs for a mutation; nothing if the ring cannot see the code that is changed."""
    if ring == "protocol":
        return ("tests/protocol", "tests/policy") if mutation.file.startswith("swarm/") else ()
    if ring == "peers":
        return tuple(f"tests/peers/{name}.py" for name in mutation.tests) or ALL_PEERS
    return ("peers.sim",)


def look(copy: Copy, mutation: Mutation, rings: Sequence[str]) -> list[Verdict]:
    """Ask the rings, cheapest first, until one notices."""
    verdicts: list[Verdict] = []
    for ring in rings:
        targets = targets_of(ring, mutation)
        if not targets:
            continue
        if ring != "sim":
            copy.red(targets)
        copy.mutate(mutation)
        try:
            verdicts.append(copy.notice(ring, targets))
        finally:
            copy.restore(mutation)
        if verdicts[-1].noticed_by:
            break
    return verdicts


def row(mutation: Mutation, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """A row of the table."""
    found = next((verdict for verdict in verdicts if verdict.noticed_by), None)
    asked = [verdict.ring for verdict in verdicts]
    return {
        "what": mutation.name,
        "file": mutation.file,
        "goes_wrong": mutation.goes_wrong,
        "ring": found.ring if found else f"none of {', '.join(asked)}" if asked else "not run",
        "noticed_by": short(found.noticed_by) if found else "",
        "seconds": round(sum(verdict.seconds for verdict in verdicts), 1) if verdicts else None,
    }


def store(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Put rows into the table in their places; what was not run keeps its row, or is said not to be run."""
    from scripts.bench.harness import machine

    topic = json.loads(path.read_text())
    table = topic["tables"][0]
    known = {row["what"]: row for row in table["rows"]} | {row["what"]: row for row in rows}
    table["rows"] = [known.get(mutation.name) or row(mutation, []) for mutation in MUTATIONS]
    table["date"], table["machine"] = time.strftime("%Y-%m-%d"), machine()
    path.write_text(json.dumps(topic, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    """Exit code 0: every mutation that was run was noticed; 1: one survived; 2: wrong usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the mutations, and run nothing")
    parser.add_argument("--only", action="append", metavar="NAME", help="this one; may be repeated")
    parser.add_argument("--ring", action="append", choices=RINGS, help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="the table whose rows are renewed, after each mutation")
    args = parser.parse_args()
    names = {mutation.name for mutation in MUTATIONS}
    if unknown := sorted(set(args.only or ()) - names):
        parser.error(f"there is no mutation {', '.join(unknown)}; --list names them")
    chosen = [m for m in MUTATIONS if not args.only or m.name in args.only]
    if args.list:
        for mutation in chosen:
            print(f"{mutation.name:34} {mutation.file}\n    {mutation.goes_wrong}")
        return 0
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        for mutation in chosen:
            verdicts = look(copy, mutation, [ring for ring in RINGS if not args.ring or ring in args.ring])
            if not verdicts:
                continue
            said = row(mutation, verdicts)
            survived += not said["noticed_by"]
            print(f"{said['what']:34} {said['ring']:20} {said['seconds']:6} s  {said['noticed_by']}",
                  flush=True)  # fmt: skip
            if args.json:
                store(args.json, [said])
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
