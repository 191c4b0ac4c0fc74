"""The manifest: strict, bounded, and one text per meaning."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.programs.manifest import EXAMPLE
from scripts.bench.common.model_sizes import parameter_count
from swarm.errors import SetupError
from swarm.manifest import (
    MAX_CELLS,
    MAX_MANIFEST_BYTES,
    MAX_ROTATIONS,
    PRESETS,
    AdmissionSpec,
    BatchSpec,
    CodecSpec,
    CustomModelSpec,
    DataSpec,
    EvalSpec,
    IslandsSpec,
    LoraSpec,
    ModelSpec,
    OptimizerSpec,
    Run,
    StartSpec,
    audit_run,
    check_id,
    demo_run,
    load_run,
    parse_run,
    pin,
    read_cut,
    run_of,
    write_cut,
)
from tests.example import example_run

ALICE = "12D3KooW" + "A" * 44
BOB = "12D3KooW" + "B" * 44
FULL = replace(
    example_run(),
    data=replace(example_run().data, tokens=123_000, root="c" * 64, document_mask=True, eos=0),
    model=replace(
        example_run().built_in,
        z_loss=1e-4,
        kv_heads=1,
        mlp="swiglu",
        head="tied",
        qk_norm=True,
        rotary_base=5e5,
        rotary_scaling="llama3 8 1 4 8192",
        bottleneck=40,
    ),
    batch=replace(example_run().batch, microbatch_threads=2, warmup_steps=9, warmup_microbatches=2),
    optimizer=replace(
        example_run().optimizer,
        name="muon",
        muon=("layers.*",),
        schedule="wsd",
        decay_steps=9,
        groups=("tokens.* lr=0.5",),
        moments="bfloat16",
    ),
    admission=AdmissionSpec(owner=ALICE, trainers=(ALICE, BOB), founders=(BOB,)),
    start=StartSpec(weights="hf:openai-community/gpt2@main", digests=tuple(c * 64 for c in "123")),
    eval=EvalSpec(every=10, samples=80, sha256="d" * 64, tokens=99_000),
)
"""A run whose text has every key but that of a mixture."""
MIXED = replace(FULL, data=replace(FULL.data, source="files", mixture="7*100000 3*23000"))
BROUGHT = replace(
    example_run(),
    model=CustomModelSpec(
        kind="hf",
        config='{"model_type": "gpt2", "n_layer": 2}',
        inputs=("input_ids int 8", "scores float 2x3", "labels int", "return_loss true"),
        stages=2,
        frozen=("embed.*",),
        version="transformers 5.1.0",
        graph="a" * 64,
        digests=("b" * 64, "c" * 64),
        cut="0*7 1*5 0*1 1*2",
    ),
    data=DataSpec(source="code", code="pictures.of_cats:samples", sequence_length=1),
    lora=LoraSpec(rank=8, alpha=32.0, targets=("c_attn",)),
)
"""A run of a model that somebody brings, with every key of its tables."""
TABLES = ("model", "data", "batch", "optimizer", "codec", "admission", "start", "eval")


# --- canonical text and id ----------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any manifest that is acceptable."""
    heads = draw(st.integers(1, 16))
    layers = draw(st.integers(1, 64))
    steps = draw(st.integers(1, 10**9))
    length = draw(st.integers(1, 4096))
    stages = draw(st.integers(1, layers))
    codecs = st.sampled_from(["none", "bf16", "blockwise8", "topk:0.05", "topk:0.000001+blockwise8"])
    at_each = st.lists(codecs, min_size=stages - 1, max_size=stages - 1).map(tuple)
    at_boundaries: st.SearchStrategy[Any] = st.one_of(codecs, at_each) if stages > 1 else codecs
    name: Any = draw(st.sampled_from(["adamw", "sgd"]))
    ratio = st.floats(0, 1, exclude_max=True)
    pinned, rounds = draw(st.booleans()), draw(st.booleans())
    return Run(
        name=draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9 ._+-]{0,62}\Z")),
        seed=draw(st.integers(0, 2**63 - 1)),
        steps=steps,
        dtype=draw(st.sampled_from(["float32", "bfloat16", *["float64"][rounds:]])),
        delayed_updates=not rounds and draw(st.booleans()),
        exact_sums=rounds or draw(st.booleans()),
        checkpoint_every=draw(st.integers(0, 10**9)),
        model=ModelSpec(
            kind=draw(st.sampled_from(["gpt", "counting"])),
            layers=layers,
            hidden=heads * 2 * draw(st.integers(1, 64)),
            heads=heads,
            ffn_hidden=draw(st.integers(1, 10_000)),
            vocab_size=draw(st.integers(256, 100_000)),
            norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
            positions=draw(st.sampled_from(["rotary", "learned"])),
            dropout=draw(ratio),
            stages=stages,
        ),
        data=DataSpec(
            source=draw(st.sampled_from(["tales", "files"])),
            sha256=draw(st.from_regex(r"\A[0-9a-f]{64}\Z")) if pinned else "",
            tokens=draw(st.integers(length + 1, 2**48)) if pinned else 0,
            tokenizer="file" if pinned else draw(st.sampled_from(["bytes", "file"])),
            tokenizer_sha256=draw(st.from_regex(r"\A[0-9a-f]{64}\Z")) if pinned else "",
            sequence_length=length,
        ),
        batch=BatchSpec(
            microbatch_size=draw(st.integers(1, 65_536)), microbatches_per_step=draw(st.integers(1, 8192))
        ),
        optimizer=OptimizerSpec(
            name=name,
            lr=draw(st.one_of(st.integers(1, 1000), st.floats(0, 1000, exclude_min=True))),
            beta1=draw(ratio),
            beta2=draw(ratio),
            eps=draw(st.floats(1e-37, 1)),
            weight_decay=draw(st.floats(0, 10)),
            momentum=draw(ratio) if name == "sgd" else 0,
            warmup_steps=draw(st.integers(0, steps - 1)),
            schedule=draw(st.sampled_from(["constant", "cosine", "linear", "inverse_sqrt"])),
            groups=draw(st.sampled_from([(), ("a.* lr=0.5", "* weight_decay=1e-3")])),
            min_lr_ratio=draw(st.floats(0, 1)),
            clip_norm=draw(st.floats(0, 1e9)),
        ),
        codec=CodecSpec(
            forward=draw(at_boundaries),
            backward=draw(st.sampled_from(["none", "bf16", "blockwise8"])),
            reduce=draw(st.sampled_from(["rounded16", "rounded8"])) if rounds else "none",
        ),
        admission=AdmissionSpec(
            owner=draw(st.sampled_from(["", ALICE])),
            trainers=draw(st.sampled_from([(), (ALICE,), (ALICE, BOB), (BOB, ALICE)])),
            founders=draw(st.sampled_from([(), (ALICE,)])),
        ),
    )


@given(run=runs())
def test_the_canonical_text_reads_back_as_the_same_run_and_the_same_text(run: Run) -> None:
    text = run.to_toml()
    again = parse_run(text)
    assert again == run
    assert again.to_toml() == text
    assert again.id == run.id == hashlib.sha256(text.encode()).hexdigest()[:32]
    assert text.isascii()
    assert len(text) <= MAX_MANIFEST_BYTES


def test_the_largest_admission_still_fits_a_manifest() -> None:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    ids = tuple("12D3KooW" + a + b + "A" * 42 for a in letters for b in letters)[:200]
    run = replace(FULL, admission=AdmissionSpec(owner=ALICE, trainers=ids, founders=ids[:40]))
    assert parse_run(run.to_toml()) == run


def test_the_id_of_the_audit_run_is_what_it_was_when_it_was_written_down() -> None:
    # Not sacred, but a change here means that old manifests become other runs: raise `format` then.
    assert audit_run().id == "1ddb7ccb414d53197a8a7c6fbc6ccffc"


def test_every_value_is_in_the_hash() -> None:
    ids = [FULL.id, MIXED.id]
    # Digests are of as many stages, and the audit model has no loss and no attention.
    pinned, unpinned = FULL, replace(FULL, start=StartSpec(), eval=EvalSpec())
    unpinned = replace(unpinned, data=replace(FULL.data, document_mask=False, eos=-1))
    for key, value in (
        ("name", "x"),
        ("seed", 2),
        ("steps", 2000),
        ("dtype", "bfloat16"),
        ("delayed_updates", True),
        ("checkpoint_every", 7),
    ):
        ids.append(replace(FULL, **{key: value}).id)
    ids.append(replace(FULL, exact_sums=False, model=replace(FULL.built_in, head="free")).id)
    changes: dict[str, dict[str, Any]] = {
        "model": {
            "layers": 9,
            "hidden": 640,
            "heads": 10,
            "ffn_hidden": 1,
            "vocab_size": 300,
            "norm": "layernorm",
        }
        | {"positions": "learned", "dropout": 0.1, "stages": 2, "kind": "counting", "z_loss": 0.0}
        | {"kv_heads": 5, "mlp": "gelu", "head": "free", "qk_norm": False, "rotary_base": 1e4}
        | {"rotary_scaling": "linear 2", "bottleneck": 39},
        "data": {"source": "files", "tokens": 1000, "tokenizer": "file", "sequence_length": 5, "eos": 1},
        "batch": {"microbatch_size": 1, "microbatches_per_step": 4, "microbatch_threads": 3}
        | {"warmup_steps": 1, "warmup_microbatches": 1},
        "optimizer": {"lr": 1, "beta1": 0.1, "beta2": 0.1, "eps": 0.1, "weight_decay": 0.2}
        | {
            "warmup_steps": 1,
            "min_lr_ratio": 0.5,
            "clip_norm": 0,
            "decay_steps": 8,
            "muon": ("*",),
            "groups": (),
            "moments": "float32",
        },
        "codec": {"forward": "none", "backward": "none", "reduce": "rounded8"},
        "admission": {"owner": BOB, "trainers": (), "founders": ()},
        "start": {"weights": "folder", "digests": tuple(c * 64 for c in "124")},
        "eval": {"every": 5, "samples": 160, "sha256": "e" * 64, "tokens": 98_000},
    }
    for table, values in changes.items():
        for key, value in values.items():
            run = unpinned if table == "model" else pinned
            ids.append(replace(run, **{table: replace(getattr(run, table), **{key: value})}).id)
    assert len(set(ids)) == len(ids)


def test_spelling_comments_order_and_defaults_do_not_change_the_id() -> None:
    plain = parse_run(
        'seed=1\nname="example"\nsteps=1_000\ncheckpoint_every=100\n'
        '[optimizer]\nlr=1e-3\nwarmup_steps=20\nschedule="cosine"\n'
        '[batch]\nmicrobatches_per_step=16\nmicrobatch_size=8\n[data]\nsource="tales"\nsequence_length=256\n'
        '[model]\nstages=3\npreset="10M" # a comment\n'
    )
    assert plain == example_run()
    assert plain.id == example_run().id


def test_whole_numbers_and_negative_zero_are_one_spelling_of_a_float() -> None:
    spec = OptimizerSpec(lr=1, weight_decay=-0.0)
    assert OptimizerSpec(lr=1.0, weight_decay=0) == spec
    assert (repr(spec.lr), repr(spec.weight_decay)) == ("1.0", "0.0")


def test_admitted_trainers_are_a_set() -> None:
    assert AdmissionSpec(trainers=(BOB, ALICE)) == AdmissionSpec(trainers=(ALICE, BOB))


def test_a_manifest_is_accepted_for_its_own_id_only() -> None:
    run = example_run()
    assert check_id(run.to_toml(), run.id) == run
    assert check_id(EXAMPLE, run.id) == run
    with pytest.raises(SetupError, match=rf"is of run {run.id}, not of run {'0' * 32}"):
        check_id(run.to_toml(), "0" * 32)
    with pytest.raises(SetupError, match="not of run"):
        check_id(run.to_toml().replace("seed = 1", "seed = 2"), run.id)


# --- models and data of users -------------------------------------------------------------------------------


def test_a_model_that_is_brought_has_one_text_however_its_config_is_written() -> None:
    assert isinstance(BROUGHT.model, CustomModelSpec)
    assert BROUGHT.model.config == '{"model_type":"gpt2","n_layer":2}'
    text = BROUGHT.to_toml()
    assert """config = '{"model_type":"gpt2","n_layer":2}'""" in text
    assert parse_run(text) == BROUGHT and parse_run(text).to_toml() == text
    spelled = text.replace(
        '{"model_type":"gpt2","n_layer":2}', '{ "n_layer": 2,  "model_type": "\\u0067pt2"}'
    )
    assert spelled != text and parse_run(spelled).id == BROUGHT.id
    assert (BROUGHT.S, BROUGHT.model.vocab_size, BROUGHT.model.pinned) == (2, 256, True)


def test_weights_are_pinned_stage_by_stage() -> None:
    assert not replace(BROUGHT.model, digests=()).pinned  # type: ignore[call-arg]
    for values in ({"digests": ("b" * 64,)}, {"stages": 3}):
        with pytest.raises(SetupError, match=r"model\.digests = .*: it must be a list of [23], one for each"):
            replace(BROUGHT.model, **values)


def test_no_config_breaks_the_text_of_its_manifest() -> None:
    config = '{"a": "it\'s \\"é\\" \\n"}'
    quoted = replace(BROUGHT, model=replace(BROUGHT.model, config=config))
    assert quoted.to_toml().isascii() and parse_run(quoted.to_toml()) == quoted


def test_every_value_of_a_brought_model_is_in_the_hash() -> None:
    changes: dict[str, Any] = {"config": '{"model_type":"llama"}', "stages": 3, "vocab_size": 300}
    changes |= {"version": "transformers 5.1.1", "graph": "c" * 64, "cut": "0*7 1*8"}
    changes["digests"] = ("b" * 64, "d" * 64)
    brought = replace(BROUGHT, model=replace(BROUGHT.model, digests=()))  # which are of as many stages
    runs = [replace(brought, model=replace(brought.model, **{key: value})) for key, value in changes.items()]
    code = CustomModelSpec(kind="code", source="cats.models:build", stages=2)
    runs += [replace(BROUGHT, model=model) for model in (code, replace(code, source="cats:build"))]
    runs += [BROUGHT, replace(BROUGHT, data=replace(BROUGHT.data, code="pictures:of_dogs"))]
    assert len({run.id for run in runs}) == len(runs)


@pytest.mark.parametrize(
    ("steps", "first", "most", "text"),
    [
        (0, 3, 8, r"batch\.warmup_microbatches = 3 .* must be 0 when batch\.warmup_steps is 0"),
        (5, 0, 8, r"batch\.warmup_microbatches = 0 .* from 1 to 7, less than microbatches_per_step, when"),
        (5, 8, 8, r"batch\.warmup_microbatches = 8 .* from 1 to 7, less than microbatches_per_step, when"),
        (5, 1, 1, r"batch\.warmup_steps = 5 .* 0 when batch\.microbatches_per_step is 1"),
    ],
)
def test_a_batch_warm_up_grows_from_fewer_microbatches(steps: int, first: int, most: int, text: str) -> None:
    with pytest.raises(SetupError, match=text):
        BatchSpec(
            microbatch_size=1, microbatches_per_step=most, warmup_steps=steps, warmup_microbatches=first
        )
    spec = BatchSpec(microbatch_size=1, microbatches_per_step=4, warmup_steps=2, warmup_microbatches=1)
    with pytest.raises(SetupError, match=r"islands\.count = 2 .* 1 when batch\.warmup_steps is 2"):
        replace(audit_run(stages=2, steps=4), batch=spec, islands=IslandsSpec(count=2, local_steps=1))


def test_the_table_of_rotary_positions_is_of_a_bounded_size() -> None:
    """Each peer makes it before it can know whether its stage fits: 275 GB were asked for, of one key."""
    model = replace(demo_run().built_in, stages=1, layers=1, hidden=65_536, heads=256)
    long = replace(demo_run(), model=model, data=DataSpec(source="tales", sequence_length=1 << 20))
    assert long.data.sequence_length * 256 == MAX_ROTATIONS
    with pytest.raises(SetupError, match=r"^data\.sequence_length = .* must be at most 524288 with so"):
        replace(long, model=replace(model, heads=128))
    assert replace(long, model=replace(model, heads=1, positions="learned"))


def test_there_are_no_more_cells_than_a_record_can_name() -> None:
    """Who reads the records of a run asks for each: of two millions that took half a minute, and a GB."""
    run = replace(audit_run(stages=1024, steps=4), islands=IslandsSpec())
    most = replace(run.batch, microbatches_per_step=64)
    assert replace(run, batch=most, islands=IslandsSpec(count=64, local_steps=1)).cells == MAX_CELLS
    more = replace(run.batch, microbatches_per_step=2048)
    with pytest.raises(SetupError, match=r"^islands\.count = 2048 .* must be at most 64 with 1024 stages"):
        replace(run, batch=more, islands=IslandsSpec(count=2048, local_steps=1))


def test_samples_that_code_makes_need_no_length() -> None:
    text = BROUGHT.to_toml().replace("sequence_length = 1\n", "")
    assert text != BROUGHT.to_toml() and parse_run(text) == BROUGHT
    assert BROUGHT.tokens_per_step == 16 * 8


def test_the_ids_of_the_built_in_runs_are_what_they_were_when_they_were_written_down() -> None:
    assert example_run().id == "8777d231595bc0aa32db949539c9d1f5"
    assert demo_run().id == "e6db89beebd96f7fd4e03557dddf341f"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"model": {"config": ""}},
            r'model\.config = "" .* a JSON object as text.* when model\.kind is "hf"',
        ),
        ({"model": {"source": "a:b"}}, r'model\.source = "a:b" .* empty when model\.kind is "hf"'),
        (
            {"model": {"kind": "code", "source": "a:b", "config": ""}},
            r'model\.inputs = .* empty when model\.kind is "code": the function returns its inputs',
        ),
        (
            {"model": {"inputs": ["a int", "a float 3"]}},
            r"model\.inputs = .* a list of at most 16 of the form",
        ),
        ({"model": {"inputs": ["a int 3x0"]}}, r'model\.inputs = .* such as "pixel_values float 3x224x224"'),
        (
            {"model": {"kind": "code", "config": ""}},
            r'model\.source = "" .* package\.module:function when model\.kind is "code"',
        ),
        ({"model": {"config": '{"a": NaN}'}}, r"model\.config = .* without NaN"),
        ({"model": {"config": "[" * 9000}}, r"model\.config = .* a JSON object"),
        ({"model": {"cut": "0*7 0*5"}}, r'model\.cut = "0\*7 0\*5" .* runs of one stage'),
        ({"model": {"cut": "0*07"}}, r'model\.cut = "0\*07" .* runs of one stage'),
        ({"data": {"code": ""}}, r'data\.code = "" .* package\.module:function when data\.source is "code"'),
        ({"data": {"source": "tales"}}, r'data\.code = "pictures.* empty when data\.source is "tales"'),
        ({"data": {"tokenizer": "file"}}, r'data\.tokenizer = "file" .* or left out, when data\.source'),
        ({"model": example_run().model}, r'data\.source = "code" .* "files" when model\.kind is "gpt"'),
    ],
)
def test_what_does_not_go_with_a_brought_model_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        replace(
            BROUGHT,
            **{
                k: replace(getattr(BROUGHT, k), **v) if isinstance(v, dict) else v for k, v in changes.items()
            },
        )


def test_the_built_in_decoder_alone_has_its_sizes() -> None:
    assert FULL.built_in is FULL.model and not FULL.brings_model and BROUGHT.brings_model
    with pytest.raises(SetupError, match=r'^model\.kind = "hf": this works for the built-in decoder only'):
        _ = BROUGHT.built_in


def test_a_cut_is_written_as_runs_and_read_back_for_its_number_of_operators() -> None:
    assert write_cut([0, 0, 0, 1, 0, 1, 1]) == "0*3 1*1 0*1 1*2"
    assert read_cut("0*3 1*1 0*1 1*2", 7) == (0, 0, 0, 1, 0, 1, 1)
    assert read_cut("0*3 1*1 0*1 1*2", 8) is None
    assert read_cut("0*9999999 " * 1000, 7) is None  # without making so many


# --- what is refused ----------------------------------------------------------------------------------------

BAD: list[Any] = [
    "",
    "nonsense!",
    -1,
    0,
    2**63,
    10**5000,
    1.5,
    -0.5,
    math.nan,
    math.inf,
    True,
    [],
    [1],
    {"a": 1},
]


def _rules() -> list[Any]:
    specs = [("", Run)] + [(spec.section, spec) for spec in _specs()]
    brought = (CustomModelSpec, LoraSpec, "code")
    return [
        pytest.param(
            {"mixture": MIXED}.get(item.name, BROUGHT if spec in brought or item.name in brought else FULL),
            section,
            item.name,
            item.metadata["rule"],
            id=f"{spec.__name__}-{item.name}",
        )
        for section, spec in specs
        for item in fields(spec)
        if "rule" in item.metadata
    ]


def _specs() -> list[Any]:
    return [
        ModelSpec,
        DataSpec,
        BatchSpec,
        OptimizerSpec,
        CodecSpec,
        AdmissionSpec,
        StartSpec,
        LoraSpec,
        CustomModelSpec,
    ]


def _with(run: Run, section: str, name: str, literal: str) -> str:
    """The text of a run with one key set to a TOML literal."""
    text, here, out, inside = run.to_toml(), "", [], False
    for line in text.splitlines():
        if inside:  # the rest of a list over several lines
            inside = line != "]"
            continue
        if line.startswith("["):
            here = line.strip("[]")
        if here == section and line.startswith(f"{name} = "):
            inside = line.endswith("[")
            line = f"{name} = {literal}"
        out.append(line)
    return "\n".join(out)


def _literal(value: Any) -> str:
    if value == 10**5000 and type(value) is int:
        return hex(value)
    if type(value) is bool:
        return str(value).lower()
    if type(value) is str:
        return f'"{value}"'
    return "{a = 1}" if isinstance(value, dict) else repr(value)


@pytest.mark.parametrize(("run", "section", "name", "rule"), _rules())
def test_each_key_refuses_bad_types_and_values_naming_key_value_and_what_is_allowed(
    run: Run, section: str, name: str, rule: Any
) -> None:
    refused = 0
    for value in BAD:
        try:
            rule.check(value)
        except ValueError:
            refused += 1
            key = f"{section}.{name}" if section else name
            with pytest.raises(SetupError) as error:
                parse_run(_with(run, section, name, _literal(value)))
            text = error.value.text
            assert text.startswith(f"{key} = "), text
            assert f"it must be {rule.allowed}" in text
            shown = text.split(" in the run's manifest")[0].removeprefix(f"{key} = ")
            assert shown == ("<int>" if value == 10**5000 else _literal(value).replace("{a = 1}", "{'a': 1}"))
            assert len(text) < 300
    assert refused >= 5


def test_a_head_that_two_stages_have_needs_exact_sums() -> None:
    run = example_run()
    tied = replace(run, model=replace(run.built_in, head="tied"))
    said = r'^exact_sums = false .* must be true when model\.head is "tied": its copies on two stages must'
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(SetupError, match=said):
            replace(tied, exact_sums=False, dtype=dtype)  # type: ignore[arg-type]
    replace(tied, exact_sums=False, dtype="float64")
    replace(tied, exact_sums=False, model=replace(tied.built_in, stages=1))


def test_a_custom_model_has_no_root_of_tokens() -> None:
    with pytest.raises(SetupError, match=r'data\.root = .* empty when model\.kind is "hf"'):
        replace(BROUGHT, data=replace(BROUGHT.data, tokens=9, root="a" * 64))


@pytest.mark.parametrize("section", ("", *TABLES))
def test_an_unknown_key_is_refused_with_the_keys_that_exist(section: str) -> None:
    table = f"\n[{section}]\n" if section else "\n"
    text = (
        FULL.to_toml().replace(f"\n[{section}]\n", table + "nmae = 7\n")
        if section
        else "nmae = 7\n" + FULL.to_toml()
    )
    key = f"{section}.nmae" if section else "nmae"
    with pytest.raises(SetupError, match=rf"^{key} = 7 in the run's manifest: unknown key.* takes ") as error:
        parse_run(text)
    if section in ("", "optimizer"):
        assert "(did you mean name?)" in error.value.text


def test_a_key_of_another_kind_of_model_is_not_said_to_stand_where_it_does() -> None:
    """It said of model.layers that it stands in [model]."""
    text = FULL.to_toml().replace("\n[model]\n", '\n[model]\nkind = "hf"\n')
    with pytest.raises(SetupError, match=r"^model\.layers = .* unknown key; \[model\] takes kind, "):
        parse_run(text.replace('\nkind = "gpt"', ""))


@pytest.mark.parametrize("text", [EXAMPLE + "[optimiser]", EXAMPLE.replace("[optimizer]", "[optimiser]")])
def test_an_unknown_table_is_refused_with_the_tables_that_exist(text: str) -> None:
    with pytest.raises(
        SetupError,
        match=r"^\[optimiser\] in the run's manifest: unknown table \(did you mean \[optimizer\]\?\); its "
        r"tables are \[model\], \[data\], \[batch\], \[optimizer\]",
    ):
        parse_run(text)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('name = "example"', "name"),
        ("seed = 1", "seed"),
        ("steps = 1000", "steps"),
        ("stages = 3", "model.stages"),
        ('source = "tales"', "data.source"),
        ("sequence_length = 256", "data.sequence_length"),
        ("microbatch_size = 8", "batch.microbatch_size"),
        ("microbatches_per_step = 16", "batch.microbatches_per_step"),
        ("lr = 0.001", "optimizer.lr"),
    ],
)
def test_a_missing_key_is_named_with_what_it_must_be(line: str, key: str) -> None:
    assert line in EXAMPLE
    with pytest.raises(
        SetupError,
        match=rf"^{key} is missing in the run's manifest: it must be (an integer|a number|one of|1 to)",
    ):
        parse_run(EXAMPLE.replace(line, ""))


def test_missing_sizes_can_also_come_from_a_preset() -> None:
    text = (
        r"^model\.layers, model\.hidden, model\.heads, .* are missing .*; model\.heads must be .*, or give "
    )
    with pytest.raises(SetupError, match=text + r"model\.preset$"):
        parse_run(EXAMPLE.replace('preset = "10M"', ""))
    sizes = "hidden = 320\nheads = 5\nffn_hidden = 1280\nvocab_size = 256"
    with pytest.raises(SetupError, match=r"^model\.layers is missing .*, or give model\.preset$"):
        parse_run(EXAMPLE.replace('preset = "10M"', sizes))


def test_missing_keys_of_all_tables_are_named_at_once() -> None:
    text = re.sub(r"(seed|sequence_length|microbatch_size|lr) = .*", "", EXAMPLE)
    told = (
        r"^seed, data\.sequence_length, batch\.microbatch_size, optimizer\.lr are missing in the run's "
        r"manifest: seed must be an integer .*; data\.sequence_length must be .*; optimizer\.lr must be a num"
    )
    with pytest.raises(SetupError, match=told):
        parse_run(text)


def test_a_manifest_that_says_nothing_is_refused_in_few_words_with_where_an_example_is() -> None:
    with pytest.raises(
        SetupError, match=r"^name, seed, .* are missing .*: `swarm manifest` prints an ex"
    ) as e:
        parse_run("")
    assert len(e.value.text) < 330


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": {"heads": 7}}, r"model\.heads = 7 .* a divisor of model\.hidden \(320\)"),
        ({"model": {"kv_heads": 3}}, r"model\.kv_heads = 3 .* a divisor of model\.heads \(5\)"),
        ({"model": {"rotary_scaling": "linear 0.5"}}, r"rotary_scaling = .* factors of at least 1"),
        ({"model": {"rotary_scaling": "llama3 8 4 1 64"}}, r"rotary_scaling = .* LOW below HIGH"),
        ({"model": {"hidden": 15, "heads": 5}}, r"model\.heads = 5 .* \(15\) / heads is even, which rotary"),
        ({"model": {"stages": 9}}, r"model\.stages = 9 .* at most model\.layers \(8\)"),
        ({"model": {"bottleneck": 320}}, r"model\.bottleneck = 320 .* less than hidden \(320\)"),
        ({"model": {"bottleneck": 8, "stages": 1}}, r"model\.bottleneck = 8 .* 0 when model\.stages is 1"),
        ({"model": {"vocab_size": 255}}, r"model\.vocab_size = 255 .* at least 256"),
        ({"data": {"sha256": "a" * 64}}, r"data\.tokens = 0 .* when data\.sha256 is set"),
        ({"data": {"eos": 10}}, r"data\.eos = 10 .* left out when data\.document_mask is false"),
        (
            {"data": {"document_mask": True, "eos": 256}},
            r"data\.eos = 256 .* less than model\.vocab_size \(256\)",
        ),
        (
            {"data": {"document_mask": True}, "model": {"kind": "counting"}},
            r'document_mask = true .* false when model\.kind is "counting": only the built-in decoder has',
        ),
        ({"data": {"root": "a" * 64}}, r"data\.tokens = 0 .* when data\.root is set"),
        ({"data": {"tokens": 256}}, r"data\.tokens = 256 .* more than data\.sequence_length \(256\)"),
        (
            {"data": {"tokenizer_sha256": "a" * 64}},
            r'data\.tokenizer_sha256 = "aaa.* empty when data\.tokenizer is "bytes"',
        ),
        (
            {"optimizer": {"momentum": 0.5}},
            r'optimizer\.momentum = 0\.5 .* 0 when optimizer\.name is "adamw"',
        ),
        (
            {"optimizer": {"warmup_steps": 1000}},
            r"optimizer\.warmup_steps = 1000 .* less than steps \(1000\)",
        ),
        (
            {"optimizer": {"moments": "bfloat16"}, "dtype": "float64"},
            r'optimizer\.moments = "bfloat16" .* left out, when dtype is "float64"',
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        _changed(changes)


def _changed(changes: dict[str, Any]) -> Run:
    run = example_run()
    whole = {key: value for key, value in changes.items() if not isinstance(value, dict)}
    tables = {k: replace(getattr(run, k), **v) for k, v in changes.items() if isinstance(v, dict)}
    return replace(run, **whole, **tables)


def test_a_table_given_as_a_value_is_refused() -> None:
    with pytest.raises(SetupError, match=r'^model = "10M" .* a table: \[model\] on a line of its own'):
        parse_run('model = "10M"')


@pytest.mark.parametrize("ids", [["alice"], [ALICE, ALICE], [ALICE + "A"], ["12D3KooW" + "0" * 44], [1]])
def test_trainers_must_be_different_peer_ids(ids: list[Any]) -> None:
    with pytest.raises(SetupError, match=r"^admission\.trainers = .* at most 200 different peer ids"):
        AdmissionSpec(trainers=ids)  # type: ignore


@pytest.mark.parametrize("name", ["", " x", "a\nb", 'a"b', "a\\b", "é", "x" * 64])
def test_a_name_needs_no_escapes(name: str) -> None:
    with pytest.raises(SetupError, match=r"^name = .* it must be 1 to 63 characters: A to Z, a to z"):
        replace(example_run(), name=name)


def test_text_that_is_not_toml_is_refused_with_the_place() -> None:
    with pytest.raises(SetupError, match=r"^the run's manifest is not TOML: .*line 1"):
        parse_run("name =\nseed = 1")


@pytest.mark.parametrize("text", ["a = " + "[" * 10_000, "a = " + "9" * 10_000, "a" * 10 + "\ud800", "\x00"])
def test_text_made_to_break_the_parser_is_refused(text: str) -> None:
    with pytest.raises(SetupError):
        parse_run(text)


@pytest.mark.parametrize("letter", ["#", "é", "\ud800"])
def test_a_text_that_is_too_long_is_not_even_parsed(letter: str) -> None:
    with pytest.raises(SetupError, match="longer than 16000 bytes"):
        parse_run("#" + letter * MAX_MANIFEST_BYTES)


@given(st.text(max_size=300))
def test_no_text_does_worse_than_a_setup_error(text: str) -> None:
    with pytest.raises(SetupError):
        parse_run(text)


# --- files --------------------------------------------------------------------------------------------------


def test_a_manifest_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(EXAMPLE)
    assert load_run(tmp_path / "run.toml") == example_run()
    (tmp_path / "run.toml").write_text(EXAMPLE, encoding="utf-8-sig")
    assert load_run(tmp_path / "run.toml") == example_run(), "an editor of Windows begins files with a mark"


def test_islands_of_the_example_need_no_other_change() -> None:
    head, _, tail = EXAMPLE.partition("# [islands]")
    told, _, rest = f"# [islands]{tail}".partition("\n\n")
    run = parse_run(head + re.sub("(?m)^# ", "", told) + "\n\n" + rest)
    assert (run.islands.count, run.islands.local_steps, run.steps) == (2, 49, example_run().steps)


def test_errors_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(SetupError, match=r"cannot read the manifest .*run\.toml: No such file"):
        load_run(path)
    with pytest.raises(SetupError, match=r"cannot read the manifest .*: Is a directory"):
        load_run(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SetupError, match=r"run\.toml is not UTF-8"):
        load_run(path)
    path.write_text("#" * 20_000)
    with pytest.raises(SetupError, match=r"run\.toml: the run's manifest is longer than"):
        load_run(path)
    path.write_text(EXAMPLE.replace("seed = 1", "seed = -1"))
    with pytest.raises(SetupError, match=r"run\.toml: seed = -1 "):
        load_run(path)


# --- presets and sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_a_run_and_leaves_numbers_only(preset: str) -> None:
    run = parse_run(EXAMPLE.replace('"10M"', f'"{preset}"'))
    assert "preset" not in run.to_toml()
    assert parse_run(run.to_toml()) == run


def test_a_table_whose_preset_is_none_of_them_is_refused_also_where_python_gives_it() -> None:
    table = {"kind": "gpt", "preset": None, "stages": 1}
    with pytest.raises(SetupError, match=r"model\.preset = None .* one of \"1M\""):
        run_of({"name": "a", "seed": 1, "steps": 1, "model": table})


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("1M", 1),
        ("3M", 3),
        ("10M", 10),
        ("30M", 30),
        ("100M", 100),
        ("1B", 1000),
        ("3B", 3000),
        ("7B", 7000),
        ("llama-10M", 10),
        ("llama-100M", 107),
        ("llama-7b", 6738),
        ("llama3.2-1b", 1236),
        ("llama3-8b", 8030),
    ],
)
def test_a_preset_has_about_as_many_weights_as_it_says(preset: str, millions: int) -> None:
    model = ModelSpec(stages=1, **PRESETS[preset])
    assert parameter_count(model) / 1e6 == pytest.approx(millions, rel=0.07)


def test_gpt2_has_the_weights_of_gpt2_and_its_own_head() -> None:
    model = ModelSpec(stages=1, **PRESETS["gpt2"])
    # 124 439 808 as published, less 102 144 biases of matrices and with a head of its own.
    biases = 12 * (3 * 768 + 768 + 3072 + 768)
    assert parameter_count(model, sequence_length=1024) == 124_439_808 - biases + 50_257 * 768


def test_a_key_beside_the_preset_wins() -> None:
    run = parse_run(EXAMPLE.replace('preset = "10M"', 'preset = "10M"\nvocab_size = 50000\ndropout = 0.1'))
    assert (run.model.vocab_size, run.built_in.dropout, run.built_in.layers) == (50_000, 0.1, 8)


@pytest.mark.parametrize("preset", ['"11M"', "10", "[]"])
def test_an_unknown_preset_is_refused_with_the_list(preset: str) -> None:
    with pytest.raises(SetupError, match=r'^model\.preset = .* one of "1M", .*"gpt2-xl".*"7B"'):
        parse_run(EXAMPLE.replace('"10M"', preset))


# --- learning rate and the rest -----------------------------------------------------------------------------


def test_the_learning_rate_warms_up_linearly_and_falls_to_its_floor_on_the_last_step() -> None:
    spec = OptimizerSpec(lr=0.4, warmup_steps=4, schedule="cosine", min_lr_ratio=0.1)
    rates = [spec.lr_at(t, 25) for t in range(25)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates[14] == pytest.approx(0.22)  # half-way: the mean of 0.4 and 0.04
    assert rates[24] == pytest.approx(0.04)
    assert spec.lr_at(100, 25) == pytest.approx(0.04)
    assert all(a >= b for a, b in pairwise(rates[4:]))


def test_the_rate_rises_again_after_each_meeting_of_islands() -> None:
    terms = replace(audit_run(stages=2, steps=12), optimizer=OptimizerSpec(lr=0.5, schedule="constant"))
    met = replace(terms, islands=IslandsSpec(count=2, local_steps=5, warmup_steps=3))
    rates = [met.lr_at(t) for t in range(12) if not met.meets_at(t)]
    assert rates == [0.125, 0.25, 0.375, 0.5, 0.5] * 2
    assert [terms.lr_at(t) for t in range(3)] == [0.5] * 3


def test_a_constant_rate_stays_and_a_run_of_one_step_has_a_rate() -> None:
    constant = OptimizerSpec(lr=0.4, warmup_steps=2)
    assert [constant.lr_at(t, 5) for t in range(5)] == [0.2, 0.4, 0.4, 0.4, 0.4]
    assert OptimizerSpec(lr=0.4, schedule="cosine").lr_at(0, 1) == 0.4


def test_the_other_schedules() -> None:
    terms = {"lr": 0.4, "warmup_steps": 4, "min_lr_ratio": 0.1}
    linear, wsd, root = (
        [OptimizerSpec(**terms, schedule=name, **more).lr_at(t, 25) for t in range(25)]
        for name, more in (("linear", {}), ("wsd", {"decay_steps": 10}), ("inverse_sqrt", {}))
    )
    assert linear[:4] == wsd[:4] == root[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    steps = {round(a - b, 12) for a, b in itertools.pairwise(linear[4:])}
    assert len(steps) == 1 and linear[-1] == pytest.approx(0.04)
    assert wsd[4:15] == [0.4] * 11 and wsd[15] < 0.4 and wsd[-1] == pytest.approx(0.04)
    assert len({round(a - b, 12) for a, b in itertools.pairwise(wsd[14:])}) == 1
    assert root[15] == pytest.approx(0.2) and root[24] == pytest.approx(0.4 * (4 / 25) ** 0.5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "wsd"}, "at least 1 when optimizer.schedule"),
        ({"decay_steps": 3}, "0 when optimizer.schedule"),
        ({"eps": 1e-46}, "optimizer.eps = 1e-46 .* a number at least 1e-37 and at most 1"),
        ({"name": "muon"}, "names of weights when optimizer.name"),
        ({"muon": ("a",)}, "empty when optimizer.name"),
        ({"groups": ("a.*",)}, "a list of at most 64 of the form"),
        ({"groups": ("a.* lr=-1",)}, "a list of at most 64 of the form"),
        ({"groups": ("a.* lr=nan",)}, "a list of at most 64 of the form"),
        ({"groups": ("a.* speed=1",)}, "a list of at most 64 of the form"),
        ({"groups": ("a.* lr=1 lr=2",)}, "a list of at most 64 of the form"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        OptimizerSpec(lr=1.0, **fields)


def test_groups_have_one_form() -> None:
    said = OptimizerSpec(lr=1.0, groups=("a.* weight_decay=0 lr=1e-1", "b lr=2"))
    assert said.groups == ("a.* lr=0.1 weight_decay=0.0", "b lr=2.0")
    with pytest.raises(SetupError, match=r"at most steps - warmup_steps"):
        replace(FULL, optimizer=OptimizerSpec(lr=1.0, schedule="wsd", decay_steps=1001))


@given(run=runs(), at=st.floats(0, 1))
def test_a_rate_is_never_above_lr_and_never_negative(run: Run, at: float) -> None:
    rate = run.optimizer.lr_at(int(at * (run.steps - 1)), run.steps)
    assert 0 <= rate <= run.optimizer.lr * (1 + 1e-11)


def test_a_step_uses_its_own_version_or_the_one_before_when_updates_are_delayed() -> None:
    run = example_run()
    assert [run.weight_version(t) for t in range(4)] == [0, 1, 2, 3]
    delayed = replace(run, delayed_updates=True)
    assert [delayed.weight_version(t) for t in range(4)] == [0, 0, 1, 2]


def test_a_run_adds_exactly_unless_it_is_told_not_to_or_cannot() -> None:
    run = example_run()
    assert run.exact_sums and run.adds_exactly
    assert replace(run, dtype="bfloat16").adds_exactly
    assert replace(run, codec=CodecSpec(forward="bf16", backward="blockwise8")).adds_exactly
    for floats in (
        replace(run, exact_sums=False),
        replace(run, dtype="float64"),
    ):
        assert not floats.adds_exactly


def test_each_boundary_may_have_a_codec_of_its_own() -> None:
    codec = CodecSpec(forward=("none", "topk:0.05+blockwise8"), backward="bf16")
    run = replace(example_run(), codec=codec)
    assert [run.codec.forward_at(boundary) for boundary in (0, 1)] == ["none", "topk:0.05+blockwise8"]
    assert run.codec.backward_at(0, "none") == "bf16"
    assert run.codec.backward_at(1, "topk:0.05+blockwise8") == "topk:0.05+bf16", "of what was sent"
    assert 'forward = [\n  "none",\n  "topk:0.05+blockwise8",\n]\nbackward = "bf16"' in run.to_toml()
    assert parse_run(run.to_toml()) == run


def test_a_codec_for_both_ways_returns_the_values_that_were_sent() -> None:
    assert CodecSpec.symmetric("bf16") == CodecSpec(forward="bf16", backward="bf16")
    assert CodecSpec.symmetric("topk:0.05+bf16") == CodecSpec(forward="topk:0.05+bf16", backward="bf16")
    assert CodecSpec.symmetric("topk:0.05").backward == "none"
    with pytest.raises(SetupError, match=r'codec\.forward = "zip" in the run.s manifest: it must be'):
        CodecSpec.symmetric("zip")


def test_a_list_of_equal_codecs_is_the_run_with_one() -> None:
    alike = replace(example_run(), codec=CodecSpec(forward=("bf16", "bf16")))
    assert alike == replace(example_run(), codec=CodecSpec(forward="bf16"))
    assert alike.id == replace(example_run(), codec=CodecSpec(forward="bf16")).id


def test_sums_take_no_codec_by_which_they_would_depend_on_who_computed_what() -> None:
    allowed = (
        r'^codec.reduce = "\S+" in the run\'s manifest: it must be one of "none", "rounded16", "rounded8"$'
    )
    for codec in ("bf16", "blockwise8", "hadamard4", "topk:0.05"):
        with pytest.raises(SetupError, match=allowed):
            CodecSpec(reduce=codec)


@pytest.mark.parametrize("codecs", [(), ("none",), ("none", "bf16", "none")])
def test_a_list_that_does_not_fit_the_boundaries_is_refused(codecs: tuple[str, ...]) -> None:
    text = r"codec\.backward = .*: it must be one codec, or a list of 2, one for each boundary of 3 stages"
    with pytest.raises(SetupError, match=text):
        replace(example_run(), codec=CodecSpec(backward=codecs))
    with pytest.raises(SetupError, match=r"codec\.forward = \[\] in the run's manifest: .* one codec$"):
        replace(example_run(), codec=CodecSpec(forward=()), model=replace(example_run().model, stages=1))


@pytest.mark.parametrize(
    "codecs",
    [
        {"forward": "topk:0.05+bf16"},
        {"forward": ("none", "topk:0.05+bf16")},
    ],
)
def test_the_gradient_of_a_top_k_has_its_places_and_none_of_its_own(codecs: dict[str, Any]) -> None:
    text = (
        r'^codec.backward = "topk:0.1" in the run\'s manifest: it must be one of none, bf16, blockwise8, '
        r"hadamard4: topk:0.05\+bf16 keeps a part of what is sent, and its gradient has the same places$"
    )
    with pytest.raises(SetupError, match=text):
        CodecSpec(backward="topk:0.1", **codecs)
    CodecSpec(backward=("topk:0.1", "none"), forward=("none", "topk:0.05"))
    with pytest.raises(SetupError, match="has the same places"):
        CodecSpec(backward=("none", "topk:0.1"), forward=("none", "topk:0.05"))


def test_a_manifest_too_long_to_be_published_is_refused() -> None:
    model = replace(example_run().model, layers=1024, stages=1024)
    codecs = tuple(f"topk:0.{number + 1:04d}1" for number in range(1023))
    with pytest.raises(SetupError, match=r"manifest takes \d+ bytes; at most 16000 are allowed: give codec"):
        replace(example_run(), model=model, codec=CodecSpec(forward=codecs))


def test_a_manifest_that_is_older_than_a_key_keeps_its_id() -> None:
    assert "moments" not in example_run().to_toml()
    assert "moments" in FULL.to_toml()


def test_a_step_has_no_more_microbatches_than_ledgers_that_fit_a_message() -> None:
    most = replace(FULL, batch=replace(FULL.batch, microbatches_per_step=8192))
    assert most.M == 8192
    with pytest.raises(SetupError, match=r"batch\.microbatches_per_step = 8193 .* integer from 1 to 8192"):
        replace(FULL, batch=replace(FULL.batch, microbatches_per_step=8193))


def test_short_names_of_a_run() -> None:
    run = example_run()
    assert (run.M, run.S, run.tokens_per_step) == (16, 3, 16 * 8 * 256)


def test_pinning_binds_a_run_to_its_tokens() -> None:
    run = pin(example_run(), "ab" * 32, 12_345)
    assert (run.data.sha256, run.data.tokens) == ("ab" * 32, 12_345)
    assert run.id != example_run().id
    assert parse_run(run.to_toml()) == run
    with pytest.raises(SetupError, match=r"data\.tokens = 3 .* more than data\.sequence_length"):
        pin(example_run(), "ab" * 32, 3)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_the_demo_and_the_audit_can_be_cut_into_any_number_of_stages(stages: int) -> None:
    demo, audit = demo_run(stages=stages, steps=3, codec="none", seed=9), audit_run(stages=stages)
    assert (demo.S, demo.steps, demo.seed, demo.codec.forward, demo.codec.backward) == (
        stages,
        3,
        9,
        "none",
        "none",
    )
    assert demo_run(steps=1).optimizer.warmup_steps == 0
    assert stages == audit.S
    assert parse_run(demo.to_toml()) == demo
    assert parse_run(audit.to_toml()) == audit


def test_two_lists_of_codecs_that_do_not_fit_each_other_are_refused_at_once() -> None:
    with pytest.raises(SetupError, match=r"codec.backward = .*one codec, or as many as codec.forward has"):
        CodecSpec(forward=("none",) * 3 + ("bf16",), backward=("none", "bf16", "none"))


def test_a_key_that_a_terminal_would_obey_is_not_printed_as_it_is() -> None:
    with pytest.raises(SetupError, match=r"\?\[2Jx = 7 in the run's manifest: unknown key") as error:
        parse_run('[model]\n"\\u001b[2Jx" = 7\n')
    assert error.value.text.isprintable()
