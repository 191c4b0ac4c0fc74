"""What a peer of a made-up run signed of a microbatch, as evidence against it."""

from __future__ import annotations

from collections.abc import Sequence

from peers.sim.network import SimSigner
from swarm.audit.answers import Made, digest
from swarm.ids import Microbatch, Stage
from swarm.manifest import Run
from swarm.protocol.statements import sign
from swarm.wire.buffers import Buffer
from swarm.wire.codec import Encoded
from swarm.wire.evidence import WrongAnswer
from swarm.wire.receipts import Answered

SIGNER = SimSigner("a")


def accusing(
    run: Run, stage: Stage, mb: Microbatch, inputs: Sequence[Encoded], grads: Sequence[Encoded], made: Made
) -> tuple[WrongAnswer, list[Buffer]]:
    """Peer `a` answered so: the evidence, and its body."""
    groups = (inputs, grads, made.outputs, made.input_grads)
    came, back, sent, answered = map(digest, groups)
    said = Answered(stage, *mb, came, sent, back, answered, made.loss or 0.5)
    metas = [tuple(one.meta for one in group) for group in groups]
    evidence = WrongAnswer(
        accused="a", statement=said, signature=sign(SIGNER, run.id, said), inputs=metas[0],
        output_grads=metas[1], outputs=metas[2], input_grads=metas[3],
    )  # fmt: skip
    return evidence, [buffer for group in groups for one in group for buffer in one.buffers]
