"""Peers at home: nobody can dial them, and each believes to be 192.168.1.2. Their run goes on as any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from peers.events import Note, Started, Stepped
from scripts.bench.netlab import HOME, Lab, Link, Nat, why_not
from swarm.run import counting_run
from tests.process.swarm_processes import Program, Swarm

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why_not()), reason=f"a network lab {why_not()}"),
]

STEPS = 12


def a_swarm_at_home(folder: Path, homes: dict[str, Nat], servers: Sequence[str]) -> tuple[Lab, Swarm]:
    """The first hosts are public; programs take hosts in this order."""
    lab = Lab([*servers, *homes, "visitor"], nats=homes, link=Link(delay_s=0.01))
    run = counting_run(stages=2, steps=1_000_000, microbatches_per_step=8)
    return lab, Swarm(folder, run, lab=lab)


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
    lab, swarm = a_swarm_at_home(tmp_path, homes, ["server"])
    with lab, swarm:
        swarm.bootstrap()
        peers = [swarm.peer(0), swarm.peer(1)]
        swarm.all_serve()
        for peer in peers:
            is_at_home(peer)
        trainer = swarm.trainer("--window", "4")
        swarm.until_version(STEPS)
        swarm.leaves(trainer)
        assert swarm.assert_each_counted_once() >= STEPS
        assert {audit for found in swarm.audits().values() for audit in found} == {(0, 0)}
        hosts = lab.stats()["hosts"]
        assert hosts["server"]["sent"] > 0.5 * (hosts["home 1"]["sent"] + hosts["home 2"]["sent"])
        assert all(len(peer.heard(Stepped)) >= STEPS for peer in peers)
