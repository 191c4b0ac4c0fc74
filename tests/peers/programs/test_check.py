"""`swarm check`: each line says what is, and what to do when it is wrong."""

from __future__ import annotations

import asyncio
import builtins
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers.net.identity import Identity
from peers.net.node import Node
from peers.programs import check
from peers.programs.check import Finding, check_all, run_check, to_json, to_text
from peers.programs.tool_options import CheckOptions
from swarm.errors import SetupError


def wrong(finding: Finding, found: str, fix: str) -> None:
    """The finding is bad news and says both."""
    assert not finding.ok
    assert found in finding.found
    assert fix in finding.fix
    assert f"-> {finding.fix}" in to_text([finding])


def good(finding: Finding) -> None:
    assert finding.ok, finding
    assert finding.found
    assert not finding.fix


def test_this_python_is_fit_and_an_old_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    good(check.check_python())
    wrong(check.check_python((3, 9, 18)), "3.9.18", "install Python 3.10 or newer")
    monkeypatch.setattr("sys.platform", "win32")
    wrong(check.check_python(), "", "use Linux")


def test_torch_works_or_is_to_be_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    good(check.check_torch())
    real = builtins.__import__

    def no_torch(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise OSError("libtorch_cpu.so: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    wrong(check.check_torch(), "libtorch_cpu.so", "remove .venv")


def test_torch_that_computes_nonsense_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "ones", torch.zeros)
    wrong(check.check_torch(), "wrong result", "remove .venv")


def test_a_device_is_there_and_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    good(check.check_device("cpu", least_bytes=1))
    wrong(check.check_device("cpu", least_bytes=10**15), "free", "free at least 1000000.0 GB")
    assert check._fitting(24 * 10**9, on_gpu=True) == (
        "fits stages of up to 1,000 million weights (24 bytes each), with bfloat16 moments 1,200 million "
        "weights (20 bytes each), with --host-sums too 2,000 million weights (12 bytes each); larger ones "
        "are refused: their run needs more of them (model.stages), one for each card"
    )
    assert "host-sums" not in check.check_device("cpu").found
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = check.check_device("auto", least_bytes=1)
    good(found)
    assert "; this torch (" in found.found and "sees no GPU: is its driver there" in found.found
    assert "torch" not in check.check_device("cpu", least_bytes=1).found, "who asks for the CPU knows"
    wrong(check.check_device("abacus"), "abacus: not usable", "take auto, cpu, cuda")


@pytest.mark.parametrize(
    ("told", "found"),
    [("CUDA error: unknown error\nmore of it", "CUDA error: unknown error"), ("", "it fails")],
)
def test_a_broken_driver_is_a_finding_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, told: str, found: str
) -> None:
    def broken(wish: str) -> str:
        raise RuntimeError(told)

    monkeypatch.setattr("peers.device.choose_device", broken)
    wrong(check.check_device("cuda"), found, "nvidia-smi")


def test_the_cache_has_to_be_writable_and_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good(check.check_disk(tmp_path / "not" / "yet", least_bytes=1))
    wrong(check.check_disk(tmp_path, least_bytes=10**18), "free for", "SWARM_CACHE")
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    wrong(check.check_disk(tmp_path), "cannot be written", "SWARM_CACHE")

    def closed(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", closed)  # as in a folder that only its owner may look into
    wrong(check.check_disk(tmp_path / "in"), "cannot be written", "SWARM_CACHE")


def refused(text: str) -> Callable[[str, int], tuple[str, ...]]:
    """A p2pd that does not start."""

    def probe(host: str, port: int) -> tuple[str, ...]:
        raise SetupError(text)

    return probe


def listening(host: str, port: int) -> tuple[str, ...]:
    """A p2pd that starts."""
    return (f"/ip4/{host}/tcp/{port}",)


def test_what_p2pd_says_is_passed_on() -> None:
    good(check.check_p2pd("127.0.0.1", 0, listening))
    wrong(check.check_p2pd("127.0.0.1", 0, refused("p2pd is missing")), "p2pd is missing", "Linux or macOS")


def test_loopback_is_said_to_be_for_this_machine_only() -> None:
    assert "this machine only" in check.check_p2pd("127.0.0.1", 0, listening).found
    assert "this machine only" not in check.check_p2pd("0.0.0.0", 0, listening).found


@pytest.mark.parametrize(("said", "fix"), [("no usable temporary folder", "TMPDIR"), ("no module", ".venv")])
def test_of_a_p2pd_that_has_no_room_that_is_said(said: str, fix: str) -> None:
    def probe(*_: object) -> tuple[str, ...]:
        raise FileNotFoundError(said)

    wrong(check.check_p2pd("127.0.0.1", 0, probe), f"does not start: {said}", fix)


@pytest.mark.net
def test_the_real_p2pd_starts() -> None:
    good(check.check_p2pd("127.0.0.1", 0))


@pytest.mark.net
def test_a_port_in_use_and_an_address_of_another_machine_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong(check.check_p2pd("127.0.0.1", port), f"port {port} is already in use", "mend what it says")
    good(check.check_p2pd("127.0.0.1", port))
    wrong(check.check_p2pd("192.0.2.1", 0), "this machine has no address 192.0.2.1", "mend what it says")


def test_a_clock_that_was_never_set_or_jumps_is_found() -> None:
    good(check.check_clock())
    never = check.check_clock(lambda: 0.0, lambda: 0.0, lambda _: None)
    wrong(never, "1970-01-01 00:00:00 UTC is in the past", "timedatectl set-ntp true")
    times = iter((check.RELEASED + 0.0, check.RELEASED + 9.2))
    ticks = iter((5.0, 5.2))
    jumps = check.check_clock(lambda: next(times), lambda: next(ticks), lambda _: None)
    wrong(jumps, "jumped by +9.00 s", "timedatectl")


def test_nobody_is_asked_to_dial_a_port_that_cannot_be_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check_p2pd", lambda *_: Finding("p2pd", "the port is taken", "another port"))
    monkeypatch.setattr(check, "check_reach", lambda *_: pytest.fail("asked others to dial it"))
    names = [finding.name for finding in check_all(CheckOptions(device="cpu", host="0.0.0.0"))]
    assert names == ["python", "torch", "device", "disk", "p2pd", "clock"]


def test_who_listens_for_this_machine_only_is_not_told_to_forward_a_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fine = Finding("p2pd", "starts")
    monkeypatch.setattr(check, "check_p2pd", lambda *_: fine)
    monkeypatch.setattr(check, "check_reach", lambda *_: pytest.fail("asked others to dial 127.0.0.1"))
    found = check_all(CheckOptions(device="cpu", join=("192.0.2.7:1",), host="127.0.0.1"))
    told = {finding.name: finding.found for finding in found}
    assert told["reach"] == "not tried: give --host 0.0.0.0, since 127.0.0.1 is seen by this machine only"
    assert "reach" not in {finding.name for finding in check_all(CheckOptions(device="cpu"))}
    monkeypatch.setattr("peers.programs.check.everywhere", lambda: "0.0.0.0")
    monkeypatch.setattr(check, "check_reach", lambda options: Finding("reach", options.host))
    monkeypatch.setattr(check, "check_join", lambda options: Finding("join", options.host))
    found = check_all(CheckOptions(device="cpu", join=("192.0.2.7:1",)))
    assert {Finding("reach", "0.0.0.0"), Finding("join", "0.0.0.0")} <= {*found}, "others have to reach it"
    found = check_all(CheckOptions(device="cpu", join=("/ip6/2001:db8::7/tcp/1/p2p/x",)))
    assert {Finding("reach", "::"), Finding("join", "::")} <= {*found}, "who sees it by IPv6 dials it so"


def here(join: tuple[str, ...]) -> CheckOptions:
    """Nothing but loopback is used."""
    return CheckOptions(host="127.0.0.1", join=join)


FINDINGS = [
    Finding("python", "3.12.1"),
    Finding("port", "port 5 is taken", "take another"),
]


def test_the_text_says_how_many_to_fix() -> None:
    assert to_text(FINDINGS) == (
        "ok     python  3.12.1\n"
        "WRONG  port    port 5 is taken\n"
        "               -> take another\n"
        "1 to fix, then run swarm check again."
    )
    assert to_text(FINDINGS[:1]).endswith("\nThis machine can be a peer.")


def test_what_a_terminal_would_obey_is_not_in_the_text() -> None:
    finding = Finding("reach", "no\x1b[2J route", "call\r again")
    assert "no?[2J route\n               -> call? again\n" in to_text([finding])


async def test_json_is_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "check_all", lambda options: FINDINGS)
    assert not await run_check(CheckOptions(json=True))
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    assert said["checks"][1] == {
        "name": "port",
        "ok": False,
        "found": "port 5 is taken",
        "fix": "take another",
    }
    assert said == json.loads(to_json(FINDINGS))


def test_reach_is_found_with_peers_of_the_run_only() -> None:
    found = check.check_reach(CheckOptions(host="0.0.0.0"))
    good(found)
    assert found.found == "not tried: give --join ADDRESS of a peer of the run, which dials back"
    wrong(
        check.check_reach(here(("192.0.2.7:1",))),
        "is not the address of a peer",
        "p2pd",
    )
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}/p2p/{Identity(b'a' * 32).peer_id}"
        wrong(
            check.check_reach(here((dead,))),
            "Connection refused",
            "check that the peer at",
        )
        wrong(check.check_join(here((dead,))), "none of the peers to join at can be reached", "mend what")


@pytest.mark.net
async def test_a_machine_that_a_peer_can_dial_is_told_where() -> None:
    async with Node() as peer:
        found = await asyncio.to_thread(
            check.check_reach, CheckOptions(host="127.0.0.1", join=peer.addresses)
        )
        joined = await asyncio.to_thread(check.check_join, here(peer.addresses))
    good(found)
    good(joined)
    assert found.found.startswith("others can dial this machine at 127.0.0.1:")
