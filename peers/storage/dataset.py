"""Text files of any size -> tokens, memory-mapped.

The tokens of a run are one array of the narrowest type (`swarm.data.token_dtype`), in a cache folder, named
by its own SHA-256, the same that the manifest pins:

    CACHE/tokens/SHA256.uint8        the tokens, little-endian, nothing else
    CACHE/tokens/KEY                 the digest of what a source became: KEY is of its bytes and the tokenizer

Files are read in parts and never held whole. What is in the cache is verified when it is opened, so a
damaged or half-written cache costs time and never a wrong token.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from peers.progress import Bar
from peers.storage import CACHE_ENV, atomic_file
from swarm import tales
from swarm.data import prove_samples, token_dtype
from swarm.errors import SetupError
from swarm.manifest import Run, pin
from swarm.merkle import Tree

PART_CHARS = 1 << 16
"""A file tokenizer gets text in parts of at most this many characters, ending after a line if there is one.

Part of what the tokens are (no token spans two parts), hence not an option. Large enough that a boundary
costs one token in ten thousand, small enough that a part is tokenized in milliseconds."""

_PARTS_AT_ONCE = 32
"""The tokenizers library spreads the parts of one call over the cores."""

_LAYOUT = "1"
"""Part of every key: raise it when the same source would give other tokens."""

log = logging.getLogger(__name__)


class Tokenizer:
    """Text <-> tokens: one per byte, or those of a `tokenizers` JSON file."""

    def __init__(self, library: Any = None, *, sha256: str = "") -> None:
        """`library`: a `tokenizers.Tokenizer`; None = bytes."""
        self._library = library
        self.sha256 = sha256
        """Of the JSON file; empty for bytes."""

    @property
    def key(self) -> str:
        """What decides the tokens of a given text."""
        if self._library is None:
            return "bytes"
        import tokenizers

        return f"{self.sha256} {PART_CHARS} tokenizers {tokenizers.__version__}"

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, such as a prompt."""
        if self._library is None:
            return list(text.encode("utf-8", "replace"))
        return list(self._library.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no text shows as U+FFFD, what is no token is left out."""
        if self._library is None:
            return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", "replace")
        return str(self._library.decode(list(tokens), skip_special_tokens=False))

    def encode_file(self, chunks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """The tokens of a file that is read in chunks, in parts of any length.

        Raises:
            SetupError: the file is not UTF-8 and the tokenizer needs it to be.
        """
        if self._library is None:
            yield from (np.frombuffer(chunk, np.uint8) for chunk in chunks)
            return
        parts = _text_parts(chunks, name)
        while batch := list(itertools.islice(parts, _PARTS_AT_ONCE)):
            encoded = self._library.encode_batch(batch, add_special_tokens=False)
            yield np.concatenate([np.asarray(one.ids, np.uint32) for one in encoded])


class Dataset:
    """The tokens of a run, on disk."""

    def __init__(self, tokens: np.ndarray, window: int, *, sha256: str, tokenizer: Tokenizer) -> None:
        """`tokens`: 1-D, of the narrow dtype. `window`: tokens of one sample, which is T + 1."""
        self._tokens = tokens
        self._window = window
        self.sha256 = sha256
        """Of the tokens' bytes, little-endian."""
        self.tokenizer = tokenizer

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self._tokens)

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8, uint16 or uint32."""
        return self._tokens.dtype

    def batch(self, offsets: Sequence[int]) -> np.ndarray:
        """The samples that start at `offsets` (see `swarm.data.sample_offsets`).

        Returns:
            Tokens [B, T + 1] of the narrow dtype, copied out of the file.
        """
        last = self.tokens - self._window
        assert all(0 <= offset <= last for offset in offsets), "offsets come from sample_offsets"
        return np.stack([self._tokens[offset : offset + self._window] for offset in offsets])

    def pinned(self, run: Run) -> Run:
        """`run` bound to these tokens: the run to publish. Trainers that it names prove what they send."""
        root = self.tree.root.hex() if run.admission.trainers and not run.brings_model else ""
        return pin(run, self.sha256, self.tokens, tokenizer_sha256=self.tokenizer.sha256, root=root)

    @cached_property
    def tree(self) -> Tree:
        """The tree over all tokens. Made when it is first asked for: 5 s for each GB."""
        raw = self._tokens.view(np.uint8)

        def read(start: int, end: int) -> bytes:
            return raw[start:end].tobytes()

        with Bar("making the tree of the tokens", len(raw)) as bar:
            return Tree(read, len(raw), bar)

    def prove(self, run: Run, offsets: Sequence[int]) -> bytes:
        """The proof that goes with the samples at `offsets`, for a run with a `data.root`."""
        return prove_samples(run, self.tree, offsets)

    def check_root(self, run: Run) -> None:
        """Make the tree, if the run wants proofs.

        Raises:
            SetupError: it is not that of the manifest.
        """
        if run.data.root and run.data.root != self.tree.root.hex():
            raise SetupError(
                f"these tokens have the root {self.tree.root.hex()}, but the manifest says {run.data.root} "
                "(data.root): its owner has to publish it anew, with data.root left out"
            )


def open_dataset(
    run: Run,
    files: Sequence[str | Path] | None = None,
    tokenizer: str | Path | None = None,
    cache_dir: str | Path | None = None,
) -> Dataset:
    """The tokens that `run` trains on: from the cache, or made now.

    Args:
        files: the text files of a run whose source is "files", in order; for a pinned run that was opened
            here before, the cache is enough. None or empty for "tales".
        tokenizer: the JSON file of a run whose tokenizer is "file".
        cache_dir: instead of $SWARM_CACHE and of ~/.cache/swarm. When neither is given and the default is not
            writable, the tokens go to a temporary file that has no name any more.

    Raises:
        SetupError: a file is missing, unreadable, not text, too short, or not what the manifest pins; the
            cache is not writable or full. Says what to do.
    """
    made_by = open_tokenizer(run, tokenizer)
    with _Cache.choose(cache_dir, token_dtype(run.model.vocab_size)) as cache:
        found = cache.tokens(run.data.sha256) if run.data.sha256 and not files else None
        if found is None:
            sources = _sources(run, files)
            key = _key(sources, made_by, cache.dtype)
            found = cache.lookup(key) or cache.fill(key, sources, made_by, run.model.vocab_size)
    window = run.data.sequence_length + 1
    try:
        _check(run, found, window)
    except SetupError:
        found.file.close()
        raise
    return Dataset(found.map(), window, sha256=found.sha256, tokenizer=made_by)


def open_tokenizer(run: Run, path: str | Path | None = None) -> Tokenizer:
    """The run's tokenizer; `path` is the JSON file of a run whose tokenizer is "file".

    Raises:
        SetupError: missing, unexpected, unreadable, not a tokenizer, or not the one of the manifest.
    """
    if run.data.tokenizer == "bytes":
        if path is not None:
            raise SetupError(f'the run needs no tokenizer file (data.tokenizer = "bytes"): leave {path} out')
        return Tokenizer()
    if path is None:
        raise SetupError(
            'the run needs its tokenizer (data.tokenizer = "file"): give its JSON with --tokenizer'
        )
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise SetupError(f"cannot read the tokenizer {path}: {error.strerror or error}") from None
    sha256 = hashlib.sha256(raw).hexdigest()
    if run.data.tokenizer_sha256 not in ("", sha256):
        raise SetupError(
            f"{path} is not the tokenizer of the run: its SHA-256 is {sha256}, "
            f"the manifest says {run.data.tokenizer_sha256}"
        )
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
    except Exception as error:  # noqa: BLE001 - the library raises no narrower type than Exception
        raise SetupError(f"{path} is not a `tokenizers` JSON file: {str(error)[:200]}") from None
    # A JSON may ask for these; they would cut or fill every part.
    library.no_truncation()
    library.no_padding()
    largest = max(library.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= run.model.vocab_size:
        raise _vocabulary_too_small(run.model.vocab_size, largest)
    return Tokenizer(library, sha256=sha256)


# --- where the text comes from


@dataclass(frozen=True)
class _Source:
    """A text and how to open it."""

    name: str
    opened: Callable[[], BinaryIO]
    size_bytes: int = 0


def _chunks(source: _Source, digest: Any, progress: Callable[[int], None]) -> Iterator[bytes]:
    """What is in a source; `digest` is of all of it in the end.

    Raises:
        SetupError: it cannot be read.
    """
    try:
        with source.opened() as file:
            while chunk := file.read(atomic_file.CHUNK_BYTES):
                digest.update(chunk)
                progress(len(chunk))
                yield chunk
    except OSError as error:
        raise SetupError(f"cannot read the data file {source.name}: {error.strerror or error}") from None


def _sources(run: Run, files: Sequence[str | Path] | None) -> list[_Source]:
    if run.data.source == "tales":
        if files:
            raise SetupError(f'the run reads tales (data.source = "tales"), but {files[0]} was given')
        return [_Source("tales", lambda: io.BytesIO(tales.text()))]
    if not files:
        raise SetupError(
            'the run reads text files (data.source = "files"): give them with --data, in the owner\'s order'
        )
    return [_file_source(Path(path)) for path in files]


def _file_source(path: Path) -> _Source:
    if path.is_dir():
        raise SetupError(f"the data file {path} is a folder: give the text files in it, such as {path}/*.txt")
    if not path.exists():
        raise SetupError(f"the data file {path} does not exist (looked for it in {path.absolute().parent})")
    if not path.is_file():
        raise SetupError(
            f"the data file {path} is not a regular file: save its text to one, it is read twice"
        )
    return _Source(str(path), lambda: path.open("rb"), path.stat().st_size)


def _text_parts(chunks: Iterable[bytes], name: str) -> Iterator[str]:
    """The text in parts that depend on nothing but the text (see PART_CHARS)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, before = "", 0
    for chunk in itertools.chain(chunks, [b""]):
        try:
            text += decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            # The decoder may have kept the start of a character from the chunk before.
            at = before - (len(error.object) - len(chunk)) + error.start
            raise SetupError(
                f"the data file {name} is not UTF-8 (byte {at}), which the run's tokenizer needs: convert it "
                f"with `iconv -t UTF-8`, or train on bytes (data.tokenizer)"
            ) from None
        before += len(chunk)
        start = 0
        while len(text) - start > PART_CHARS:
            end = text.rfind("\n", start, start + PART_CHARS) + 1 or start + PART_CHARS
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


# --- the cache


@dataclass(frozen=True)
class _Tokens:
    """A verified file of tokens, still open (it may be unnamed, or removed by another process)."""

    file: BinaryIO
    sha256: str
    count: int
    dtype: str

    def map(self) -> np.ndarray:
        with self.file:
            return np.memmap(self.file, np.dtype(self.dtype).newbyteorder("<"), "r", shape=(self.count,))


@dataclass(frozen=True)
class _Cache:
    folder: Path
    dtype: str

    @classmethod
    @contextlib.contextmanager
    def choose(cls, given: str | Path | None, dtype: str) -> Iterator[_Cache]:
        """The folder that was asked for; if the default is not writable, one that is removed afterwards."""
        chosen = given or os.environ.get(CACHE_ENV)
        folder = Path(chosen or "~/.cache/swarm")
        with contextlib.ExitStack() as stack:
            try:
                folder = folder.expanduser() / "tokens"
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
                if chosen and isinstance(error, OSError):
                    raise atomic_file.trouble("cannot keep tokens", Path(chosen), error, _REMEDY) from None
                log.warning("cannot keep tokens in %s (%s): they are made again at each start", folder, error)
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            yield cls(folder, dtype)

    def tokens(self, sha256: str) -> _Tokens | None:
        """The tokens with this digest, verified; None if they are not here, or damaged."""
        path = self._path(sha256)
        try:
            file = path.open("rb")
        except OSError:
            return None
        digest = hashlib.sha256()
        with contextlib.suppress(OSError):
            while chunk := file.read(atomic_file.CHUNK_BYTES):
                digest.update(chunk)
            if digest.hexdigest() == sha256:
                return _Tokens(file, sha256, file.tell() // np.dtype(self.dtype).itemsize, self.dtype)
        log.warning("%s is damaged: making it again", path)
        file.close()
        return None

    def lookup(self, key: str) -> _Tokens | None:
        """What the source with this key became, if it is here and whole."""
        try:
            sha256 = (self.folder / key).read_text("ascii")
        except (OSError, UnicodeDecodeError):
            return None
        return self.tokens(sha256) if sha256.isalnum() else None

    def fill(self, key: str, sources: list[_Source], tokenizer: Tokenizer, vocab_size: int) -> _Tokens:
        """Make the tokens and keep them."""
        try:
            with atomic_file.replacing(self.folder) as (file, temporary):
                sha256, count = self._write(file, key, sources, tokenizer, vocab_size)
                atomic_file.commit(file, temporary, self._path(sha256))
            atomic_file.write_whole(self.folder / key, sha256.encode())
            return _Tokens(self._path(sha256).open("rb"), sha256, count, self.dtype)
        except OSError as error:
            raise atomic_file.trouble("cannot keep tokens", self.folder, error, _REMEDY) from None

    def _path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.{self.dtype}"

    def _write(
        self, file: BinaryIO, key: str, sources: list[_Source], tokenizer: Tokenizer, vocab_size: int
    ) -> tuple[str, int]:
        """Write the tokens of all sources; their SHA-256 and how many there are."""
        narrow = np.dtype(self.dtype).newbyteorder("<")
        digest, count = hashlib.sha256(), 0
        contents = [hashlib.sha256() for _ in sources]
        with _bar("reading the text into tokens", sources) as bar:
            for source, content in zip(sources, contents, strict=True):
                for tokens in tokenizer.encode_file(_chunks(source, content, bar), source.name):
                    if len(tokens) and (largest := int(tokens.max())) >= vocab_size:
                        raise _vocabulary_too_small(vocab_size, largest)
                    raw = tokens.astype(narrow).view(np.uint8).data
                    digest.update(raw)
                    atomic_file.write_all(file, raw)
                    count += len(tokens)
        if _hash_key(contents, tokenizer, self.dtype) != key:
            raise SetupError("the data files changed while they were read: try again when they are at rest")
        return digest.hexdigest(), count


_REMEDY = f"set {CACHE_ENV} to another folder"


def _key(sources: list[_Source], tokenizer: Tokenizer, dtype: str) -> str:
    """The hash of all that decides the tokens; reads every source once."""
    contents = [hashlib.sha256() for _ in sources]
    with _bar("comparing the text with the cache", sources) as bar:
        for source, content in zip(sources, contents, strict=True):
            for _ in _chunks(source, content, bar):
                pass
    return _hash_key(contents, tokenizer, dtype)


def _bar(what: str, sources: Sequence[_Source]) -> Bar:
    return Bar(what, sum(source.size_bytes for source in sources))


def _hash_key(contents: Iterable[Any], tokenizer: Tokenizer, dtype: str) -> str:
    """`contents`: the digests of the sources."""
    parts = [_LAYOUT, dtype, tokenizer.key, *(content.hexdigest() for content in contents)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _check(run: Run, found: _Tokens, window: int) -> None:
    """The tokens are those of the manifest, and enough."""
    data = run.data
    if found.count < window:
        raise SetupError(
            f"the data have {found.count} tokens, but one sample needs {window} (data.sequence_length + 1): "
            "give more text, or choose a shorter data.sequence_length"
        )
    if data.sha256 and (data.sha256, data.tokens) != (found.sha256, found.count):
        hint = "the same version of swarm" if data.source == "tales" else "the same files, in the same order"
        raise SetupError(
            f"these are not the data of the run: {found.count} tokens with SHA-256 {found.sha256}, but the "
            f"manifest pins {data.tokens} tokens with {data.sha256}: take {hint}"
        )
    if data.tokens > found.count:
        raise SetupError(f"the manifest speaks of {data.tokens} tokens (data.tokens), here are {found.count}")


def _vocabulary_too_small(vocab_size: int, largest: int) -> SetupError:
    return SetupError(
        f"model.vocab_size = {vocab_size} in the run's manifest, but the tokenizer makes tokens up to "
        f"{largest}: it must be at least {largest + 1}"
    )
