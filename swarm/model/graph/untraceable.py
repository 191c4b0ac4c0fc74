"""Why a model is no graph, and which of the user's lines says so."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from torch import fx

_BY_NUMBERS = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")


class Untraceable(Exception):
    """The model is no one graph of operators; the text says why."""


def reason(error: BaseException) -> str:
    """What tracing raised, as one sentence that names the user's own line."""
    first = str(error).strip().partition("\n")[0].strip() or type(error).__name__
    return f"{_line_of(error)}{_meaning(error) or first}"


def _meaning(error: BaseException) -> str:
    """In plain words, for the mistakes that are common."""
    name, text = type(error).__name__, str(error)
    if name in _BY_NUMBERS or "Data-dependent" in text:
        operator = getattr(error, "func", None)
        return (
            f"{f'operator {operator}: ' if operator else ''}what the code does depends on the numbers in a "
            "tensor; use torch.where or a mask, so that every microbatch takes the same path"
        )
    if "fake tensor in the exported program" in text or "saved tensor hooks" in text:
        return "it reads .data, or takes gradients while it computes: take .detach(), or write their formula"
    return ""


def _line_of(error: BaseException) -> str:
    """The last line outside of torch and of this package that led to the error, or that its text names."""
    root, torchs = Path(__file__).parents[3], str(Path(torch.__file__).parent)
    not_theirs = (f"{root}/swarm/", f"{root}/peers/", torchs, "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(not_theirs):
            return f"{Path(frame.filename).name}:{frame.lineno}: `{frame.line}`: "
    return ""


def where(node: fx.Node) -> str:
    """The user's line that a node comes from, "file.py:12: ", or nothing."""
    found = re.findall(r'File "(?:.*/)?(.*)", line (\d+)', node.meta.get("stack_trace") or "")
    return "{}:{}: ".format(*found[-1]) if found else ""
