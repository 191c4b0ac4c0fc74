"""What a stage peer and its neighbours sign of the microbatches that pass (`swarm.wire.receipts`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from peers.ports import Buffer
from swarm.audit.answers import digest, is_audited
from swarm.errors import BadAnswer, Refused
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.statements import Signer, is_signed, sign
from swarm.wire.codec import Encoded
from swarm.wire.messages import Work, WorkDone
from swarm.wire.receipts import Answered, Fed, Receipt, give_receipt, is_receipt, tensors_digest

NOTHING = tensors_digest((), ())


class Receipts:
    """Nothing in a run that names no trainers. `stage`: -1 for a trainer."""

    def __init__(self, run: Run, stage: Stage, signer: Signer) -> None:
        self._run, self._stage, self._signer = run, stage, signer
        self._wanted, self._audited = bool(run.admission.trainers), is_audited(run)

    def feed(self, work: Work, outputs: Sequence[Encoded]) -> tuple[Work, bytes]:
        """`work` for the next stage, with this peer's word for what it computed; and the digest of that."""
        onward = msgspec.structs.replace(work, tensors=tuple(output.meta for output in outputs), fed=b"")
        if not self._wanted:
            return onward, b""
        named = digest(outputs)
        fed = Fed(self._stage + 1, work.t, work.m, named)
        return msgspec.structs.replace(onward, fed=sign(self._signer, self._run.id, fed)), named

    def came(self, caller: PeerId, work: Work, inputs: Sequence[Encoded]) -> bytes:
        """The digest of what came for a microbatch; of stage 0 the ticket names it, at the others its caller.

        Takes 0.1 ms, and 0.7 ms for each MB.

        Raises:
            Refused: its caller did not sign that.
        """
        if not self._wanted:
            return b""
        if self._stage == 0:
            assert work.ticket is not None
            return work.ticket.inputs
        named = digest(inputs)
        if not self.is_fed(caller, work, named):
            raise Refused(
                f"stage {self._stage} takes what a peer of stage {self._stage - 1} signed, and this is not"
            )
        return named

    def is_fed(self, caller: PeerId, work: Work, inputs: bytes) -> bool:
        """Whether a caller signed that these are the inputs. At stage 0 the ticket says so."""
        if self._stage == 0:
            return work.ticket is not None and work.ticket.inputs == inputs
        fed = Fed(self._stage, work.t, work.m, inputs)
        return is_signed(self._signer, caller, self._run.id, fed, work.fed)

    def give(
        self,
        mb: Microbatch,
        inputs: bytes,
        input_grads: Sequence[Encoded],
        loss: float,
        outputs: bytes = NOTHING,
        done: WorkDone | None = None,
    ) -> Receipt | None:
        """The receipt for an answer. `inputs`, `outputs`: their digests, of `came` and `feed`. `done`: the
        next stage's, which `check` has accepted; None: no such.

        Takes 0.1 ms, and 0.7 ms for each MB: called where the device computes.
        """
        if not self._wanted:
            return None
        last = done.hops[0].receipt if done is not None else None
        return give_receipt(
            self._signer,
            self._run.id,
            Answered(
                self._stage, *mb, inputs, outputs,
                last.input_grads if last is not None else NOTHING, digest(input_grads), loss,
            ),
        )  # fmt: skip

    def check(
        self, peer: PeerId, mb: Microbatch, sent: bytes, done: WorkDone, body: Sequence[Buffer]
    ) -> None:
        """Check that the next stage's answer is as it signed it; and, where answers are audited, that it
        answers what was `sent`: of other inputs its caller could have nothing computed again.

        Raises:
            BadAnswer: it is not.
        """
        if not self._wanted:
            return
        hop = done.hops[0] if done.hops else None
        if hop is None or hop.receipt is None or (hop.peer, hop.stage) != (peer, self._stage + 1):
            raise BadAnswer(peer, "answered without a receipt of its own")
        if hop.receipt.input_grads != tensors_digest(done.tensors, body):
            raise BadAnswer(peer, "answered another gradient than its receipt names")
        if not is_receipt(self._signer, peer, self._run.id, hop.stage, mb, done.loss, hop.receipt):
            raise BadAnswer(peer, "answered with a receipt that it did not sign")
        if self._audited and hop.receipt.inputs != sent:
            raise BadAnswer(peer, "answered something else than it was sent")
