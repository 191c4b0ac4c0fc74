"""Tensors that lie in a folder while they are not needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peers.programs.verify import open_scratch
from swarm.errors import SetupError


def test_what_is_put_there_is_read_to_the_bit_and_gone_afterwards(tmp_path: Path) -> None:
    with open_scratch(tmp_path / "new") as scratch:
        tensors = {"0": torch.randn(3, 5), "2": torch.arange(7, dtype=torch.uint8), "none": torch.zeros(0)}
        scratch["inputs 1 0"] = tensors
        before = scratch["inputs 1 0"]
        scratch["inputs 1 0"] = {"0": torch.ones(3, 5)}
        assert all(torch.equal(before[name], one) for name, one in tensors.items())
        assert torch.equal(scratch["inputs 1 0"]["0"], torch.ones(3, 5))
        scratch["empty"] = {}
        assert scratch["empty"] == {}
        assert sorted(scratch) == ["empty", "inputs 1 0"] and len(scratch) == 2
        del scratch["empty"]
        assert scratch.pop("empty", None) is None and "empty" not in scratch
        with pytest.raises(KeyError):
            del scratch["empty"]
    assert not list((tmp_path / "new").iterdir())


def test_without_a_folder_it_is_memory() -> None:
    with open_scratch(None) as scratch:
        assert isinstance(scratch, dict)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"cannot write to --scratch .*file: .*: choose another"):
        with open_scratch(tmp_path / "file"):
            pass
    with open_scratch(tmp_path) as scratch:
        for folder in tmp_path.iterdir():
            if folder.is_dir():
                folder.rmdir()
        with pytest.raises(SetupError, match=r"cannot write to --scratch .*: choose another"):
            scratch["state 0"] = {"weights": torch.zeros(1)}
