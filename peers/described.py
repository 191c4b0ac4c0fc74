"""Files that describe machines, for `swarm plan` and `swarm simulate`."""

from __future__ import annotations

from pathlib import Path

from swarm.errors import SetupError
from swarm.plan.network import Network, read_devices


def load_devices(path: Path) -> Network:
    """The network of a `devices.toml`.

    Raises:
        SetupError: it cannot be read, or says what cannot be; the text names the file.
    """
    text = read_text(path)
    try:
        return read_devices(text)
    except SetupError as error:
        raise SetupError(f"{path}: {error.text}") from None


def read_text(path: Path) -> str:
    """All of a file that a user gave.

    Raises:
        SetupError: there is none, or it is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise SetupError(f"{path} cannot be read: {reason}") from None
