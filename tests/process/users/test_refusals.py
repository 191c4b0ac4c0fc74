"""What cannot work is said in one line that tells what to change, with an exit code, and leaves nothing."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from peers.cli import Exit
from peers.events import Failed
from peers.net import signed_records
from peers.net.dht_protocol import Entry
from peers.net.identity import Identity
from peers.net.node import Node
from swarm.manifest import audit_run
from tests.process.swarm_processes import Program, Swarm

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


def said(program: Program, code: Exit) -> str:
    """The one line of a program that ended with `code`, on standard error and as an event alike."""
    assert program.wait() == code, program.story()
    (line,) = program.errors
    (event,) = program.heard(Failed)
    command, _, text = line.partition(": ")
    assert command == f"swarm {program.name.split()[0]}"
    assert text == event.text
    return text


def test_every_refusal_is_one_line_with_its_exit_code(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine.txt", tmp_path / "theirs.txt"
    mine.write_text("It was a dark and stormy night. " * 200)
    theirs.write_text("It was a dark and stormy light. " * 200)
    run = audit_run(stages=1, steps=3)
    run = replace(run, data=replace(run.data, source="files", tokens=0))
    with Swarm(tmp_path, run, data=[mine]) as swarm, socket.create_server(("127.0.0.1", 0)) as taken:
        bootstrap = swarm.bootstrap()
        port = taken.getsockname()[1]
        nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
        unknown = "0123456789abcdef" * 2
        member, identity = swarm.membership(), str(tmp_path / "identity")
        typo = tmp_path / "typo.toml"
        typo.write_text(swarm.run.to_toml().replace("\nlr =", "\nlearning_rate ="))
        owner = swarm.start("peer with an identity", ["peer", *member, "--identity", identity])
        swarm.all_serve()

        def refused(name: str, *arguments: str) -> Program:
            program = swarm.start(name, [name.split()[0], *arguments])
            program.sentenced = True
            return program

        port_in_use = [
            refused("bootstrap on a port in use", "--manifest", str(swarm.manifest), "--port", str(port)),
            refused("peer on a port in use", *member, "--port", str(port)),
        ]
        no_route = [
            refused("peer without a route", "--run", swarm.run.id, "--join", nobody),
            refused("train without a route", "--run", swarm.run.id, "--join", nobody),
        ]
        no_run = refused("peer of an unknown run", "--run", unknown, "--join", bootstrap.address)
        no_id = refused("train at half an address", "--run", unknown, "--join", "/ip4/127.0.0.1/tcp/1")
        no_stage = refused("peer of stage 7", *member, "--stage", "7", "--device", "cpu")
        no_manifest = refused("bootstrap with a typo", "--manifest", str(typo))
        other_data = refused("train with other data", *member, "--data", str(theirs))
        no_identity = refused("peer with the same identity", *member, "--identity", identity)

        for program in port_in_use:
            assert said(program, Exit.SETUP) == (
                f"port {port} is already in use on 127.0.0.1: stop the program that uses it "
                f"(see: ss -ltnp 'sport = :{port}'), "
                "or choose another one with --port (--port 0 picks a free one)"
            )
        for program in no_route:
            text = said(program, Exit.NETWORK)
            assert text.startswith(
                "none of the peers to join at can be reached. Check that one of them is running"
            )
            assert nobody in text
            assert "connection refused" in text.lower()
        assert said(no_run, Exit.SETUP) == (
            f"no peer here knows a run {unknown}: check the id, and that a peer of that run is up"
        )
        assert "'/ip4/127.0.0.1/tcp/1' is not the address of a peer" in said(no_id, Exit.SETUP)
        assert said(no_stage, Exit.SETUP) == "--stage 7: run 'counting' has stages 0 to 0"
        text = said(no_manifest, Exit.SETUP)
        assert text.startswith(f"{typo}: optimizer.learning_rate = 1.0 in the run's manifest: unknown key")
        text = said(other_data, Exit.SETUP)
        assert swarm.run.data.sha256 in text
        text = said(no_identity, Exit.SETUP)
        assert "in use by another process: stop that one, or give each program an identity file" in text
        assert owner.returncode is None


def test_a_manifest_that_does_not_fit_its_hash_is_not_believed(tmp_path: Path) -> None:
    """The only peer to join at offers another run's manifest under the id that was asked for."""
    run = audit_run(stages=1, steps=3)
    with Swarm(tmp_path, run) as swarm:
        wanted = swarm.run.id

        async def lie(node: Node) -> str:
            owner, value = signed_records.seal_manifest(replace(swarm.run, seed=2), None)
            entry = Entry(owner, value, time.time() + 60)
            await node.directory.storage.store(signed_records.manifest_key(wanted), entry)
            joiner = swarm.start("train", ["train", "--run", wanted, "--join", node.addresses[0]])
            joiner.sentenced = True
            return await asyncio.to_thread(said, joiner, Exit.SETUP)

        text = swarm.as_a_node(lie)
        assert text.startswith(f"no peer here knows a run {wanted}: check the id")
        assert text.endswith("(refused from others: a value under a key where it does not belong)")
