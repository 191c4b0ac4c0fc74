"""`swarm check`: is this machine fit to be a peer? Every line says what is, and what to do if it is wrong."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from peers.programs.tool_options import CheckOptions
from peers.storage import cache_folder
from peers.system import everywhere
from swarm.errors import SetupError, SwarmError, printable

MIN_FREE_BYTES = 1_500_000_000
"""A CPU peer's own overhead (below 600 MB with torch) and room for a small stage."""

MIN_DISK_BYTES = 1_000_000_000
"""For the cache of tokens and two checkpoints of a small stage."""

RELEASED = 1_767_225_600
"""2026-01-01, before the first release of this program: a clock that shows less was never set."""

CLOCK_DRIFT_S = 0.05
"""Wall clock against monotonic clock over `CLOCK_SAMPLE_S`: more means that it is being stepped."""

CLOCK_SAMPLE_S = 0.2

REINSTALL = "remove .venv; run scripts/demo again"


class Finding(NamedTuple):
    """One line."""

    name: str
    found: str
    """What is, in words."""
    fix: str = ""
    """What to do; empty: all is well."""

    @property
    def ok(self) -> bool:
        return not self.fix


def check_python(version: Sequence[int] | None = None) -> Finding:
    """3.10 or newer, 64 bit, Linux or macOS."""
    version = sys.version_info[:3] if version is None else version
    words = f"{'.'.join(map(str, version[:3]))}, {platform.system()} {platform.machine()}"
    fix = "use Linux, macOS, or WSL 2 on Windows" if sys.platform == "win32" else ""
    if tuple(version[:2]) < (3, 10):
        fix = "install Python 3.10 or newer; remove .venv; run again"
    return Finding("python", words, fix)


def check_torch() -> Finding:
    """It imports, and a product is right."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", f"does not import: {error}", REINSTALL)
    right = float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()) == 512.0
    words = f"{torch.__version__}, {torch.get_num_threads()} threads"
    return Finding("torch", words) if right else Finding("torch", f"{words}: wrong result", REINSTALL)


def check_device(name: str, *, least_bytes: int = MIN_FREE_BYTES) -> Finding:
    """It exists and has memory to spare."""
    from peers.device import NO_GPU, choose_device, describe

    try:
        import torch

        device = describe(choose_device(name))
        misses = name == "auto" and torch.version.cuda is not None and not torch.cuda.is_available()
    except SetupError as error:
        return Finding("device", f"{name}: not usable", error.text)
    except (RuntimeError, ImportError) as error:  # the CUDA driver has many ways to be broken
        words = str(error) or "it fails without a word"
        return Finding("device", words.splitlines()[0], "try --device cpu, then nvidia-smi")
    words = f"{device.name} ({device.model}), {gb(device.free_bytes)} of {gb(device.total_bytes)} free"
    words += f"; {_fitting(device.free_bytes, on_gpu=device.name != 'cpu')}"
    words += f"; this torch ({torch.__version__}) {NO_GPU}" if misses else ""
    fix = f"free at least {gb(least_bytes)}: stop other programs"
    return Finding("device", words, fix if device.free_bytes < least_bytes else "")


def _fitting(free_bytes: int, *, on_gpu: bool) -> str:
    """How large a stage may be, before its microbatches take anything."""
    from peers.owner.memory_limit import weight_bytes
    from swarm.manifest import OptimizerSpec

    def millions(host_sums: bool, moments: Literal["float32", "bfloat16"]) -> str:
        each = weight_bytes(OptimizerSpec(lr=1.0, moments=moments), host_sums=host_sums)
        return f"{free_bytes / each / 1e6:,.0f} million weights ({each} bytes each)"

    words = f"fits stages of up to {millions(False, 'float32')}"
    words += f", with bfloat16 moments {millions(False, 'bfloat16')}"
    words += f", with --host-sums too {millions(True, 'bfloat16')}" if on_gpu else ""
    return words + "; larger ones are refused: their run needs more of them (model.stages), one for each card"


def check_disk(folder: Path | None = None, *, least_bytes: int = MIN_DISK_BYTES) -> Finding:
    """The cache folder can be written and has room."""
    at = folder = folder or cache_folder()
    while not os.access(at, os.F_OK) and at != at.parent:  # `at.exists` raises where one may not look
        at = at.parent
    if not os.access(at, os.W_OK | os.X_OK):
        return Finding("disk", f"{at} cannot be written", "set SWARM_CACHE to a folder of yours")
    free = shutil.disk_usage(at).free
    fix = f"free at least {gb(least_bytes)}, or set SWARM_CACHE to a folder on another disk"
    return Finding("disk", f"{gb(free)} free for {folder}", fix if free < least_bytes else "")


def is_local(host: str) -> bool:
    """Whether only this machine can dial a program that listens there."""
    return host in ("127.0.0.1", "::1", "localhost")


def probe_p2pd(host: str = "127.0.0.1", port: int = 0) -> tuple[str, ...]:
    """Where p2pd listens, once it does. Blocks up to 15 s. Raises SetupError: it does not start."""
    from peers.net.p2pd import Daemon, DaemonOptions

    async def probe() -> tuple[str, ...]:
        daemon = Daemon.spawn(DaemonOptions(host=host, port=port))
        try:
            await daemon.ready()
            return daemon.addresses
        finally:
            daemon.close_now()

    return asyncio.run(probe())


def check_p2pd(host: str, port: int, probe: Callable[[str, int], tuple[str, ...]] = probe_p2pd) -> Finding:
    """The libp2p daemon starts, and can listen on the port."""
    try:
        addresses = probe(host, port)
    except SetupError as error:
        fix = f"mend what it says, or {REINSTALL}; p2pd needs a writable /tmp, and Linux or macOS"
        return Finding("p2pd", error.text, fix)
    except (ImportError, OSError) as error:
        no_room = "temporary" in str(error)
        fix = "make room in /tmp, or set TMPDIR to a folder of yours" if no_room else REINSTALL
        return Finding("p2pd", f"does not start: {error}", fix)
    reach = "; reachable from this machine only" if is_local(host) else ""
    return Finding("p2pd", f"starts and listens on {', '.join(addresses)}{reach}")


def check_reach(options: CheckOptions) -> Finding:
    """Whether others can dial this machine, as peers of the run find; else whether one of them relays for it.

    Being reached through a relay is in order: it works, and `found` says what would be better.
    """
    from peers.net.nat import find_reach, in_words, some_relay_takes_us, what_to_do
    from peers.net.p2pd import DaemonOptions
    from peers.net.p2pd_control import ControlError

    if not options.join:
        return Finding("reach", "not tried: give --join ADDRESS of a peer of the run, which dials back")
    daemon = DaemonOptions(host=options.host, port=options.port)
    try:
        found = asyncio.run(find_reach(daemon, options.join))
        relayed = found.kind == "closed" and asyncio.run(some_relay_takes_us(daemon, found.relays))
    except (SetupError, ControlError) as error:
        return Finding("reach", error.text, "see that p2pd can start and listen")
    if found.kind == "open" or relayed:
        return Finding("reach", in_words(found))
    if found.kind == "unknown":
        fix = "check that the peer at --join runs, and that its address is the one that it printed"
        return Finding("reach", in_words(found), fix)
    words = f"nobody can dial this machine ({found.why}), and no peer that was found relays for it"
    return Finding("reach", words, what_to_do(found))


def check_join(options: CheckOptions) -> Finding:
    """This program can join there: it speaks their protocol, and its clock agrees with theirs."""
    from peers.net.node import Node
    from peers.net.p2pd import DaemonOptions

    async def join() -> None:
        async with Node(options=DaemonOptions(host=options.host), join=options.join):
            pass

    try:
        asyncio.run(join())
    except SwarmError as error:
        return Finding("join", error.text, "mend what it says: swarm peer would end with it")
    return Finding("join", "the peers at --join speak this protocol, and their clocks agree with this one")


def check_clock(
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Finding:
    """The year is possible and the clock runs evenly.

    Records in the DHT expire by wall clock, so a clock that is wrong by more than some seconds makes a peer
    invisible. There is no reference to ask without a network: two things are looked at that show the usual
    faults, an unset clock and one that is being stepped.
    """
    first_wall, first = wall(), monotonic()
    sleep(CLOCK_SAMPLE_S)
    drift = (wall() - first_wall) - (monotonic() - first)
    words = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(first_wall))
    fix = "set it: timedatectl set-ntp true (or ask the administrator of this machine)"
    if first_wall < RELEASED:
        return Finding("clock", f"{words} is in the past", fix)
    if abs(drift) > CLOCK_DRIFT_S:
        return Finding("clock", f"{words}, jumped by {drift:+.2f} s while watched", fix)
    return Finding("clock", f"{words}, runs evenly")


def gb(size: int) -> str:
    """Bytes for people, in decimal units."""
    return f"{size / 1e9:.1f} GB"


def check_all(options: CheckOptions) -> list[Finding]:
    """Every check, in the order in which one failing makes the next fail. Blocks for a few seconds."""
    wide = "::" if all(one.startswith("/ip6/") for one in options.join) else everywhere()
    options = replace(options, host=options.host or (wide if options.join else "127.0.0.1"))
    findings = [check_python(), check_torch()]
    if findings[-1].ok:
        findings.append(check_device(options.device))
    findings += [check_disk(), check_p2pd(options.host, options.port)]
    if findings[-1].ok and not is_local(options.host):
        findings.append(check_reach(options))
        if findings[-1].ok and options.join:
            findings.append(check_join(options))
    elif findings[-1].ok and options.join:
        words = f"not tried: give --host 0.0.0.0, since {options.host} is seen by this machine only"
        findings.append(Finding("reach", words))
    findings.append(check_clock())
    return findings


def to_text(findings: Sequence[Finding]) -> str:
    """A line for each, and under a wrong one what to do."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{'ok   ' if finding.ok else 'WRONG'}  {finding.name:<7} {finding.found}")
        if not finding.ok:
            lines.append(f"               -> {finding.fix}")
    wrong = sum(not finding.ok for finding in findings)
    lines.append(f"{wrong} to fix, then run swarm check again." if wrong else "This machine can be a peer.")
    return printable("\n".join(lines))


def to_json(findings: Sequence[Finding]) -> str:
    ok = all(finding.ok for finding in findings)
    checks = [{"name": f.name, "ok": f.ok, "found": f.found, "fix": f.fix} for f in findings]
    return msgspec.json.encode({"ok": ok, "checks": checks}).decode()


async def run_check(options: CheckOptions) -> bool:
    """Check, print, and say whether all is well."""
    findings = await asyncio.to_thread(check_all, options)
    print(to_json(findings) if options.json else to_text(findings))
    return all(finding.ok for finding in findings)
