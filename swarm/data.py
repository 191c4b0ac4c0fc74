"""Which samples a microbatch holds, and in which order a trainer walks the microbatches of a step.

Both are drawn from SHAKE-256 of their names, so they are the same in every process, on every machine and in
every version of Python and numpy, and (t, m) is enough to know them: no stream has to be wound forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from struct import unpack
from typing import Literal

from swarm import merkle
from swarm.errors import Refused, SetupError
from swarm.ids import PeerId
from swarm.manifest import Run


def sample_offsets(run: Run, t: int, m: int) -> list[int]:
    """Where the samples of microbatch (t, m) start in the array of tokens.

    A sample is `sequence_length + 1` tokens from there on, all inside the array; or, if code makes the
    samples, the one with that number. They are drawn independently and uniformly (to one part in 2^16 even
    for 2^48 tokens).

    Returns:
        `microbatch_size` offsets.

    Raises:
        SetupError: the run is not pinned, so the number of tokens is not known.
    """
    data = run.data
    starts = data.tokens if data.source == "code" else data.tokens - data.sequence_length
    if starts < 1:
        raise SetupError("data.tokens is not set in the run's manifest: pin the run to its token file first")
    return [
        (word * starts) >> 64 for word in _words(f"samples {run.seed} {t} {m}", run.batch.microbatch_size)
    ]


def prove_samples(run: Run, tree: merkle.Tree, offsets: Sequence[int]) -> bytes:
    """What `check_samples` wants to see for the samples of a microbatch. `tree`: over all tokens."""
    return b"".join(tree.prove(start, end) for start, end in _places(run, offsets))


def proof_bytes(run: Run, t: int, m: int) -> int:
    """How long the proof for the samples of microbatch (t, m) is."""
    size = _size(run)
    places = _places(run, sample_offsets(run, t, m))
    return sum(merkle.proof_bytes(size, start, end) for start, end in places)


def most_proof_bytes(run: Run) -> int:
    """At most so much for any microbatch."""
    return run.batch.microbatch_size * merkle.most_proof_bytes(_size(run))


def check_samples(run: Run, t: int, m: int, tokens: memoryview, proof: memoryview) -> None:
    """Check that the tokens of a microbatch are those that the manifest prescribes (`data.root`).

    Args:
        tokens: bytes of [B, T + 1] of the narrow dtype.
        proof: `proof_bytes` bytes.

    Raises:
        Refused: a sample is something else, or its proof does not hold.
    """
    root, size, at, row = bytes.fromhex(run.data.root), _size(run), 0, 0
    for start, end in _places(run, sample_offsets(run, t, m)):
        length = merkle.proof_bytes(size, start, end)
        sample, shown = bytes(tokens[row : row + end - start]), bytes(proof[at : at + length])
        if not merkle.holds(root, size, start, sample, shown):
            raise Refused(
                f"what came for ({t}, {m}) is not what the run's data have at byte {start}: train on the "
                "data that the manifest names (data.root)"
            )
        row, at = row + end - start, at + length


def _places(run: Run, offsets: Sequence[int]) -> list[tuple[int, int]]:
    """First and last byte of each sample in the array of tokens."""
    item, window = _item_bytes(run), run.data.sequence_length + 1
    return [(offset * item, (offset + window) * item) for offset in offsets]


def _size(run: Run) -> int:
    """Bytes of all tokens."""
    return run.data.tokens * _item_bytes(run)


def _item_bytes(run: Run) -> int:
    return {"uint8": 1, "uint16": 2, "uint32": 4}[token_dtype(run.model.vocab_size)]


def trainer_order(run_id: str, t: int, trainer: PeerId, microbatches: int) -> list[int]:
    """The order in which `trainer` walks the microbatches of step `t`: a permutation of range(microbatches).

    Trainers with different ids walk differently, so that they meet late and seldom do the same work twice.
    """
    words = _words(f"order {run_id} {t} {trainer}", microbatches)
    return sorted(range(microbatches), key=lambda m: (words[m], m))


def token_dtype(vocab_size: int) -> Literal["uint8", "uint16", "uint32"]:
    """The narrowest type that holds every token: what is on disk and on the wire."""
    if vocab_size <= 1 << 8:
        return "uint8"
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _words(name: str, count: int) -> tuple[int, ...]:
    """`count` integers below 2^64, a function of `name` alone."""
    return unpack(f"<{count}Q", hashlib.shake_256(f"swarm {name}".encode()).digest(8 * count))
