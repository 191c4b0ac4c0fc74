"""Text <-> tokens: one token for each byte, or those of a `tokenizers` JSON file."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarm.errors import SetupError
from swarm.manifest import Run

PART_CHARS = 1 << 16
"""A file tokenizer gets text in parts of at most this many characters, ending after a line if there is one.

Part of what the tokens are (no token spans two parts), hence not an option. Large enough that a boundary
costs one token in ten thousand, small enough that a part is tokenized in milliseconds."""

_PARTS_AT_ONCE = 32
_DOCUMENTS_AT_ONCE, _CHARS_AT_ONCE = 256, 1 << 24
"""The tokenizers library spreads the parts of one call over the cores. Of long documents fewer are held."""


class Tokenizer:
    """Text <-> tokens: one per byte, or those of a `tokenizers` JSON file."""

    def __init__(self, library: Any = None, json: bytes = b"") -> None:
        """`library`: a `tokenizers.Tokenizer`; None = bytes. `json`: what it was made from."""
        self._library, self.json = library, json
        self.sha256 = hashlib.sha256(json).hexdigest() if json else ""
        """Of the JSON file; empty for bytes."""

    @property
    def key(self) -> str:
        """What decides the tokens of a given text."""
        if self._library is None:
            return "bytes"
        import tokenizers

        return f"{self.sha256} {PART_CHARS} tokenizers {tokenizers.__version__}"

    @property
    def vocabulary(self) -> int:
        if self._library is None:
            return 256
        return 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=0)

    def token(self, name: str) -> int | None:
        """The number of a token by its name; None: there is none such."""
        return None if self._library is None else self._library.token_to_id(name)

    def added(self) -> list[str]:
        """Names of tokens that stand for no text, such as the end of a document."""
        return [str(token) for token in self._library.get_added_tokens_decoder().values()]

    def encode_documents(self, texts: Iterable[str], end: int | None) -> Iterator[np.ndarray]:
        """The tokens of documents, each with `end` behind it, in parts of any length."""
        behind, rest = np.array([] if end is None else [end], np.uint32), iter(texts)
        while batch := list(_some(rest)):
            long = batch.pop() if len(batch[-1]) > _CHARS_AT_ONCE else None
            parts = [part for row in self._rows(batch) for part in (row, behind)]
            yield np.concatenate([behind[:0], *parts])
            if long is not None:  # a file in one line: the library takes 250 bytes for each character
                yield from self.encode_file([long.encode("utf-8", "replace")], "")
                yield behind

    def encode(self, text: str) -> list[int]:
        return self._rows([text])[0].tolist()

    def _rows(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each of some texts; the library spreads them over the cores.

        Raises:
            SetupError: it cannot: its pattern, which is from a file, would split one of them for ever.
        """
        if self._library is None:
            return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8) for text in texts]
        with _in_library("the tokenizer fails on a text"):
            encoded = self._library.encode_batch(texts, add_special_tokens=False)
        return [np.asarray(one.ids, np.uint32) for one in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no text shows as U+FFFD, what is no token is left out.

        Raises:
            SetupError: the decoder, which is from a file, cannot say it.
        """
        if self._library is None:
            return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", "replace")
        with _in_library("the tokenizer makes no text of some tokens"):
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
            yield np.concatenate(self._rows(batch))


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
    found = load_tokenizer(path)
    if run.data.tokenizer_sha256 not in ("", found.sha256):
        raise SetupError(
            f"{path} is not the tokenizer of the run: its SHA-256 is {found.sha256}, "
            f"the manifest says {run.data.tokenizer_sha256}"
        )
    if found.vocabulary > run.model.vocab_size:
        raise vocabulary_too_small(run.model.vocab_size, found.vocabulary - 1)
    return found


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """That of a JSON file, or of a name on Hugging Face's hub; None = bytes.

    Raises:
        SetupError: it cannot be had, or is none.
    """
    if path is None:
        return Tokenizer()
    import tokenizers

    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) or str(path).endswith(".json"):
            raise SetupError(f"cannot read the tokenizer {path}: {error.strerror or error}") from None
        none = "there is no such file, and none of that name can be had from Hugging Face's hub"
        with _in_library(f"--tokenizer {path}: {none}"):
            raw = tokenizers.Tokenizer.from_pretrained(str(path)).to_str().encode()
    with _in_library(f"{path} is not a `tokenizers` JSON file"):
        library = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
    # A JSON may ask for these; they would cut or fill every part.
    library.no_truncation()
    library.no_padding()
    return Tokenizer(library, raw)


@contextlib.contextmanager
def _in_library(what: str) -> Iterator[None]:
    """Raises SetupError: what the library was given, which may be a stranger's, has it fail."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise  # its panic is no Exception
        raise SetupError(f"{what}: {str(error)[:200]}; take another one") from None


def _some(texts: Iterable[str]) -> Iterator[str]:
    """The next documents of many, of which one call makes tokens."""
    chars = 0
    for text in itertools.islice(texts, _DOCUMENTS_AT_ONCE):
        yield text
        chars += len(text)
        if chars >= _CHARS_AT_ONCE:
            return


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


def vocabulary_too_small(vocab_size: int, largest: int) -> SetupError:
    return SetupError(
        f"model.vocab_size = {vocab_size} in the run's manifest, but the tokenizer makes tokens up to "
        f"{largest}: it must be at least {largest + 1}"
    )
