"""Runs are written to a folder of each test; torch has one thread, the models are tiny."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.storage import CACHE_ENV
from tests.model.conftest import one_thread

__all__ = ("one_thread", "own_cache")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    return tmp_path
