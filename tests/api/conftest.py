"""Runs are written to a folder of each test; torch has one thread, the models are tiny."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peers.storage import CACHE_ENV


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    return tmp_path


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
