"""Which samples a microbatch holds, and in which order a trainer walks the microbatches of a step.

Both are drawn from SHAKE-256 of their names, so they are the same in every process, on every machine and in
every version of Python and numpy, and (t, m) is enough to know them: no stream has to be wound forward.
"""

from __future__ import annotations

import hashlib
from struct import unpack
from typing import Literal

from swarm.errors import SetupError
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
