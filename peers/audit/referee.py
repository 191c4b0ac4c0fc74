"""A peer judges an answer of a neighbouring stage: of two replicas that contradict each other one lies.

Only replicas have the weights to judge with, and others believe what most of a stage says. Where the word of
two counts, that is nobody. So each peer of the stages around takes the weights, which both have to give
alike, computes the answer on its CPU, and believes what it finds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from peers.device import host_memory
from peers.ports import Buffer, Transport
from peers.transfer.client import download, state_of
from swarm.audit.answers import proves_answer
from swarm.errors import SwarmError
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.wire.evidence import WrongAnswer

MAX_TRIES = 3
"""Answers of one peer that are judged here: each costs a download of its stage."""

COPIES = 3
"""Of a state with its optimizer, that have to fit into free memory: what comes, the stage, its work."""
SURE = 0.5
"""An answer is right by far that is no further off than this part of what a wrong one is at least."""


class Referee:
    """What a peer of `stage` does about disputes of its neighbours."""

    def __init__(self, run: Run, transport: Transport) -> None:
        self._run, self._transport = run, transport
        self._tried = Counter[PeerId]()
        self._lock = asyncio.Lock()

    def may_judge(self, accused: PeerId) -> bool:
        """Whether another answer of that peer is judged here, and none is just now."""
        return self._tried[accused] < MAX_TRIES and not self._lock.locked()

    async def liar(self, evidence: WrongAnswer, body: Sequence[Buffer], accuser: PeerId) -> PeerId | None:
        """The accused, if its answer is wrong by the weights that both give now; the accuser, if it is right
        by far; else nobody.
        """
        replicas, said = [evidence.accused, accuser], evidence.statement
        state = state_of(self._run, said.stage)
        if COPIES * sum(tensor.nbytes for tensor in state.like.values()) > host_memory()[0]:
            return None
        async with self._lock:
            self._tried[evidence.accused] += 1
            try:
                found = await download(self._transport, state, replicas, voice=dict.fromkeys(replicas, 1))
            except SwarmError:
                return None
            version = found.opened.version
            if not found.agreed.issuperset(replicas) or version != self._run.weight_version(said.t):
                return None
            wrong = await asyncio.to_thread(self._proves, version, found.tensors, evidence, body)
            return evidence.accused if wrong else None if wrong is None else accuser

    def _proves(
        self, version: int, tensors: Mapping[str, torch.Tensor], evidence: WrongAnswer, body: Sequence[Buffer]
    ) -> bool | None:
        """Whether it is wrong. None: nearly, and another kind of device may say otherwise."""
        signer = self._transport.signer
        try:
            compute = StageCompute(self._run, evidence.statement.stage)
            compute.load_state(version, tensors)
            if proves_answer(compute, signer, evidence, body):
                return True
            return None if proves_answer(compute, signer, evidence, body, share=SURE) else False
        except SwarmError:
            return None
