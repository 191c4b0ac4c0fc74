"""What a liar sends instead of what is true: answers about states, and directives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from peers.ports import Answer
from swarm.ids import PeerId
from swarm.protocol.messages import Directive
from swarm.protocol.protocol import StepProtocol
from swarm.wire.messages import Opened, pack, unpack
from tests.peers.loops import Swarm


def flip_a_bit(answer: Answer) -> Answer:
    body = bytearray(answer.body[0])
    body[-1] ^= 1
    return Answer(answer.header, [body])


def offered(**changes: Any) -> Callable[[Answer], Answer]:
    def change(answer: Answer) -> Answer:
        opened = unpack(answer.header, Opened)
        return Answer(pack(msgspec.structs.replace(opened, **changes)), answer.body)

    return change


def coordinate_all(s: Swarm) -> None:
    """In the eyes of all that are here the one with most voice coordinates its stage in each step."""
    for peer in s.peers.values():
        peer.coordination.protocol._rotation.at = lambda version: None  # type: ignore[method-assign]


def direct_falsely(liar: StepProtocol, change: Callable[[PeerId, Directive], Directive]) -> None:
    """Have a coordinator tell each replica of its stage what `change` makes of its directive."""
    stage: Any = liar._coordinator  # type: ignore
    honest = stage.directive_for
    stage.directive_for = lambda peer, **more: change(peer, honest(peer, **more))
