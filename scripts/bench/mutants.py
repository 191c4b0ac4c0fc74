"""Which ring of tests notices each rule of the protocol when it is broken, and after how long.

    python scripts/bench/mutants.py --list
    python scripts/bench/mutants.py --only count-a-duplicate
    python scripts/bench/mutants.py --share 1/4 --json docs/benchmarks/mutants.json

A mutation (scripts/bench/mutations.py) changes one place of the shipped code. The rings, cheapest first; the
first that notices it ends the matter:

    pure    the tests of the wing of swarm/ that is changed: tests/protocol, policy, wire or model
    peers   the files of tests/peers, or tests/net/directory, that are about the code that is changed
    sim     random schedules of the shipped classes in virtual time, until one is violated

All is imported and collected once. Each mutation then gets a fork of that process, in which the code of the
functions that it changes is exchanged: no file is written, and nothing is imported again.

A test that fails without any mutation notices nothing: what fails is run again in a healthy fork, and left
out if it fails there too. A ring that outlasts its limit has noticed as well: something waits for ever.
With --json the rows of mutations that were run replace theirs in the table, and the test that noticed a
mutation last time is asked first; `tables.py` makes the page.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.mutations import MUTATIONS, Mutation  # noqa: E402

RINGS = ("pure", "peers", "sim")
PURE = {
    "swarm": ("tests/test_data.py", "tests/test_run.py"),
    "swarm/audit": ("tests/audit",),
    "swarm/manifest": ("tests/test_run.py",),
    "swarm/model": (
        "tests/model/test_stage.py",
        "tests/model/test_fixed_point.py",
        "tests/model/test_reference_resumes.py",
    ),
    "swarm/model/graph": (
        "tests/model/graph/test_own_functions.py",
        "tests/model/graph/test_stage_module.py",
        "tests/model/graph/test_strange_configs.py",
    ),
    "swarm/policy": ("tests/policy",),
    "swarm/protocol": ("tests/protocol", "tests/policy"),
    "swarm/wire": ("tests/wire",),
}
"""Wing of swarm/ -> its tests."""
LIMIT_S = {"pure": 120.0, "peers": 240.0, "sim": 300.0}
"""CPU time of one ring and mutation: several times what the ring takes with healthy code."""
IDLE_S = 40.0
"""A test that uses no CPU time for so long waits for ever."""
SCHEDULES = 200
ALL_PEERS = ("tests/peers",)
WINGS = ("peers", "net", "watch")
NOT_HERE = "not process and not net and not slow"
"""Tests that start processes are no part of what is measured here."""
FOR_EVER = "waits for ever"


class Verdict(NamedTuple):
    """What one ring said of one mutation."""

    ring: str
    noticed_by: str
    """Empty: it did not notice."""
    seconds: float


# --- breaking a rule in a running process ---


def break_rule(mutation: Mutation) -> None:
    """Exchange the code that a mutation changes, for all that have imported it.

    Raises:
        ValueError: nothing that could be exchanged is changed.
    """
    module = importlib.import_module(mutation.file.removesuffix(".py").replace("/", "."))
    source = (ROOT / mutation.file).read_text()
    mutated = mutation.applied(source)
    gc.unfreeze()  # else they would not be found
    live = [
        found
        for found in gc.get_objects()
        if type(found) is FunctionType and found.__code__.co_filename == module.__file__
    ]
    changed = False
    before, after = (codes_of(compile(text, str(module.__file__), "exec")) for text in (source, mutated))
    for name, codes in after.items():
        for old, new in zip(before.get(name, ()), codes, strict=True):
            if (old.co_code, old.co_consts, old.co_names) != (new.co_code, new.co_consts, new.co_names):
                for function in live:
                    code = function.__code__
                    if (code.co_name, code.co_firstlineno) == (old.co_name, old.co_firstlineno):
                        function.__code__ = new
                        changed = True
    for statement in changed_values(source, mutated):
        code = compile(ast.Module([statement], []), str(module.__file__), "exec")
        exec(code, module.__dict__)
        changed = True
    if not changed:
        raise ValueError(f"{mutation.name} changes nothing that can be exchanged")


def codes_of(code: CodeType, within: str = "") -> dict[str, list[CodeType]]:
    """The functions of a module or class by their qualified names, in the order of their lines.

    Not those inside of other functions: they come with them.
    """
    found: dict[str, list[CodeType]] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & inspect.CO_OPTIMIZED:  # the body of a class is not
                found.setdefault(within + inner.co_name, []).append(inner)
            else:
                for name, codes in codes_of(inner, f"{within}{inner.co_name}.").items():
                    found.setdefault(name, []).extend(codes)
    return found


def changed_values(source: str, mutated: str) -> Iterator[ast.stmt]:
    """The assignments of a module that differ, as they are now."""
    for old, new in zip(ast.parse(source).body, ast.parse(mutated).body, strict=True):
        if isinstance(new, (ast.Assign, ast.AnnAssign)) and ast.dump(old) != ast.dump(new):
            yield new


# --- forks ---


class Ended(NamedTuple):
    """What became of a fork."""

    said: str
    """What its work returned, or `FOR_EVER` with the last note."""
    cpu_s: float


def forked(work: Callable[[Callable[[str], None]], str], *, limit_s: float) -> Ended:
    """`work` in a fork of this process; it is given a function that notes what it is at.

    `limit_s`: of CPU time, so that other work on the machine changes nothing; or it does nothing for
    `IDLE_S`.
    """
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as told:
        process = os.fork()
        if process == 0:
            _work(work, told.fileno())
        used_s, moved_at = 0.0, time.monotonic()
        while not (ended := os.wait4(process, os.WNOHANG))[0]:
            now_s = _cpu_s(process)
            if now_s > used_s:
                used_s, moved_at = now_s, time.monotonic()
            if used_s > limit_s or time.monotonic() - moved_at > IDLE_S:
                os.killpg(process, signal.SIGKILL)
                ended = os.wait4(process, 0)
                break
            time.sleep(0.02)
        told.seek(0)
        *notes, last = told.read().split("\n")
    cpu_s = ended[2].ru_utime + ended[2].ru_stime
    if last.startswith("told "):
        return Ended(last.removeprefix("told "), cpu_s)
    if last:
        raise RuntimeError(last)
    return Ended(f"{notes[-1]} {FOR_EVER}" if notes else FOR_EVER, cpu_s)


def _cpu_s(process: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work(work: Callable[[Callable[[str], None]], str], out: int) -> None:
    """In the fork: `work`, and the end of the process."""
    text = "died of nothing"
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)

        def note(at: str) -> None:
            os.write(out, f"{at}\n".encode())

        text = f"told {work(note)}"
    except BaseException as error:  # noqa: BLE001  whatever it is, this process ends here
        text = f"died {type(error).__name__}: {error}"
    finally:
        os.write(out, text.replace("\n", " ").encode())
        os._exit(0)


# --- rings ---


def first_failure(items: Sequence[pytest.Item], note: Callable[[str], None]) -> str:
    """The name of the first test that fails."""
    from _pytest.runner import runtestprotocol

    for item, following in itertools.zip_longest(items, items[1:]):
        note(item.nodeid)
        if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):
            return item.nodeid
    return ""


def first_violation(note: Callable[[str], None]) -> str:
    """What the first of `SCHEDULES` random schedules violates that violates anything."""
    from peers.sim.__main__ import played

    for outcome, _ in played(range(SCHEDULES), jobs=1):
        note(f"the schedule after seed {outcome.seed}")
        if outcome.violation:
            return short(f"seed {outcome.seed}: {outcome.violation}")
    return ""


class Rings:
    """A pytest plugin: instead of the tests that were collected it runs the mutations."""

    def __init__(
        self, chosen: Sequence[Mutation], rings: Sequence[str], table: Path | None, rows: Mapping[str, Any]
    ) -> None:
        self._chosen, self._rings, self._table, self._rows = chosen, rings, table, rows
        self._items: dict[str, pytest.Item] = {}
        self._fails_anyway: dict[str, bool] = {}
        self.survived = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        if "sim" in self._rings:
            importlib.import_module("peers.sim.__main__")
        gc.collect()
        gc.freeze()
        for mutation in self._chosen:
            verdicts = self._look(mutation)
            if not verdicts:
                continue
            said = row(mutation, verdicts)
            self.survived += not said["noticed_by"]
            print(f"{said['what']:36} {said['ring']:20} {said['seconds']:6} s  {said['noticed_by']}")
            if self._table:
                store(self._table, [said])
        return True

    def _look(self, mutation: Mutation) -> list[Verdict]:
        """Ask the rings, cheapest first, until one notices."""
        last_time = self._rows.get(mutation.name, {}).get("noticed_by", "")
        verdicts: list[Verdict] = []
        for ring in self._rings:
            targets = targets_of(ring, mutation)
            if not targets:
                continue
            if ring == "sim":
                found = self._ask(mutation, ring, first_violation)
            else:
                found = self._tests(mutation, ring, ordered(self._items, targets, last_time))
            verdicts.append(Verdict(ring, found.said, round(found.cpu_s, 2)))
            if found.said:
                break
        return verdicts

    def _tests(self, mutation: Mutation, ring: str, names: list[str]) -> Ended:
        cpu_s = 0.0
        while names:
            items = [self._items[name] for name in names]
            found = self._ask(mutation, ring, lambda note, items=items: first_failure(items, note))
            cpu_s += found.cpu_s
            if found.said not in self._items or not self._does_fail_anyway(found.said):
                return Ended(found.said, cpu_s)
            names = [name for name in names if name != found.said]
        return Ended("", cpu_s)

    def _ask(self, mutation: Mutation, ring: str, look: Callable[[Callable[[str], None]], str]) -> Ended:
        def broken(note: Callable[[str], None]) -> str:
            break_rule(mutation)
            return look(note)

        return forked(broken, limit_s=LIMIT_S[ring])

    def _does_fail_anyway(self, name: str) -> bool:
        """Whether a test fails without a mutation; asked once."""
        if name not in self._fails_anyway:
            item = [self._items[name]]
            fails = bool(forked(lambda note: first_failure(item, note), limit_s=LIMIT_S["peers"]).said)
            self._fails_anyway[name] = fails
            if fails:
                print(f"  left out, it fails as it is: {name}")
        return self._fails_anyway[name]


@functools.cache
def path_of(name: str) -> str:
    """The file of tests/peers, or of another wing, with that name."""
    (path,) = (path for wing in WINGS for path in (ROOT / "tests" / wing).rglob(f"{name}.py"))
    return path.relative_to(ROOT).as_posix()


def targets_of(ring: str, mutation: Mutation) -> tuple[str, ...]:
    """What a ring runs for a mutation, the likeliest first; nothing if it cannot see the code that is
    changed.
    """
    if ring == "sim":
        return ("peers.sim",)
    if ring == "peers":
        return tuple(path_of(name) for name in mutation.tests) or ALL_PEERS
    path = Path(mutation.file)
    found = PURE.get(path.parent.as_posix(), ())
    own = Path("tests", *path.parent.parts[1:], f"test_{path.stem}.py").as_posix()
    return tuple(dict.fromkeys((own, *found))) if found else ()


def ordered(tests: Iterable[str], targets: Sequence[str], last_time: str) -> list[str]:
    """Those of the tests that are in the targets, by these; first of all the one that noticed last time."""

    def place(test: str) -> int:
        file = test.partition("::")[0]
        found = (i for i, target in enumerate(targets) if file == target or file.startswith(f"{target}/"))
        return next(found, len(targets))

    chosen = [(test != last_time, place(test), i, test) for i, test in enumerate(tests)]
    return [test for *_, test in sorted(one for one in chosen if one[1] < len(targets))]


# --- the table ---


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 140 else f"{text[:137]}..."


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
        "seconds": round(sum(verdict.seconds for verdict in verdicts), 2) if verdicts else None,
    }


def known(path: Path | None) -> Mapping[str, dict[str, Any]]:
    """The rows of the table, by mutation."""
    if path is None or not path.exists():
        return {}
    return {row["what"]: row for row in json.loads(path.read_text())["tables"][0]["rows"]}


def store(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Put rows into the table in their places; what was not run keeps its row, or is said not to be run."""
    topic = json.loads(path.read_text())
    table = topic["tables"][0]
    by_name = {**known(path), **{row["what"]: row for row in rows}}
    table["rows"] = [by_name.get(mutation.name) or row(mutation, []) for mutation in MUTATIONS]
    table["date"], table["machine"] = time.strftime("%Y-%m-%d"), _machine()
    path.write_text(json.dumps(topic, indent=1, ensure_ascii=False) + "\n")


@functools.cache
def _machine() -> str:
    """As all benchmarks name it. Asked in another process: what it imports is not for the forks."""
    script = "from scripts.bench.common.harness import machine; print(machine())"
    told = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return told.stdout.strip()


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
    table = args.json.resolve() if args.json else None
    rows = known(table)
    chosen = [m for m in MUTATIONS if not args.only or m.name in args.only]
    if args.survivors:
        chosen = [m for m in chosen if not rows.get(m.name, {}).get("noticed_by")]
    first, every = args.share
    chosen = chosen[first - 1 :: every]
    if args.list:
        for mutation in chosen:
            print(f"{mutation.name:36} {mutation.file}\n    {mutation.goes_wrong}")
        return 0
    rings = [ring for ring in RINGS if not args.ring or ring in args.ring]
    targets = {target for ring in rings if ring != "sim" for m in chosen for target in targets_of(ring, m)}
    there = sorted(target for target in targets if (ROOT / target).exists())
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "noticing"}
    words = ["-q", "-s", "-p", "no:cacheprovider", "--timeout=0", "-m", NOT_HERE]
    plugin = Rings(chosen, rings, table, rows)
    code = pytest.main([*words, *(there or ["tests/test_mutants.py"])], plugins=[plugin])
    return 1 if plugin.survived else 2 if code not in (0, 5) else 0


if __name__ == "__main__":
    sys.exit(main())
