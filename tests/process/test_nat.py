"""Peers at home: nobody can dial them, and each believes to be 192.168.1.2. Their run goes on as any."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.events import Note, Started, Stepped
from scripts.bench.common.netlab import HOME, Lab, Link, Nat, why_not
from swarm.manifest import Run, audit_run
from tests.process.faults.test_exact import tiny
from tests.process.swarm_processes import ROOT, Program, Swarm, farthest

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=f"a network lab {why_not()}"),
]

STEPS = 12


def a_lab(servers: Sequence[str], homes: dict[str, Nat]) -> Lab:
    """Programs take hosts in this order: the first are public."""
    return Lab([*servers, *homes, "visitor"], nats=homes, link=Link(delay_s=0.01))


def counting() -> Run:
    return audit_run(stages=2, steps=1_000_000, microbatches_per_step=4)


def is_at_home(program: Program) -> None:
    """It was told so, and stands in the directory at its relays only."""
    assert any(event.text.startswith("nobody can dial this machine") for event in program.heard(Note))
    addresses = program.heard(Started)[0].addresses
    assert addresses
    for address in addresses:
        assert "/p2p-circuit/p2p/" in address and HOME not in address


def test_two_peers_that_can_only_dial_out_serve_two_stages_through_a_relay(tmp_path: Path) -> None:
    """Their routers show each peer another port, so no hole can be punched: every tensor passes the relay."""
    homes = {"home 1": Nat(symmetric=True), "home 2": Nat(symmetric=True), "home 3": Nat(symmetric=True)}
    with a_lab(["server"], homes) as lab, Swarm(tmp_path, counting(), lab=lab) as swarm:
        swarm.bootstrap()
        peers = [swarm.peer(0), swarm.peer(1)]
        swarm.all_serve()
        for peer in peers:
            is_at_home(peer)
        trainer = swarm.trainer("--window", "3")
        swarm.until_version(STEPS)
        swarm.leaves(trainer)
        assert swarm.assert_each_counted_once() >= STEPS
        assert {audit for found in swarm.audits().values() for audit in found} == {(0, 0)}
        hosts = lab.stats()["hosts"]
        assert hosts["server"]["sent"] > 0.5 * (hosts["home 1"]["sent"] + hosts["home 2"]["sent"])
        assert all(len(peer.heard(Stepped)) >= STEPS for peer in peers)


def test_at_home_behind_routers_that_keep_ports_tensors_pass_no_server(tmp_path: Path) -> None:
    """A peer at home for each stage, and the trainer: weights are those of one process, to rounding.

    libp2p believes its own address when four public peers say the same: hence four servers.
    """
    servers, homes = [f"server {i}" for i in range(4)], {f"home {i}": Nat() for i in range(4)}
    run = tiny(dtype="float64", codec="none", steps=1000)
    with a_lab(servers, homes) as lab, Swarm(tmp_path, run, lab=lab) as swarm:
        for _ in servers:
            program = swarm.start_bootstrap()
            swarm.until(lambda p=program: p.heard(Started), "a bootstrap does not start")
        peers = [swarm.peer(stage) for stage in range(run.S)]
        swarm.all_serve()
        for peer in peers:
            is_at_home(peer)
        trainer = swarm.trainer("--window", "3")
        swarm.until_version(3)
        by_servers, by_homes = 1.0, 1.0
        for _ in range(5):  # on a busy machine a hole takes seconds, and pairs look for it ever less often
            before = lab.stats()["hosts"]
            swarm.until_version(swarm.version() + STEPS)
            after = lab.stats()["hosts"]
            sent = {host: after[host]["sent"] - before[host]["sent"] for host in lab.hosts}
            by_servers, by_homes = (sum(sent[host] for host in hosts) for hosts in (servers, homes))
            print(f"bytes sent in {STEPS} steps: homes {by_homes}, servers {by_servers}")
            if by_servers < 0.2 * by_homes:
                break
        assert by_servers < 0.2 * by_homes
        swarm.leaves(trainer)
        steps = swarm.version() + 2
        swarm.train_to(steps)
        weights = swarm.audited_weights()
    assert farthest(weights, swarm.single_process(steps)) < 1e-9


CHECK = """
import sys
from peers.programs.check import check_reach, to_json
from peers.programs.tool_options import CheckOptions
print(to_json([check_reach(CheckOptions(host="0.0.0.0", port=4001, join=tuple(sys.argv[1:])))]))
"""
"""One line of `swarm check --host 0.0.0.0 --port 4001 --join ... --json`; the others take longer."""


def checked(lab: Lab, host: str, *join: str) -> dict[str, Any]:
    """What `swarm check` finds of that host's reach."""
    with lab.inside(host):
        done = subprocess.run(
            [sys.executable, "-c", CHECK, *join], capture_output=True, text=True, cwd=ROOT, timeout=90
        )
    return json.loads(done.stdout)["checks"][0]


def test_swarm_check_says_who_can_be_dialled_and_what_to_do(tmp_path: Path) -> None:
    homes = {"keeps ports": Nat(), "changes them": Nat(symmetric=True)}
    with a_lab(["relay", "other"], homes) as lab, Swarm(tmp_path, counting(), lab=lab) as swarm:
        relay = swarm.bootstrap().address
        other = swarm.start_bootstrap("--no-relay")
        swarm.until(lambda: other.heard(Started), "the other bootstrap does not start")
        both = [relay, other.address]
        found = checked(lab, "visitor", *both)
        assert found["ok"] and found["found"] == f"others can dial this machine at {lab.ip('visitor')}:4001"
        to_do = "forward TCP port 4001 of your router to this machine and give --announce {}:4001"
        found = checked(lab, "keeps ports", *both)
        assert found["ok"] and found["found"] == (
            "nobody can dial this machine; others reach it through a relay, and directly where a hole can be "
            f"punched into its router. To be dialled, {to_do.format(lab.ip('keeps ports'))}"
        )
        found = checked(lab, "changes them", *both)
        assert (
            found["ok"]
            and "through a relay only: its router shows each of them another port" in found["found"]
        )
        swarm.kill(swarm.programs[0])
        found = checked(lab, "keeps ports", other.address)
        assert not found["ok"] and found["fix"] == to_do.format(lab.ip("keeps ports"))
        assert found["found"] == (
            f"nobody can dial this machine ({lab.ip('keeps ports')}:4001: no connection within 3 s), "
            "and no peer that was found relays for it"
        )
