"""Vouchers without their work, and strangers that offer a state that they made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
import torch

from peers.ports import Answer, Request
from peers.sim.network import SimSigner
from peers.transfer.server import StateLeases
from swarm.ids import Generation
from swarm.manifest import AdmissionSpec, Run
from swarm.model.layout import empty_state
from swarm.protocol.voice import Worked, vouch
from swarm.records import PeerRecord, State, Voucher
from swarm.wire.messages import AskStatus, PastStep, PeerStatus, pack, unpack
from swarm.wire.trails import Word
from tests.peers.loops import Swarm

TRAINER = "12D3KooW" + "T" * 44
FIRST = Generation()


def admitting(run: Run) -> Run:
    """The same run, whose vouchers `TRAINER` signs."""
    return replace(run, admission=AdmissionSpec(trainers=(TRAINER,)))


def voucher(run: Run, peer: str, *, steps: int = 30, t: int = 0) -> Voucher:
    """That `peer` has worked, and that this is known."""
    return vouch(SimSigner(TRAINER), run.id, Worked(peer, steps, t, steps))


def give_voice(
    s: Swarm, *peers: str, steps: Mapping[str, int] = MappingProxyType({}), run: Run | None = None
) -> None:
    """The records of those peers show a voucher, from now on; `steps`: of whom it says others than usual;
    `run`: the island that they are of.
    """
    put = s.network.dht.put

    def with_voucher(record: PeerRecord, *life_s: float) -> None:
        if record.peer in peers:
            shown = voucher(run or s.run, record.peer, steps=steps.get(record.peer, 30))
            record = msgspec.structs.replace(record, voucher=shown)
        put(record, *life_s)

    s.network.dht.put = with_voucher  # type: ignore[method-assign]


@dataclass
class MadeUp:
    """A stage's states that nobody computed: all weights are 7."""

    run: Run
    stage: int
    saved: Sequence[int]
    shown: Sequence[Word] = ()
    """As signed."""

    def versions(self) -> Sequence[int]:
        return self.saved

    def signed(self, version: int) -> Sequence[Word]:
        return [word for word in self.shown if word[0].end == version]

    def load(self, version: int) -> Mapping[str, torch.Tensor]:
        empty = empty_state(self.run, self.stage)
        return {name: torch.full(t.shape, 7.0, dtype=t.dtype) for name, t in empty.items()}


async def add_liar(
    s: Swarm,
    name: str,
    stage: int,
    version: int,
    *,
    saved: Sequence[int] = (),
    generation: Generation = FIRST,
    state: State = "serving",
) -> None:
    """A stranger that says it serves a stage at a version, and offers a made-up state of that."""
    end = s.network.join(name)
    StateLeases(s.run, end.transport, {stage: MadeUp(s.run, stage, saved or (version,))})

    async def status(request: Request) -> Answer:
        unpack(request.header, AskStatus)
        told = PeerStatus(
            peer=name, stage=stage, state=state, device="cpu", since=0.0, version=version,
            generation=generation, past=(PastStep(version=version, took_s=1.0, loss=99.0),),
        )  # fmt: skip
        return Answer(pack(told))

    end.transport.serve("status", status)
    await end.directory.announce(
        PeerRecord(
            peer=name, run=s.run.id, stage=stage, state=state, version=version, max_inflight=8, since=1e12
        )
    )
