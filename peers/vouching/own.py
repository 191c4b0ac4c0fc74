"""The voucher that a peer carries: from a trainer, into its record, over moves, pauses and restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from peers.ports import Answer, Request, Transport
from peers.storage.atomic_file import write_whole
from swarm.errors import Refused
from swarm.manifest import Run
from swarm.protocol.voice import voice_of
from swarm.records import Voucher
from swarm.wire.messages import Ack, GiveVoucher, pack, unpack


class OwnVoucher:
    """The best that this process was given for its run.

    Args:
        path: a file that keeps it for the next process of this identity; None: it is lost with the process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.value: Voucher | None = None

    def recall(self, run: Run, transport: Transport) -> None:
        """Take up what the file has, if that is this peer's, for this run. An unreadable one is as none."""
        if self.value is not None or self._path is None:
            return
        with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError, Refused):
            kept = unpack(self._path.read_bytes(), GiveVoucher, run.id)
            me, signer = transport.peer_id, transport.signer
            if voice_of(me, kept.voucher, run, signer, version=kept.voucher.t):
                self.value = kept.voucher

    def serve(
        self, run: Run, transport: Transport, version: Callable[[], int], told: Callable[[], Awaitable[None]]
    ) -> None:
        """Take vouchers from now on. `version`: of the run. `told`: called after each that is better."""

        async def handle(request: Request) -> Answer:
            given = unpack(request.header, GiveVoucher, run.id)
            voucher = given.voucher
            if request.peer != voucher.trainer or voucher.trainer not in run.admission.trainers:
                raise Refused(f"run {run.name!r} does not name {request.peer} as a trainer that vouches")

            def worth(one: Voucher | None) -> tuple[int, int]:
                voice = voice_of(transport.peer_id, one, run, transport.signer, version=version())
                return voice, one.t if one is not None and voice else -1

            if not worth(voucher)[0]:
                raise Refused("a voucher that gives this peer no voice")
            if worth(voucher) > worth(self.value):
                self.value = voucher
                await self._keep(given)
                await told()
            return Answer(pack(Ack()))

        transport.serve("voucher", handle)

    async def _keep(self, given: GiveVoucher) -> None:
        """Write it, beside the identity. A full disk costs it at the next start, no more."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(write_whole, self._path, pack(given))
