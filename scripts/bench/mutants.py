"""Which ring of tests notices each rule of the protocol when it is broken, and after how long.

    python scripts/bench/mutants.py --list
    python scripts/bench/mutants.py --only hand-over-and-keep
    python scripts/bench/mutants.py --share 1/4 --json docs/benchmarks/mutants.json

A mutation (scripts/bench/mutations.py) changes one place of the shipped code, in a copy of the tracked files.
The rings, cheapest first; the first that notices it ends the matter:

    pure    the tests of the wing of swarm/ that is changed: tests/protocol, policy, wire or model
    peers   the files of tests/peers that are about the code that is changed
    sim     random schedules of the shipped classes in virtual time, until one is violated

A test that fails without any mutation notices nothing: what fails is run again on the code as it is, and left
out if it fails there too. A ring that outlasts its limit has noticed as well: something waits for ever.
With --json the rows of mutations that were run replace theirs in the table, and the test that noticed a
mutation last time is asked first; `tables.py` makes the page.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.mutations import MUTATIONS, Mutation  # noqa: E402

RINGS = ("pure", "peers", "sim")
PURE = {
    "swarm/model": ("tests/model/test_stage.py", "tests/model/test_fixed_point.py"),
    "swarm/policy": ("tests/policy",),
    "swarm/protocol": ("tests/protocol", "tests/policy"),
    "swarm/wire": ("tests/wire",),
}
"""Wing of swarm/ -> its tests."""
TEST_S = 60
"""Limit for one test: virtual time stands still in one that goes round and round."""
LIMIT_S = {"pure": 180.0, "peers": 300.0, "sim": 300.0}
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


class Copies:
    """The tracked files twice, in a temporary folder: as they are, and with one mutation at a time."""

    def __init__(self, folder: Path) -> None:
        self._healthy, self._mutated = folder / "healthy", folder / "mutated"
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True,
        )  # fmt: skip
        for name in filter(None, tracked.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                for copy in (self._healthy, self._mutated):
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(ROOT / name, copy / name)
        self._fails_anyway: dict[str, bool] = {}

    def mutate(self, mutation: Mutation) -> None:
        (self._mutated / mutation.file).write_text(
            mutation.applied((self._healthy / mutation.file).read_text())
        )

    def restore(self, mutation: Mutation) -> None:
        shutil.copyfile(self._healthy / mutation.file, self._mutated / mutation.file)

    def notice(self, ring: str, targets: Sequence[str]) -> Verdict:
        """Let one ring look at the mutated copy as it is now."""
        began = time.monotonic()
        noticed = self._schedules() if ring == "sim" else self._tests(ring, targets)
        return Verdict(ring, noticed, round(time.monotonic() - began, 1))

    def _tests(self, ring: str, targets: Sequence[str]) -> str:
        left_out: list[str] = []
        until = time.monotonic() + LIMIT_S[ring]
        while True:
            code, said = _run(
                self._mutated, pytest_words(targets, left_out), limit_s=until - time.monotonic()
            )
            if code is None:
                return f"longer than {LIMIT_S[ring]:.0f} s"
            if code == 0:
                return ""
            failed = failures(said)
            if not failed:
                return f"pytest ended with {code}: {last_line(said)}"
            if not self._does_fail_anyway(failed[0]):
                return failed[0]
            left_out.append(failed[0])

    def _does_fail_anyway(self, test: str) -> bool:
        """Whether a test fails without a mutation; asked once."""
        if test not in self._fails_anyway:
            code, _ = _run(self._healthy, pytest_words([test], []), limit_s=2 * TEST_S)
            self._fails_anyway[test] = code != 0
            if code != 0:
                print(f"  left out, it fails as it is: {test}", flush=True)
        return self._fails_anyway[test]

    def _schedules(self) -> str:
        until = time.monotonic() + LIMIT_S["sim"]
        for seed in range(0, SCHEDULES, SCHEDULES_AT_ONCE):
            words = ["-m", "peers.sim", "--schedules", str(SCHEDULES_AT_ONCE), "--seed", str(seed)]
            code, said = _run(self._mutated, words, limit_s=until - time.monotonic())
            if code is None:
                return f"longer than {LIMIT_S['sim']:.0f} s"
            if code != 0:
                return violation(said) or f"peers.sim ended with {code}: {last_line(said)}"
        return ""


def _run(folder: Path, words: Sequence[str], *, limit_s: float) -> tuple[int | None, str]:
    """Exit code of Python in a copy, None if it was ended at its limit; and all that was said."""
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return None, said
    return process.returncode, said


def pytest_words(targets: Sequence[str], left_out: Iterable[str]) -> list[str]:
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", f"--timeout={TEST_S}"]
    return [*words, "-m", NOT_HERE, *targets, *(f"--deselect={test}" for test in left_out)]


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


def targets_of(ring: str, mutation: Mutation, last_time: str = "") -> tuple[str, ...]:
    """What a ring runs for a mutation, the likeliest first; nothing if it cannot see the code that is
    changed. `last_time`: the test that noticed it then.
    """
    if ring == "sim":
        return ("peers.sim",)
    path = Path(mutation.file)
    if ring == "pure":
        found = list(PURE.get(path.parent.as_posix(), ()))
        own = f"tests/{path.parent.name}/test_{path.stem}.py"
        if found and (ROOT / own).exists():
            found.insert(0, own)
    else:
        found = [f"tests/peers/{name}.py" for name in mutation.tests] or list(ALL_PEERS)
    if any(last_time.startswith(target) for target in found) and _is_there(last_time):
        found.insert(0, last_time)
    return tuple(dict.fromkeys(found))


def _is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    function = name.partition("[")[0].rpartition("::")[2]
    return path.is_file() and "..." not in test and f"def {function}(" in path.read_text(encoding="utf-8")


def look(copies: Copies, mutation: Mutation, rings: Sequence[str], last_time: str) -> list[Verdict]:
    """Ask the rings, cheapest first, until one notices."""
    verdicts: list[Verdict] = []
    copies.mutate(mutation)
    try:
        for ring in rings:
            targets = targets_of(ring, mutation, last_time)
            if targets:
                verdicts.append(copies.notice(ring, targets))
                if verdicts[-1].noticed_by:
                    break
    finally:
        copies.restore(mutation)
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
        "noticed_by": found.noticed_by if found else "",
        "seconds": round(sum(verdict.seconds for verdict in verdicts), 1) if verdicts else None,
    }


def known(path: Path | None) -> Mapping[str, dict[str, Any]]:
    """The rows of the table, by mutation."""
    if path is None or not path.exists():
        return {}
    return {row["what"]: row for row in json.loads(path.read_text())["tables"][0]["rows"]}


def store(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Put rows into the table in their places; what was not run keeps its row, or is said not to be run."""
    from scripts.bench.harness import machine

    topic = json.loads(path.read_text())
    table = topic["tables"][0]
    by_name = {**known(path), **{row["what"]: row for row in rows}}
    table["rows"] = [by_name.get(mutation.name) or row(mutation, []) for mutation in MUTATIONS]
    table["date"], table["machine"] = time.strftime("%Y-%m-%d"), machine()
    path.write_text(json.dumps(topic, indent=1, ensure_ascii=False) + "\n")


def share_of(text: str) -> tuple[int, int]:
    """`2/4`: the second quarter."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 2/4")
    return int(match[1]), int(match[2])


def main() -> int:
    """Exit code 0: every mutation that was run was noticed; 1: one survived; 2: wrong usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the mutations, and run nothing")
    parser.add_argument("--only", action="append", metavar="NAME", help="this one; may be repeated")
    parser.add_argument("--share", type=share_of, default=(1, 1), metavar="K/N", help="every N-th, from K")
    parser.add_argument("--survivors", action="store_true", help="those that the table has no test for")
    parser.add_argument("--ring", action="append", choices=RINGS, help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="the table whose rows are renewed, after each mutation")
    args = parser.parse_args()
    names = {mutation.name for mutation in MUTATIONS}
    if unknown := sorted(set(args.only or ()) - names):
        parser.error(f"there is no mutation {', '.join(unknown)}; --list names them")
    table = known(args.json)
    chosen = [m for m in MUTATIONS if not args.only or m.name in args.only]
    if args.survivors:
        chosen = [m for m in chosen if not table.get(m.name, {}).get("noticed_by")]
    first, every = args.share
    chosen = chosen[first - 1 :: every]
    if args.list:
        for mutation in chosen:
            print(f"{mutation.name:34} {mutation.file}\n    {mutation.goes_wrong}")
        return 0
    rings = [ring for ring in RINGS if not args.ring or ring in args.ring]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = Copies(Path(folder))
        for mutation in chosen:
            verdicts = look(copies, mutation, rings, table.get(mutation.name, {}).get("noticed_by", ""))
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
