"""What a stage peer and its neighbours sign of the microbatches that pass (`swarm.wire.receipts`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from swarm.audit import is_audited
from swarm.audit.answers import digest
from swarm.errors import Refused
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.statements import Signer
from swarm.wire.codec import Encoded
from swarm.wire.messages import MAX_RECEIPTS, Work, WorkDone
from swarm.wire.receipts import Answered, Link, Receipt, give_receipt, is_sent_on, tensors_digest

NOTHING = tensors_digest((), ())


class Receipts:
    """Nothing in a run that names no trainers."""

    def __init__(
        self, run: Run, stage: Stage, signer: Signer, counts: Callable[[PeerId, Stage], bool]
    ) -> None:
        """`counts`: whether the word of a peer of a stage counts."""
        self._run, self._stage, self._signer, self._counts = run, stage, signer, counts
        self._wanted, self._is_audited = bool(run.admission.trainers), is_audited(run)

    def through(self, caller: PeerId, work: Work) -> tuple[Link, ...]:
        """The chain behind a microbatch of `caller`, as the next stage is shown it."""
        if work.fed is None or not self._is_audited:
            return ()
        both = self._counts(caller, self._stage - 1) and self._counts(self._signer.peer_id, self._stage)
        return (Link(caller, work.fed), *(() if both else work.through))[:MAX_RECEIPTS]

    def is_followed(self, stage: Stage, caller: PeerId, work: Work) -> bool:
        """Whether the chain behind `work`, as a peer sends it to a stage, begins with the ticket, or with two
        peers whose word counts, of which one sent to the other.

        A stranger could have another name of its own sign anything, and a peer with voice could have a
        stranger pass on what it makes up.
        """
        chain = [caller, *(link.peer for link in work.through)]
        first = stage - len(chain)
        if first <= 0 or not self._is_audited:
            return True
        return len(chain) > 1 and self._counts(chain[-1], first) and self._counts(chain[-2], first + 1)

    def feed(
        self, work: Work, inputs: bytes, outputs: Sequence[Encoded], through: tuple[Link, ...]
    ) -> tuple[Work, bytes]:
        """`work` for the next stage, to be signed (`addressed`), with what this peer computed of `inputs`, by
        their digest; and the digest of that.
        """
        onward = msgspec.structs.replace(
            work, tensors=tuple(output.meta for output in outputs), fed=None, through=through
        )
        if not self._wanted:
            return onward, b""
        named = digest(outputs)
        return msgspec.structs.replace(onward, fed=Receipt(inputs, named, b"", b"", b"")), named

    def addressed(self, work: Work, to: PeerId) -> Work:
        """What `feed` made, with this peer's word, to another."""
        if work.fed is None:
            return work
        made, of = (work.fed.inputs, work.fed.outputs), (self._stage, work.t, work.m)
        half = give_receipt(self._signer, self._run.id, Answered(*of, *made, b"", b"", 0.0, to))
        return msgspec.structs.replace(work, fed=half)

    def check(self, caller: PeerId, work: Work) -> None:
        """Check that what a caller sends was signed, to this peer, by it and those that it came through; at
        stage 0 by a trainer. Before any of it comes; 0.1 ms for each signature.

        Raises:
            Refused: it was not.
        """
        signer, stage = self._signer, self._stage
        if self._wanted and not was_fed(
            signer, self._run, stage, signer.peer_id, caller, work, signed_inputs(work)
        ):
            raise self._refusal()

    def came(self, work: Work, inputs: Sequence[Encoded]) -> bytes:
        """The digest of what came for a microbatch that was checked. Takes 0.7 ms for each MB; nothing at
        stage 0, where the ticket was compared.

        Raises:
            Refused: it is not what was signed.
        """
        if not self._wanted:
            return b""
        named = signed_inputs(work)
        if self._stage and digest(inputs) != named:
            raise self._refusal()
        return named

    def _refusal(self) -> Refused:
        by = f"a peer of stage {self._stage - 1}" if self._stage else "a trainer"
        return Refused(f"stage {self._stage} takes what {by} signed to the one that gets it, and this is not")

    def give(
        self, mb: Microbatch, inputs: bytes, input_grads: Sequence[Encoded], loss: float,
        outputs: bytes = NOTHING, done: WorkDone | None = None,
    ) -> Receipt | None:  # fmt: skip
        """The receipt for an answer. `inputs`, `outputs`: their digests, of `came` and `feed`. `done`: the
        next stage's, which `check` has accepted; None: no such.

        Takes 0.1 ms, and 0.7 ms for each MB: called where the device computes.
        """
        if not self._wanted:
            return None
        last = done.hops[0].receipt if done is not None else None
        output_grads = last.input_grads if last is not None else NOTHING
        said = Answered(self._stage, *mb, inputs, outputs, output_grads, digest(input_grads), loss)
        return give_receipt(self._signer, self._run.id, said)


def signed_inputs(work: Work) -> bytes:
    """The digest of what is sent, as its caller signed it, or at stage 0 the trainer."""
    return work.fed.outputs if work.fed else work.ticket.inputs if work.ticket else b""


def was_fed(
    signer: Signer, run: Run, stage: Stage, peer: PeerId, caller: PeerId, work: Work, inputs: bytes
) -> bool:
    """Whether what went into a microbatch at a `peer` of a stage was sent to it: at stage 0 by a trainer,
    with its ticket; else by `caller`, which had been sent what it made that of, and so on, as far back as the
    work says that it came.
    """
    chain = [Link(caller, work.fed), *work.through] if work.fed else []
    if len(chain) > stage or (stage and not chain):
        return False
    mb, to = Microbatch(work.t, work.m), peer
    for back, link in enumerate(chain, 1):
        if not is_sent_on(signer, link.peer, run.id, stage - back, mb, inputs, link.half, to):
            return False
        inputs, to = link.half.inputs, link.peer
    ticket = work.ticket
    return len(chain) < stage or (ticket is not None and (ticket.inputs, ticket.to) == (inputs, to))
