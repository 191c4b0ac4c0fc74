"""A trainer's side of vouchers: it counts the work that receipts show, and vouches for it to the peers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

from peers.ports import Buffer, Directory, Transport
from peers.status_query import MAX_VOICES, ask_convicted
from peers.voices import Voices
from peers.vouching.tickets import ticket_for
from peers.waiting import TaskKeeper, for_each
from swarm.errors import SwarmError
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.voice import MIN_STEPS, WorkCount, Worked, renewal, voice_of, vouch, weight
from swarm.records import PeerRecord
from swarm.wire.messages import GiveVoucher, Ticket, WorkDone, pack
from swarm.wire.receipts import is_receipt

GIVE_S = 3.0
"""Limit for giving one voucher. A peer that misses it gets the next."""
AT_ONCE = 16


class VoucherGiver:
    """Nothing for a trainer that the manifest does not name."""

    def __init__(
        self, run: Run, transport: Transport, directory: Directory, ask: Callable[[], Awaitable[None]]
    ) -> None:
        """`ask`: called before vouchers are given; then the directory lacks those that are to get none."""
        self._ask = ask
        self._run, self._transport, self._directory = run, transport, directory
        self._signer = transport.signer
        self._named = transport.peer_id in run.admission.trainers
        self._version, self._dice = 0, random.Random(transport.peer_id)
        self._voices = Voices(run, transport.signer, directory, lambda: self._version)
        self._count = WorkCount()
        self._giving = TaskKeeper()

    def ticket(self, mb: Microbatch, body: Sequence[Buffer], to: PeerId) -> Ticket | None:
        """What the stages want to see, if the manifest names trainers. `body`: as a peer is sent it."""
        return ticket_for(self._signer, self._run, mb, body, to) if self._named else None

    def answered(self, mb: Microbatch, inputs: bytes, done: WorkDone) -> None:
        """Count what an answer shows that passed `check_answer`: `inputs` is the digest of what stage 0 was
        sent.

        The chain begins with that. A peer whose receipt names other inputs than the stage before sent
        computed something else, and a receipt that does not verify is nobody's: they count nothing. Of the
        others only those are verified that change something: as a rule the first of a peer and step.
        """
        came = inputs
        for stage, hop in enumerate(done.hops[: self._run.S]):
            receipt = hop.receipt
            if receipt is None or hop.stage != stage:
                return
            if receipt.inputs == came and self._count.wants(hop.peer, mb):
                said = (hop.peer, self._run.id, stage, mb, done.loss, receipt)
                if stage == 0 or is_receipt(self._signer, *said):  # that of stage 0 was checked
                    self._count.answered(hop.peer, mb, stage)
            came = receipt.outputs

    def saw(self, records: Sequence[PeerRecord]) -> None:
        """Go on from the vouchers that peers carry, which this trainer gave before it started, or another."""
        for record in records if self._named else ():
            voucher = record.voucher
            if voucher and voice_of(record.peer, voucher, self._run, self._signer, version=voucher.t):
                self._count.shown(record.peer, voucher)

    def stepped(self, before: int, version: int) -> None:
        """Give vouchers to all that are due, if the run has come to where they are."""
        if not self._named or not renewal(before, version):
            return
        self._version = version
        due = {worked: self._count.stage_of(worked.peer) for worked in self._count.renew(version)}
        self._giving.create_task(self._give_all(due))

    async def close(self) -> None:
        await self._giving.close()

    async def _give_all(self, due: Mapping[Worked, Stage]) -> None:
        await self._ask()

        async def give(worked: Worked) -> None:
            if self._directory.find(worked.peer) is None or not await self._contributes(worked, due[worked]):
                return  # it is gone, never was, or adds nothing
            message = GiveVoucher(run=self._run.id, voucher=vouch(self._signer, self._run.id, worked))
            with contextlib.suppress(SwarmError):
                await self._transport.call(worked.peer, "voucher", pack(message), deadline_s=GIVE_S)

        await for_each(due, give, AT_ONCE)

    async def _contributes(self, worked: Worked, stage: Stage) -> bool:
        """Whether a stage adds what a peer says that it computes there, by the word of some others of it.

        A peer of the stage before may show the work of one as that of others, which sign it and do nothing:
        of these nothing is in any sum.
        """
        voice = self._voices.of(stage)
        others = [peer for peer in self._voices.counted(stage) if peer != worked.peer]
        asked = self._dice.sample(others, min(MAX_VOICES, len(others)))
        told = await ask_convicted(self._run, self._transport, asked, worked.peer)
        last = {peer: one.added for peer, one in told.items() if one.added is not None}
        idle = [peer for peer, t in last.items() if t < worked.t - MIN_STEPS]
        return 2 * sum(weight(p, voice) for p in idle) <= sum(weight(p, voice) for p in last)
