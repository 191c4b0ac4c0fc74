"""Text -> Run, with the sizes that a manifest may name, and what is filled in before it is published."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from swarm.errors import MALFORMED, SetupError, did_you_mean
from swarm.manifest.rules import Spec, one_of, shown, wrong
from swarm.manifest.run import MAX_MANIFEST_BYTES, Run
from swarm.manifest.tables import MODEL_KINDS, TABLES, CustomModelSpec, DataSpec, ModelSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _sizes(layers: int, hidden: int, heads: int, **others: Any) -> dict[str, Any]:
    found = {"layers": layers, "hidden": hidden, "heads": heads, "ffn_hidden": 4 * hidden}
    return {**found, "vocab_size": 256, "norm": "rmsnorm", "positions": "rotary", **others}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return _sizes(layers, hidden, heads, kv_heads=kv_heads, mlp="swiglu", **others)


_LLAMA3 = {"vocab_size": 128_256, "rotary_base": 500_000.0}
_GPT2 = {"vocab_size": 50_257, "norm": "layernorm", "positions": "learned"}

PRESETS: dict[str, dict[str, Any]] = {
    "1M": _sizes(5, 128, 4),
    "3M": _sizes(7, 192, 6),
    "10M": _sizes(8, 320, 5),
    "30M": _sizes(10, 512, 8),
    "100M": _sizes(14, 768, 12),
    "gpt2": _sizes(12, 768, 12, **_GPT2),
    "gpt2-medium": _sizes(24, 1024, 16, **_GPT2),
    "gpt2-large": _sizes(36, 1280, 20, **_GPT2),
    "gpt2-xl": _sizes(48, 1600, 25, **_GPT2),
    "1B": _sizes(18, 2048, 16, vocab_size=32_000),
    "3B": _sizes(24, 3072, 24, vocab_size=32_000),
    "gpt3-6.7b": _sizes(32, 4096, 32, **_GPT2),
    "7B": _sizes(32, 4096, 32, vocab_size=32_000),
    "llama-10M": _llama(8, 320, 5, 5, ffn_hidden=864, head="tied"),
    "llama-100M": _llama(12, 768, 12, 4, ffn_hidden=2304, vocab_size=32_000, head="tied"),
    "llama-7b": _llama(32, 4096, 32, 32, ffn_hidden=11_008, vocab_size=32_000),
    "llama3.2-1b": _llama(
        16, 2048, 32, 8, ffn_hidden=8192, head="tied", rotary_scaling="llama3 32 1 4 8192", **_LLAMA3
    ),
    "llama3-8b": _llama(32, 4096, 32, 8, ffn_hidden=14_336, **_LLAMA3),
}
"""Sizes by name, for `model.preset`. Keys that stand beside the preset in a manifest win over it."""


@lru_cache(maxsize=16)  # a manifest passes several hands on its way in
def parse_run(text: str) -> Run:
    """The run that a manifest describes.

    Raises:
        SetupError: too long, not TOML, or a key that is unknown, missing, of a wrong type or impossible.
    """
    if len(text) > MAX_MANIFEST_BYTES or len(text.encode("utf-8", "replace")) > MAX_MANIFEST_BYTES:
        raise SetupError(f"the run's manifest is longer than {MAX_MANIFEST_BYTES} bytes")
    try:
        # ValueError: not TOML, or an integer with more digits than Python reads. RecursionError: `[[[[…`.
        values: dict[str, Any] = tomllib.loads(text)
    except MALFORMED as error:
        raise SetupError(f"the run's manifest is not TOML: {str(error)[:200]}") from None
    return run_of(values)


def run_of(values: Mapping[str, Any]) -> Run:
    """The run of a manifest's keys and tables, as TOML gives them.

    Raises:
        SetupError: a key that is unknown, missing, of a wrong type or impossible.
    """
    values = dict(values)
    tables: dict[str, tuple[type[Spec], dict[str, Any]]] = {}
    _refuse_unknown(Run, {name: value for name, value in values.items() if name not in TABLES})
    for section, spec in TABLES.items():
        table = values.pop(section, {})
        if type(table) is not dict:
            raise wrong(
                section, table, f"a table: [{section}] on a line of its own, then its keys; or a dict"
            )
        if spec is ModelSpec:
            spec, table = _model_of(table)
        if spec is DataSpec and table.get("source") == "code":
            table = {"sequence_length": 1, **table}
        _refuse_unknown(spec, table)
        tables[section] = spec, table
    _refuse_missing((Run, values), *tables.values())
    made: dict[str, Any] = {section: spec(**table) for section, (spec, table) in tables.items()}
    return Run(**values, **made)


def load_run(path: str | Path) -> Run:
    """`parse_run` of a file; the errors name the file."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
        text = raw.decode("utf-8-sig")  # editors of Windows begin files with a mark
    except OSError as error:
        raise SetupError(f"cannot read the manifest {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SetupError(f"the manifest {path} is not UTF-8 text") from None
    try:
        return parse_run(text)
    except SetupError as error:
        raise SetupError(f"{path}: {error.text}") from None


def check_id(text: str, run_id: str) -> Run:
    """The run of a manifest that was fetched by id.

    Raises:
        SetupError: the manifest is not acceptable, or it is another run's.
    """
    run = parse_run(text)
    if run.id != run_id:
        raise SetupError(f"the manifest is of run {run.id}, not of run {run_id[:80]}: do not join it")
    return run


def _model_of(table: dict[str, Any]) -> tuple[type[Spec], dict[str, Any]]:
    """The kind of the table, and its values, with those of its preset if it has one."""
    kind, preset = table.get("kind", "gpt"), table.get("preset")
    if kind not in MODEL_KINDS:
        raise wrong("model.kind", kind, one_of(MODEL_KINDS))
    if kind in ("code", "hf"):
        return CustomModelSpec, table
    if "preset" not in table:
        return ModelSpec, table
    if type(preset) is not str or preset not in PRESETS:
        raise wrong("model.preset", preset, "one of " + ", ".join(f'"{name}"' for name in PRESETS))
    return ModelSpec, {**PRESETS[preset], **{name: v for name, v in table.items() if name != "preset"}}


def _known(spec: type[Spec]) -> dict[str, Field[Any]]:
    return {item.name: item for item in fields(cast(Any, spec)) if item.metadata.get("rule")}


def _refuse_unknown(spec: type[Spec], values: dict[str, Any]) -> None:
    names = list(_known(spec)) + (["preset"] if spec is ModelSpec else [])
    tables = [f"[{table}]" for table in TABLES]
    for name, value in values.items():
        if name in names:
            continue
        # A stranger's text: control characters are not printed.
        told = "".join(c if c.isprintable() else "?" for c in name[:80])
        if not spec.section and type(value) is dict:
            hint = did_you_mean(f"[{name}]", tables)
            raise SetupError(
                f"[{told}] in the run's manifest: unknown table{hint}; its tables are {', '.join(tables)}"
            )
        key = spec._key(told)  # type: ignore
        where = f"[{spec.section}]" if spec.section else "a manifest, before its tables,"
        others = [(table, one) for table, one in TABLES.items() if table != spec.section]
        at = [f" (it stands in [{table}])" for table, one in others if name in _known(one)]
        at += [" (it stands before all tables)"] * (name in _known(Run))
        here = names if spec.section else [*names, *TABLES]
        elsewhere = {key: f" in [{table}]" for table, one in others for key in _known(one).keys() - here}
        near = did_you_mean(name, here, None if spec.section else elsewhere)
        more = "" if spec.section else f"; its tables are {', '.join(tables)}"
        raise SetupError(
            f"{key[:80]} = {shown(value)} in the run's manifest: unknown key{at[0] if at else near}; "
            f"{where} takes {', '.join(names)}{more}"
        )


def _refuse_missing(*tables: tuple[type[Spec], dict[str, Any]]) -> None:
    lacking: dict[str, str] = {}
    more = ""
    for spec, values in tables:
        for name, item in _known(spec).items():
            if name not in values and item.default is MISSING:
                key = spec._key(name)  # type: ignore
                lacking[key] = item.metadata["rule"].allowed
                more = more or (
                    ", or give model.preset" if spec is ModelSpec and name in PRESETS["1M"] else ""
                )
    if len(lacking) == 1:
        ((key, allowed),) = lacking.items()
        raise SetupError(f"{key} is missing in the run's manifest: it must be {allowed}{more}")
    if lacking:
        told = "; ".join(f"{key} must be {allowed}" for key, allowed in lacking.items())
        told = told if len(lacking) < 9 else "`swarm manifest` prints an example with all of them"
        raise SetupError(f"{', '.join(lacking)} are missing in the run's manifest: {told}{more}")


def pin(run: Run, sha256: str, tokens: int, **others: Any) -> Run:
    """`run` bound to its tokens, as they were found. `others`: keys of [data]; what is empty or None stays as
    it is. Its id changes.
    """
    given = {name: value for name, value in others.items() if value not in ("", None)}
    return replace(run, data=replace(run.data, sha256=sha256, tokens=tokens, **given))


def write_cut(assignment: Sequence[int]) -> str:
    """The stage of each operator as text: `0*120 1*44`."""
    return " ".join(f"{stage}*{len(list(run))}" for stage, run in itertools.groupby(assignment))


def read_cut(text: str, operators: int) -> tuple[int, ...] | None:
    """The stage of each of so many operators; None if the cut has another number of them."""
    runs = [(int(stage), int(count)) for stage, _, count in (run.partition("*") for run in text.split())]
    if sum(count for _, count in runs) != operators:
        return None
    return tuple(stage for stage, count in runs for _ in range(count))
