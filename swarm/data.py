"""Which samples a microbatch holds, and in which order a trainer walks the microbatches of a step.

Both are drawn from hashes of their names, so they are the same in every process, on every machine and in
every version of Python and numpy, and no stream has to be wound forward. An epoch has each *window* of the
tokens once, in an order that is computed place by place, from a pool of chunks at a time. Each turn of as
many samples as a mixture's weights sum up to has exactly the weight of each source.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from struct import unpack
from typing import Literal

from swarm import merkle
from swarm.errors import Refused, SetupError
from swarm.ids import Microbatch, PeerId
from swarm.manifest import Run

CHUNK_TOKENS = 1 << 21
"""Windows so near to each other come in one pool: about a block of what is fetched (`swarm.merkle`)."""
POOL_CHUNKS = 128
"""Chunks whose windows are shuffled together: 268 million tokens, 512 MiB, of 128 places."""
ROUNDS = 10
"""Of the Feistel network; as many as NIST's format-preserving FF1 has (SP 800-38G)."""


def sample_offsets(run: Run, t: int, m: int) -> list[int]:
    """Where the samples of microbatch (t, m) start in the array of tokens.

    A sample is `sequence_length + 1` tokens from there on, all inside the array, and the last of them is the
    first of the next window; or, if code makes the samples, the one with that number.

    Returns:
        `microbatch_size` offsets.

    Raises:
        SetupError: the run is not pinned, so the number of tokens is not known.
    """
    if not run.data.tokens:
        raise SetupError("data.tokens is not set in the run's manifest: pin the run to its token file first")
    size, (t, m) = run.batch.microbatch_size, run.named(Microbatch(t, m))
    first = (run.whole.batch.microbatches_before(t) + m) * size
    return [_offset(run, number) for number in range(first, first + size)]


def _offset(run: Run, number: int) -> int:
    """Where the sample with this number of the whole run starts."""
    data, start = run.data, 0
    if not data.mixture:
        return _offset_in(run, f"{run.seed}", data.tokens, number)
    sources = data.sources
    total = sum(weight for weight, _ in sources)
    turn, place = divmod(number, total)
    place = permuted(f"mixture {run.seed} {turn}", place, total)
    for source, (weight, tokens) in enumerate(sources):
        if place < weight:
            return start + _offset_in(run, f"{run.seed} {source}", tokens, turn * weight + place)
        place, start = place - weight, start + tokens
    raise AssertionError("a turn has as many places as its weights")


def _offset_in(run: Run, name: str, tokens: int, number: int) -> int:
    """Where the sample with this number of one source starts in it."""
    data = run.data
    length, label = (1, 0) if data.source == "code" else (data.sequence_length, 1)
    windows, left = divmod(tokens - label, length)
    epoch, place = divmod(number, windows)
    name = f"{name} {epoch}"
    (word,) = _words(f"start {name}", 1)
    start = word * (left + 1) >> 64  # what is left over at the ends differs from epoch to epoch
    return start + length * _window(name, place, windows, max(1, CHUNK_TOKENS // length))


def _window(name: str, place: int, windows: int, chunk: int) -> int:
    """The window at `place` of an epoch. `chunk`: windows in one."""
    pool, within = divmod(place, POOL_CHUNKS * chunk)
    first = place - within
    place = first + permuted(f"pool {name} {pool}", within, min(POOL_CHUNKS * chunk, windows - first))
    number, within = divmod(place, chunk)
    if number == windows // chunk:  # the last one, which is shorter than the others, stays where it is
        return place
    return permuted(f"chunks {name}", number, windows // chunk) * chunk + within


def permuted(name: str, place: int, count: int) -> int:
    """Where a permutation of range(count), a function of `name`, takes `place`.

    A Feistel network over pairs of numbers below the root of `count`, rounded up, that is walked on until it
    comes back below `count`: J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
    """
    side = math.isqrt(count - 1) + 1
    while True:
        left, right = divmod(place, side)
        for keyed in _rounds(name):
            word = keyed.copy()
            word.update(right.to_bytes(8, "little"))
            left, right = right, (left + int.from_bytes(word.digest(), "little")) % side
        place = left * side + right
        if place < count:
            return place


@lru_cache(maxsize=16)
def _rounds(name: str) -> list[hashlib.blake2b]:
    """The round functions of a permutation, each a keyed hash to continue."""
    key = hashlib.blake2b(f"swarm {name}".encode(), digest_size=32).digest()
    return [hashlib.blake2b(digest_size=8, key=key, salt=bytes([number])) for number in range(ROUNDS)]


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
