"""How a program is admitted to a run: it brings what the charter asks for, and ends if it is shut out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path

from peers.clock import unix_s
from peers.net.charter.doorkeeper import Doorkeeper
from peers.net.charter.signed import STAMPS_AT_ONCE, certify, find_stamp, seal_credential, stamp_bits
from peers.net.node import Node
from swarm.charter import Role
from swarm.errors import SetupError
from swarm.ids import PeerId, Stage


async def enter(node: Node, role: Role, token: str | None, cache: Path, note: Callable[[str], None]) -> None:
    """Be admitted as `role`, by a token if there is one, and by a stamp if the charter asks for one. From
    then on `node` ends if its peer is shut out.

    Args:
        cache: a folder for stamps, which take minutes.
        note: told what takes long.

    Raises:
        SetupError: the charter does not admit this peer; the text says what to do.
    """
    door, me = node.door, node.peer_id

    def check() -> None:
        if why := _why_not(door, me, role):
            node.end(SetupError(why))

    if door.terms is None:
        if token is not None:
            raise SetupError("--token: this run has no charter and admits everybody: leave it out")
        door.on_change.append(check)  # it may get one
        return
    run_id, certificate = door.terms.charter.run, None
    if token is not None:
        invited, certificate = certify(token, run_id, me)
        if invited != role:
            raise SetupError(f"--token is for a {invited}, and this is a {role}: ask for another one")
        door.credential = seal_credential(certificate)
    if door.lacks_stamp(me, role, door.credential):
        bits = door.terms.charter.work_bits
        note(f"the run asks for a stamp of {bits} bits of work: about {2**bits / 1e6:.0f} s of a core, once")
        stamp = await _stamp(run_id, me, bits, cache)
        door.credential = seal_credential(certificate, stamp)
    if why := _why_not(door, me, role):
        raise SetupError(why)
    door.on_change.append(check)


def allowed_stages(node: Node, stages: Collection[Stage]) -> list[Stage]:
    """Those that the charter lets this peer serve. Raises SetupError: none of them; says why."""
    whys = {stage: _why_not(node.door, node.peer_id, "peer", stage) for stage in stages}
    allowed = [stage for stage, why in whys.items() if not why]
    if not allowed:
        raise SetupError(next(iter(whys.values())))
    return allowed


def _why_not(door: Doorkeeper, me: PeerId, role: Role, stage: Stage | None = None) -> str:
    why = door.why_not(me, role, stage=stage, now=unix_s(), carried=door.credential)
    return why and f"the run does not admit this {role} ({me}): {why}"


async def _stamp(run_id: str, peer: PeerId, bits: int, cache: Path) -> int:
    """One of so many bits: that of the last time, or one that is made now."""
    path = cache / f"{run_id}-{peer}"
    with contextlib.suppress(OSError, ValueError):
        known = int(path.read_text()[:20])
        if stamp_bits(run_id, peer, known) >= bits:
            return known
    starts = count(0, STAMPS_AT_ONCE)
    while (found := await asyncio.to_thread(find_stamp, run_id, peer, bits, next(starts))) is None:
        pass  # a program that gives up meanwhile, or ends, leaves no thread that goes on for days
    with contextlib.suppress(OSError):  # it is made again the next time
        cache.mkdir(parents=True, exist_ok=True)
        path.write_text(str(found))
    return found
