"""The tokens of a run: those of an index, or of text files that are made into one here.

What text became is kept in the cache folder, named by the root of its Merkle tree, which the manifest pins:

    CACHE/tokens/ROOT/         an index, and the tokens beside it
    CACHE/tokens/KEY           the root of what files became: KEY is of their sizes, when they were last
                               changed, and the tokenizer

Files are read in parts and never held whole.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peers.options import is_there
from peers.progress import Bar
from peers.storage import CACHE_ENV, atomic_file, cache_folder
from peers.storage.blocks import DEFAULT_BYTES, Blocks
from peers.storage.index import NAME, TREE, Index, Narrow, Shard, Source, index_among, open_index
from peers.storage.shards import make_index, write_shard
from peers.storage.tokenizer import Tokenizer, open_tokenizer, vocabulary_too_small
from swarm import tales
from swarm.data import prove_samples, token_dtype
from swarm.errors import SetupError
from swarm.manifest import Run, pin
from swarm.merkle import tree_bytes

_LAYOUT = "3"
"""Part of every key: raise it when the same source would give other tokens."""
_TOKENS = "0.tokens"
_PACKED = (".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".zst")
"""Not read as text, but in a run that is pinned so: a model would learn keys and quotes."""

log = logging.getLogger(__name__)


class Dataset:
    """The tokens of a run, here or far away."""

    def __init__(self, run: Run, index: Index, blocks: Blocks, tokenizer: Tokenizer) -> None:
        self._window = run.data.sequence_length + 1
        """Tokens of one sample."""
        self._vocab_size = run.model.vocab_size
        self._index, self.blocks = index, blocks
        self.tokenizer = tokenizer
        self.tokens = index.tokens
        """How many there are."""

    @property
    def root(self) -> str:
        """Of the Merkle tree over them."""
        return self._index.root

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8, uint16 or uint32."""
        return np.dtype(self._index.dtype)

    def batch(self, offsets: Sequence[int]) -> np.ndarray:
        """The samples that start at `offsets` (see `swarm.data.sample_offsets`).

        Returns:
            Tokens [B, T + 1] of the narrow dtype.

        Raises:
            SetupError: they cannot be had, or are wrong wherever they are.
        """
        little = self.dtype.newbyteorder("<")
        rows = [np.frombuffer(self.blocks.read(*self._place(offset)), little) for offset in offsets]
        found = np.stack(rows).astype(self.dtype, copy=False)
        if (largest := int(found.max())) >= self._vocab_size:
            raise vocabulary_too_small(self._vocab_size, largest)
        return found

    def has(self, offsets: Sequence[int]) -> bool:
        """Whether nothing has to be fetched for these samples."""
        return all(self.blocks.has(*self._place(offset)) for offset in offsets)

    def bring(self, offsets: Sequence[int]) -> None:
        """Fetch what these samples need; takes as long as the line needs. Raises SetupError as `batch`."""
        for offset in offsets:
            self.blocks.bring(*self._place(offset))

    def _place(self, offset: int) -> tuple[int, int]:
        """Bytes of a sample."""
        assert 0 <= offset <= self.tokens - self._window, "offsets come from sample_offsets"
        return offset * self.dtype.itemsize, (offset + self._window) * self.dtype.itemsize

    def pinned(self, run: Run) -> Run:
        """`run` bound to these tokens: the run to publish. Trainers that it names prove what they send.

        Raises:
            SetupError: nothing says which token ends documents, and the run masks them.
        """
        root = self.root if run.admission.trainers and not run.brings_model else ""
        tokenizer = self.tokenizer.sha256 or self._index.tokenizer
        sources = self._index.sources
        mixture = " ".join(f"{one.weight}*{one.tokens}" for one in sources) if len(sources) > 1 else ""
        eos = self._index.eos if run.data.document_mask and run.data.eos < 0 else None
        run = pin(
            run, self.root, self.tokens, tokenizer_sha256=tokenizer, root=root, mixture=mixture, eos=eos
        )
        if run.data.document_mask and run.data.eos < 0:
            raise SetupError(
                "data.document_mask = true, but nothing says which token ends a document: make the data with "
                "swarm tokenize --eos NAME, or give data.eos = NUMBER in the run's manifest"
            )
        return run

    def prove(self, run: Run, offsets: Sequence[int]) -> bytes:
        """The proof that goes with the samples at `offsets`, for a run with a `data.root`."""
        return prove_samples(run, self.blocks.tree, offsets)


def open_dataset(
    run: Run, files: Sequence[str | Path] | None = None, tokenizer: str | Path | None = None,
    cache_bytes: int = DEFAULT_BYTES,
) -> Dataset:  # fmt: skip
    """The tokens that `run` trains on: those of an index, from the cache, or made now.

    Args:
        files: an index (its address, its path, or its folder); or the text files of a run whose source is
            "files", in order. For a pinned run that was opened here before, the cache is enough. None or
            empty for "tales".
        tokenizer: the JSON file of a run whose tokenizer is "file"; not needed with an index.
        cache_bytes: of tokens that come from other machines, so many are kept.

    Raises:
        SetupError: a file is missing, unreadable, not text, too short, or not what the manifest pins; the
            cache is not writable or full. Says what to do.
    """
    given = list(files or ())
    address = index_among(given) if run.data.source == "files" else None
    reads_text = not address and not (run.data.sha256 and not given)
    made_by = open_tokenizer(run, tokenizer) if tokenizer or reads_text else Tokenizer()
    dtype = token_dtype(run.model.vocab_size)
    cache = _Cache.choose(dtype)
    index = open_index(address) if address else None
    if index is None and not given and run.data.sha256:
        index = cache.index(run.data.sha256)
    if index is None:
        made_by = open_tokenizer(run, tokenizer)
        texts = _text_files(run, given)
        key = _key(texts, made_by, dtype)
        index = cache.lookup(key) or cache.fill(key, texts, made_by, run.model.vocab_size)
    _check(run, index)
    if reads_text and run.data.eos >= made_by.vocabulary:
        raise SetupError(
            f"data.eos = {run.data.eos} in the run's manifest, but the tokenizer makes tokens up to "
            f"{made_by.vocabulary - 1}, so no document would end: put one of its tokens at the end of each, "
            "or make the data with swarm tokenize --eos"
        )
    try:
        blocks = Blocks(index, cache.folder.parent, cache_bytes, address or "")
    except SetupError as error:
        raise SetupError(f"{address or cache.folder / index.root}: {error.text}") from None
    return Dataset(run, index, blocks, made_by)


# --- where the text comes from


def _text_files(run: Run, files: Sequence[str | Path]) -> list[Path]:
    """The files that the text is in; none: it is the tales."""
    if run.data.source == "tales":
        if files:
            raise SetupError(
                f'the run reads tales (data.source = "tales"), but {files[0]} was given: leave it out, or '
                'write data.source = "files" into the manifest'
            )
        return []
    if not files:
        raise SetupError(
            'the run reads text files (data.source = "files"): give them with --data, in the owner\'s order'
        )
    paths = list(map(Path, files))
    for path in paths:
        if path.is_dir():
            raise SetupError(
                f"the data file {path} is a folder: give the text files in it, such as {path}/*.txt"
            )
        is_there("the data file", path)
        if not run.data.sha256 and path.name.lower().endswith(_PACKED):
            raise SetupError(
                f"the data file {path} is packed, or has texts in rows: make tokens of it by swarm tokenize "
                f"{shlex.quote(str(path))} --out FOLDER, and give FOLDER instead"
            )
    return paths


def _chunks(path: Path, progress: Callable[[int], None]) -> Iterator[bytes]:
    """What is in a file. Raises SetupError: it cannot be read."""
    with atomic_file.as_setup_error(f"cannot read the data file {path}"), path.open("rb") as file:
        while chunk := file.read(atomic_file.CHUNK_BYTES):
            progress(len(chunk))
            yield chunk


# --- the cache


class _Cache(NamedTuple):
    folder: Path
    dtype: Narrow

    @classmethod
    def choose(cls, dtype: Narrow) -> _Cache:
        """The folder that $SWARM_CACHE names; without it, if the default is not writable, a temporary one."""
        chosen = os.environ.get(CACHE_ENV)
        folder = Path(chosen or "~/.cache/swarm")
        try:
            folder = cache_folder() / "tokens"
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            if chosen and isinstance(error, OSError):
                raise atomic_file.trouble("cannot keep tokens", Path(chosen), error, _REMEDY) from None
            log.warning("cannot keep tokens in %s (%s): they are made again at each start", folder, error)
            folder = Path(tempfile.mkdtemp(prefix="swarm-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return cls(folder, dtype)

    def index(self, root: str) -> Index | None:  # type: ignore
        """That of the tokens with this root; None if they are not here, or not all of them."""
        path = self.folder / root
        if not (path / NAME).exists():
            return None
        with contextlib.suppress(OSError, SetupError):
            index = open_index(str(path / NAME))
            there = [(path / name).stat().st_size for name in (_TOKENS, TREE)]
            if (index.root, index.dtype, there) == (root, self.dtype, [index.size, tree_bytes(index.size)]):
                return index
        log.warning("%s is damaged: making it again", path)
        return None

    def lookup(self, key: str) -> Index | None:
        """What the source with this key became, if it is here and whole."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            root = (self.folder / key).read_text("ascii")
            return self.index(root) if root.isalnum() else None
        return None

    def fill(self, key: str, files: Sequence[Path], tokenizer: Tokenizer, vocab_size: int) -> Index:
        """Make the tokens and keep them."""
        size_bytes = sum(path.stat().st_size for path in files)
        with atomic_file.as_setup_error("cannot keep tokens", _REMEDY, folder=self.folder):
            with atomic_file.new_folder(self.folder) as folder:
                with Bar("reading the text into tokens", size_bytes) as bar:
                    texts = ((str(path), _chunks(path, bar)) for path in files)
                    named = texts if files else [("tales", [tales.text()])]
                    parts = (part for name, chunks in named for part in tokenizer.encode_file(chunks, name))
                    count = write_shard(folder / _TOKENS, parts, self.dtype, vocab_size)
                if _key(files, tokenizer, self.dtype) != key:
                    raise SetupError(
                        "the data files changed while they were read: try again when they are at rest"
                    )
                sources_made = [Source("text", (Shard((_TOKENS,), count),))] if count else []
                made = make_index(folder, sources_made, self.dtype, tokenizer.sha256)
                kept = self.folder / made.root
                kept.mkdir(exist_ok=True)
                for name in (_TOKENS, TREE, NAME):
                    (folder / name).replace(kept / name)
            atomic_file.write_whole(self.folder / key, made.root.encode())
            return open_index(str(kept / NAME))


_REMEDY = f"set {CACHE_ENV} to another folder"


def _key(files: Sequence[Path], tokenizer: Tokenizer, dtype: str) -> str:
    """The hash of all that decides the tokens; of files, what `swarm tokenize` knows them by, too."""
    states = [(os.fspath(path.resolve()), path.stat()) for path in files]
    texts = [f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in states]
    parts = [_LAYOUT, dtype, tokenizer.key, *(texts or [hashlib.sha256(tales.text()).hexdigest()])]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _check(run: Run, index: Index) -> None:
    """The tokens are those of the manifest, and enough."""
    data, window = run.data, run.data.sequence_length + 1
    if index.dtype != token_dtype(run.model.vocab_size):
        raise SetupError(
            f"the index is of {index.dtype}, but model.vocab_size = {run.model.vocab_size} in the run's "
            f"manifest means {token_dtype(run.model.vocab_size)}: make it with swarm tokenize --vocab-size "
            f"{run.model.vocab_size}"
        )
    if index.tokenizer and data.tokenizer == "bytes":
        raise SetupError(
            "the index has the tokens of a tokenizer's file, but the run's manifest says data.tokenizer = "
            '"bytes": make it "file"'
        )
    if run.data.eos >= 0 and index.eos not in (None, run.data.eos):
        raise SetupError(
            f"documents of the index end with token {index.eos}, but data.eos = {run.data.eos} in the run's "
            "manifest: leave it out"
        )
    if index.tokens < window:
        raise SetupError(
            f"the data have {index.tokens} tokens, but one sample needs {window} (data.sequence_length + 1): "
            "give more text, or choose a shorter data.sequence_length"
        )
    if data.sha256 and (data.sha256, data.tokens) != (index.root, index.tokens):
        files = "the same files, in the same order, or the index of the run's owner"
        hint = "the same version of swarm" if data.source == "tales" else files
        raise SetupError(
            f"these are not the data of the run: {index.tokens} tokens with the root {index.root}, but the "
            f"manifest pins {data.tokens} tokens with {data.sha256}: take {hint}"
        )
    if data.tokens > index.tokens:
        raise SetupError(
            f"the manifest speaks of {data.tokens} tokens (data.tokens), here are {index.tokens}"
        )
