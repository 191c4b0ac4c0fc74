"""A pickle that would create a file, in all that a stranger can say to a peer over libp2p: none does."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peers.events import Started
from peers.net.dht_protocol import Entry
from peers.net.node import Node
from swarm.errors import SwarmError
from swarm.manifest import audit_run
from swarm.wire.messages import AskStatus, PeerStatus, pack, unpack
from tests.peers.liars.test_extremes import REQUESTS, honest
from tests.process.swarm_processes import Swarm

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


class CreatesAFile:
    """Unpickled, it opens `path` for writing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self._path), "w")


def texts(of: object) -> list[bytes]:
    """The pickle in every form, the first one of letters only."""
    return [pickle.dumps(of, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


def places(kind: type[msgspec.Struct]) -> list[str]:
    """The fields of a message that take bytes or a text."""
    hints = typing.get_type_hints(kind)
    return [name for name in kind.__struct_fields__ if hints[name] in (str, bytes)]


def test_a_pickle_in_any_field_is_never_loaded(tmp_path: Path) -> None:
    loaded, proof = tmp_path / "loaded", tmp_path / "proof"
    pickle.loads(texts(CreatesAFile(proof))[0]).close()  # noqa: S301  made a line before
    assert proof.exists(), "it does what it is to do"
    evil = texts(CreatesAFile(loaded))
    said = 0

    async def attack(node: Node) -> PeerStatus:
        nonlocal said
        target = swarm.serving(0)[0]
        node.transport.addresses.learn(target.peer_id, target.heard(Started)[0].addresses)

        async def say(method: str, header: bytes, body: list[bytes]) -> None:
            nonlocal said
            with contextlib.suppress(SwarmError):
                await node.transport.call(
                    target.peer_id, method, header, body, max_answer_bytes=1 << 20, deadline_s=15.0
                )
            said += 1

        for method, kind in REQUESTS.items():
            message = honest(kind, swarm.run.id)
            text = evil[0].decode("ascii")
            in_fields = [msgspec.structs.replace(message, **{name: text}) for name in places(kind)]
            headers = [*(pack(with_it) for with_it in in_fields), *evil]
            calls = [say(method, header, []) for header in headers]
            calls += [say(method, pack(message), [data]) for data in evil]
            await asyncio.gather(*calls)  # a part is waited for
        for data in evil:
            await say(data[:64].decode("latin-1")[:30], data, [data])
            entry = Entry(evil[0].decode("ascii")[:90], data, 2e9)
            await node.directory.storage.store(f"{swarm.run.id}.peers.0.0.0", entry)
            await node.directory.storage.store(f"{swarm.run.id}.manifest", entry)
        answer = await node.transport.call(
            target.peer_id, "status", pack(AskStatus(run=swarm.run.id)), deadline_s=15.0
        )
        return unpack(answer.header, PeerStatus)

    with Swarm(tmp_path, audit_run(stages=1, steps=3)) as swarm:
        swarm.bootstrap()
        swarm.peer(0)
        swarm.all_serve()
        status = swarm.as_a_node(attack)
        assert status.state == "serving"
        assert said > 100
        swarm.train_to(3)
        assert swarm.assert_each_counted_once() == 3
        swarm.assert_none_ended()
    assert not loaded.exists()
