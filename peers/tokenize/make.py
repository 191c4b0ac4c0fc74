"""`swarm tokenize`: each file becomes a shard, in a process of its own; then all of them become an index.

The name of a shard says what it was made of. One that is there is not made again, so a command that was
interrupted goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from peers.device import usable_cores
from peers.programs.tool_options import TokenizeOptions
from peers.progress import Bar
from peers.start_line import program
from peers.storage import atomic_file
from peers.storage.index import ITEM_BYTES, NAME, Shard, Source, index_among, open_index
from peers.storage.shards import in_parallel, make_index, write_shard
from peers.storage.tokenizer import Tokenizer, load_tokenizer, vocabulary_too_small
from peers.tokenize.documents import HubPart, chunks, has_rows, hub_parts, shard_of, texts
from swarm.data import token_dtype
from swarm.errors import SetupError, count, did_you_mean

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|endofdoc|>")
"""What tokenizers call the token at the end of a document."""
DTYPES = {1: 256, 2: 1 << 16, 4: 1 << 20, 8: 1 << 20}
"""Bytes of a token in a file -> as many tokens as it is taken to have, unless --vocab-size says it."""


class Making(NamedTuple):
    """How texts become tokens; what a process is given."""

    out: Path
    tokenizer: Path | None
    end: int | None
    field: str
    vocab_size: int

    def shard(self, text: Path | HubPart) -> Shard:
        """What a text becomes, made now unless it is there.

        Raises SetupError: it cannot be read, or made into tokens; OSError: these cannot be written.
        """
        tokenizer = load_tokenizer(self.tokenizer)
        final, dtype = self.path(text, tokenizer), token_dtype(self.vocab_size)
        if not final.exists():  # a part of it never has its name
            write_shard(final, self._tokens(text, tokenizer), dtype, self.vocab_size)
        return Shard((final.name,), final.stat().st_size // ITEM_BYTES[dtype], dtype)

    def path(self, text: Path | HubPart, tokenizer: Tokenizer) -> Path:
        """Of the shard that a text becomes. Raises OSError: there is no such file."""
        if isinstance(text, HubPart):
            made_of = text.made_of
        else:
            made_of = (str(text.resolve()), (state := text.stat()).st_size, state.st_mtime_ns)
        made_by = (tokenizer.key, self.end, self.field, self.vocab_size)
        key = hashlib.sha256(msgspec.json.encode([*made_of, *made_by])).hexdigest()
        return self.out / f"{text.name.partition('.')[0][:40]}-{key[:16]}.tokens"

    def _tokens(self, text: Path | HubPart, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
        if isinstance(text, HubPart) or has_rows(text):
            found = text.texts(self.field) if isinstance(text, HubPart) else texts(text, self.field)
            yield from tokenizer.encode_documents(found, self.end)
            return
        yield from tokenizer.encode_file(chunks(text), str(text))
        if self.end is not None:
            yield np.array([self.end], np.uint32)


def run_tokenize(options: TokenizeOptions) -> None:
    """Make shards and their index, and say what to do with them.

    Raises:
        SetupError: a file cannot be read or written, or is not what its name says; the tokenizer lacks what
            is asked for.
    """
    with atomic_file.as_setup_error("cannot make the tokens", "choose --out", folder=options.out):
        _make(options)


def _make(options: TokenizeOptions) -> None:
    weights = options.weights or (1,) * len(options.files)
    if len(weights) != len(options.files):
        raise SetupError(
            f"--weights {' '.join(map(str, weights))}: give one for each of the {len(options.files)} files"
        )
    jobs = options.jobs or usable_cores()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(options.tokenizer)
    given = [None if isinstance(path, str) else _ready(path) for path in options.files]
    texts_there = any(source is None for source in given)
    end = _end(tokenizer, options.eos) if texts_there or options.eos else None
    vocab_size = options.vocab_size or _vocabulary(tokenizer, end, [s for s in given if s], texts_there)
    if vocab_size > (most := max(DTYPES.values())):  # of a manifest
        raise SetupError(f"a vocabulary of {vocab_size} tokens: --vocab-size and --eos reach to {most}")
    if end is not None and end >= vocab_size:
        raise vocabulary_too_small(vocab_size, end)
    made_by = options.out / "tokenizer.json" if tokenizer.json else None
    making = Making(options.out, made_by, end, options.field, vocab_size)
    parts = [
        () if source is not None else hub_parts(text, options.field) if isinstance(text, str) else (text,)
        for text, source in zip(options.files, given, strict=True)
    ]
    names = [
        [(str(making.path(part, tokenizer)),) for part in some] if source is None else [s.at for s in source]
        for some, source in zip(parts, given, strict=True)
    ]
    _check_out(options, making, tokenizer.sha256, [at for some in names for at in some])
    if made_by is not None:
        atomic_file.write_whole(made_by, tokenizer.json)
    made = _made(making, [part for some in parts for part in some], jobs)
    shards = [
        tuple(itertools.islice(made, len(some))) if source is None else source
        for some, source in zip(parts, given, strict=True)
    ]
    sources = _sources(options, shards, weights)
    with atomic_file.as_setup_error("cannot write the index", "choose --out", folder=options.out):
        index = make_index(
            options.out, sources, token_dtype(vocab_size), tokenizer.sha256, eos=end, jobs=jobs
        )
    print(
        f"{options.out / NAME}: {index.tokens} tokens of {index.dtype} in "
        f"{count(len(index.shards), 'shard')}, root {index.root}\n"
        f'in the manifest: model.vocab_size = {vocab_size}, data.source = "files", data.tokenizer = '
        f'"{"file" if tokenizer.sha256 else "bytes"}"\n'
        f"then: {program()} bootstrap --manifest run.toml --data {shlex.quote(str(options.out))}"
    )


def _check_out(
    options: TokenizeOptions, making: Making, tokenizer: str, shards: Sequence[tuple[str, ...]]
) -> None:
    """Raises SetupError: there is an index already, of others than these shards; a run may have pinned it."""
    if not (path := options.out / NAME).exists():
        return
    filled = [at for at in shards if not (file := Path(at[0])).exists() or file.stat().st_size]
    wanted, there = (tokenizer, making.end, options.weights or (1,), filled), None
    with contextlib.suppress(SetupError):
        index = open_index(str(path))
        weights = tuple(source.weight for source in index.sources)
        there = (index.tokenizer, index.eos, weights, [shard.at for shard in index.shards])
    if there != wanted:
        raise SetupError(
            f"{path} is of other data, or of these as they were, and a run may need it: give another --out, "
            "or remove that file first"
        )


def _ready(path: Path) -> tuple[Shard, ...] | None:
    """The shards of a file or folder that has tokens already; None: it is text.

    Raises:
        SetupError: it cannot be read.
    """
    if str(path.resolve()).encode("utf-8", "replace") != os.fsencode(path.resolve()):
        raise SetupError(f"the name of {path} is not UTF-8, as an index has to be: rename it")
    try:
        if address := index_among([path.resolve()]):
            index = open_index(address)
            return tuple(
                msgspec.structs.replace(shard, dtype=shard.dtype or index.dtype) for shard in index.shards
            )
        shard = shard_of(path)
    except OSError as error:
        raise SetupError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
    if shard is None and path.is_dir():
        raise SetupError(f"{path} is a folder without an {NAME}: give the files in it, such as {path}/*")
    return None if shard is None else (shard,)


def _end(tokenizer: Tokenizer, asked: str | None) -> int | None:
    """The token that ends documents. Raises SetupError: the tokenizer has none such."""
    if asked == "none" or (asked is None and not tokenizer.json):
        return None
    if asked is not None and asked.isdecimal():
        return int(asked)
    for name in ENDS if asked is None else (asked,):
        if (found := tokenizer.token(name)) is not None:
            return found
    if not tokenizer.json:
        raise SetupError(
            f"--eos {asked}: one token for each byte has no such token; give a number, such as 256"
        )
    if asked is None:
        raise SetupError(
            "the tokenizer has no token for the end of a document that is known: name it with --eos, or "
            "--eos none"
        )
    raise SetupError(
        f"--eos {asked}: the tokenizer has no such token{did_you_mean(asked, tokenizer.added())}"
    )


def _vocabulary(
    tokenizer: Tokenizer, end: int | None, ready: Sequence[tuple[Shard, ...]], has_texts: bool
) -> int:
    known = tokenizer.vocabulary if has_texts or tokenizer.json else 0
    widths = [ITEM_BYTES[shard.dtype] for shards in ready for shard in shards] if not tokenizer.json else []
    return max(known, 0 if end is None else end + 1, *(DTYPES[width] for width in widths), 2)


def _made(making: Making, texts: Sequence[Path | HubPart], jobs: int) -> Iterator[Shard]:
    with Bar("making tokens", len(texts), unit="files") as bar:
        for shard in in_parallel(making.shard, texts, jobs):
            yield shard
            bar(1)


def _sources(
    options: TokenizeOptions, shards: Sequence[tuple[Shard, ...]], weights: Sequence[int]
) -> list[Source]:
    """One of all, or one for each file that has a weight; what is empty has no shard."""
    filled = [tuple(shard for shard in some if shard.tokens) for some in shards]
    if not options.weights:
        return [Source("all", tuple(shard for some in filled for shard in some))]
    return [
        Source(path if isinstance(path, str) else path.stem or path.name, some, weight)
        for path, some, weight in zip(options.files, filled, weights, strict=True)
    ]
