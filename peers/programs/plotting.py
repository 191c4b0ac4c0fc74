"""Pictures as PNG files, where matplotlib is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from swarm.errors import SetupError


def load_pyplot(option: str, *, instead: str = "") -> Any:
    """matplotlib's pyplot, without a window. `option` is what the user asked with, `instead` another way.

    Raises:
        SetupError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise SetupError(f"{option} needs matplotlib: .venv/bin/pip install -e '.[plot]'{instead}") from None


def save(figure: Any, path: Path, option: str, *, dpi: int) -> None:
    """Write a figure and close it.

    Raises:
        SetupError: the file cannot be written.
    """
    try:
        figure.savefig(path, format="png", dpi=dpi)
    except OSError as error:
        raise SetupError(f"{option} {path} cannot be written: {error.strerror or error}") from None
    finally:
        load_pyplot(option).close(figure)
