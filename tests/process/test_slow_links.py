"""What the benchmarks of compression make of lines, codecs, measurements; and one real swarm on two lines."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from peers.events import StepDone
from scripts.bench.common.harness import Clocks, Segment, role_names
from scripts.bench.common.model_sizes import parameter_count
from scripts.bench.common.netlab import Link, why_not
from scripts.bench.loss import codecs_loss, narrow
from scripts.bench.loss.codecs_loss import codec_spec
from scripts.bench.speed import islands, protocol_nanogpt, slow_links
from scripts.bench.speed.slow_links import Found, Lines, Sizes
from swarm.manifest import CodecSpec
from swarm.model.layout import stage_layout
from swarm.model.meeting import difference_bytes
from swarm.wire.messages import LedgerCounts, LinkStatus, PeerStatus
from tests.process.forkserver import ForkServer
from tests.seeds import some

SIZES = Sizes(stages=3, replicas=1, job_s=0.04, windows=(4, 8))
MIXED = Lines(None, 0.05)


class Notes:
    """A lab that only writes down."""

    def __init__(self, hosts: list[str]) -> None:
        self.hosts = tuple(hosts)
        self.bandwidths: dict[str, float] = {}
        self.links: dict[tuple[str, str], Link] = {}

    def set_bandwidth(self, host: str, bandwidth_bps: float) -> None:
        self.bandwidths[host] = bandwidth_bps

    def set_link(self, a: str, b: str, link: Link) -> None:
        self.links[a, b] = link


@pytest.mark.parametrize("mbit", some([50.0, 100.0, 200.0], quick=[100.0]))
def test_the_chosen_codecs_are_nearly_as_fast_as_the_best_where_round_trips_are_long(mbit: float) -> None:
    """Simulated, at 50 ms: nothing hides the first and last transfers of a step."""
    base, lines = slow_links.base_run(slow_links.parse([])), Lines(mbit, 0.05)
    chosen = slow_links.adapted(base, lines, SIZES, 0.05)
    topk = slow_links.simulated(replace(base, codec=codec_spec("topk:0.05+blockwise8")), lines, SIZES)
    assert slow_links.simulated(replace(base, codec=chosen), lines, SIZES) >= 0.95 * topk


def test_lines_are_those_of_hosts_and_in_the_mixed_case_one_boundary_is_slow() -> None:
    lab: Any = Notes(role_names(3, 2))
    slow_links.shape(lab, Lines(50.0, 0.1))
    assert set(lab.bandwidths.values()) == {50e6} and len(lab.bandwidths) == 8
    assert set(lab.links.values()) == {Link(delay_s=0.05)} and len(lab.links) == 28
    slow_links.shape(lab, MIXED)
    slow = {pair for pair, link in lab.links.items() if link.bandwidth_bps == 8e6}
    assert slow == {(f"stage 0.{i}", f"stage 1.{j}") for i in range(2) for j in range(2)}
    assert set(lab.bandwidths.values()) == {1e9}
    slow_links.shape(lab, None)
    assert set(lab.bandwidths.values()) == {0.0} and set(lab.links.values()) == {Link()}


def test_adatopk_compresses_where_devices_would_wait_and_equal_manifests_are_measured_once() -> None:
    options = slow_links.parse([])
    base = slow_links.base_run(options)
    lines = [Lines(8.0, 0.0), Lines(200.0, 0.1), Lines(500.0, 0.0), MIXED]
    runs = slow_links.manifests(base, lines, ["none", "blockwise8", "adatopk"], SIZES, 0.05)
    planned = [slow_links.words(run.codec, 2) for run in runs["adatopk"].values()]
    assert planned == ["topk:0.0667+blockwise8", "blockwise8", "bf16", "topk:0.0689+blockwise8, none"]
    assert runs["adatopk"][lines[1]] == runs["blockwise8"][lines[1]]
    for each, run in runs["adatopk"].items():
        assert slow_links.least_step_s(run, each, SIZES) == pytest.approx(base.M * 0.08), "all hide now"
    nbytes = 4 * 256 * 128 * 4
    assert slow_links.least_step_s(base, lines[0], SIZES) == pytest.approx(base.M * 16 * nbytes / 8e6)
    assert slow_links.least_step_s(base, MIXED, SIZES) == pytest.approx(base.M * 8 * nbytes / 8e6)
    assert slow_links.payload_bytes(base) == 2 * (2 * nbytes + 4 * 257), "and the tokens"


def status(name: str, busy_s: float, links: dict[str, int]) -> PeerStatus:
    return PeerStatus(
        peer=name, stage=int(name[-1]), version=0, state="serving", device="cpu", done=0, inflight=0,
        max_inflight=8, speed=1.0, computed=0, coordinator=name, audit=LedgerCounts(), since=0.0,
        busy_s=busy_s,
        links=tuple(LinkStatus(peer=peer, bytes_in=half, bytes_out=half) for peer, half in links.items()),
    )  # fmt: skip


def test_a_measurement_leaves_out_the_first_step_and_counts_each_boundary_once() -> None:
    base = replace(slow_links.base_run(slow_links.parse([])), steps=9)
    sent = round(
        3 * base.M * slow_links.payload_bytes(base)
    )  # of three steps, over all boundaries, as it must be
    before = {f"stage {s}": status(f"p{s}", 1.0, {}) for s in range(3)}
    after = {
        "stage 0": status("p0", 4.0, {"p1": sent // 4, "trainer": 999}),
        "stage 1": status("p1", 7.0, {"p2": sent // 4, "p0": sent // 4}),
        "stage 2": status("p2", 2.0, {"p1": sent // 4}),
    }
    events = [
        StepDone(at=at, t=t, steps=9, loss=None, tokens_per_s=0.0) for t, at in enumerate((7.0, 10.0, 15.0))
    ]
    clocks = Clocks(0.0, {}, {}, 0.0)
    found = slow_links.found_in(Segment(3, 30.0, clocks, before, after, events), base, 8)
    assert found.tokens_per_s == pytest.approx(base.tokens_per_step / 4.0), "two steps in 8 s"
    assert found.busy == pytest.approx(2.0 / 4.0), "the busiest worked 6 s in three steps"
    assert found.wire == pytest.approx(1.0, rel=1e-6)


def test_ratios_are_of_one_round_and_of_the_same_lines() -> None:
    lines = [Lines(8.0, 0.0), MIXED]
    runs = slow_links.manifests(
        slow_links.base_run(slow_links.parse([])), lines, ["none", "adatopk"], SIZES, 0.05
    )

    def speeds(*tokens_per_s: float) -> list[Found]:
        return [Found(each, 0.5, 1.0, 8) for each in tokens_per_s]

    measured = {
        ("none", lines[0]): speeds(10.0, 20.0, 40.0),
        ("adatopk", lines[0]): speeds(30.0, 100.0, 80.0),
        ("none", lines[1]): speeds(10.0, 10.0, 10.0),
        ("adatopk", lines[1]): speeds(10.0, 10.0, 70.0),
    }
    rows = slow_links.rows_of(measured, runs)
    assert [row["to_none"] for row in rows] == [1.0, 3.0, 1.0, 1.0]
    assert [row["to_bf16"] for row in rows] == [None] * 4
    assert [row["tokens_per_s"] for row in rows] == [20.0, 80.0, 10.0, 10.0]
    assert list(slow_links.markdown(rows)) == [
        "| Mbit/s | round trip, ms | none | adatopk | adatopk ÷ none | ÷ bf16 |",
        "|---|---|---|---|---|---|",
        "| 8 | 0 | 20 (50 %) | 80 (50 %) topk:0.0667+blockwise8 | 3.00 |  |",
        "| mixed | 50 | 10 (50 %) | 10 (50 %) topk:0.0689+blockwise8, none | 1.00 |  |",
    ]


def test_codecs_are_compared_seed_by_seed() -> None:
    losses = {"none": {1: 2.0, 2: 3.0}, "bf16": {1: 2.1, 2: 2.9}, "topk:0.1": {1: 2.5, 2: 3.1}}
    rows = codecs_loss.rows_of(losses, {"none": 1.0, "bf16": 2.0, "topk:0.1": 8.3})
    assert [(row["above_none"], row["from"], row["to"]) for row in rows] == [
        (0.0, 0.0, 0.0), (0.0, -0.1, 0.1), (0.3, 0.1, 0.5),
    ]  # fmt: skip
    (alone,) = codecs_loss.rows_of({"bf16": {1: 2.1}}, {"bf16": 2.0})
    assert alone["loss"] == 2.1 and alone["above_none"] is None


def test_ways_over_narrow_boundaries_have_equally_many_weights() -> None:
    sizes = {"seed": 1, "steps": 20, "rows": 2, "tokens": 10_000}
    plain = narrow.way_run("none", **sizes)
    for way in narrow.WAYS:
        run = narrow.way_run(way, **sizes)
        assert parameter_count(run.built_in) == pytest.approx(parameter_count(plain.built_in), rel=1e-3), way
    run = narrow.way_run("d/8+hadamard4", **sizes)
    assert (run.built_in.bottleneck, run.codec.forward_at(0)) == (32, "hadamard4")
    wide, small = (protocol_nanogpt.yardstick("blockwise8", k, 64).built_in for k in (0, 64))
    assert 203_828_352 >= parameter_count(wide) == pytest.approx(parameter_count(small), rel=1e-3)


def test_the_table_of_narrow_boundaries_is_of_the_runs_that_are_finished() -> None:
    done = [
        {"way": way, "seed": seed, "loss": loss, "times_smaller": 1.0, "weights": 7}
        for way, seed, loss in [("none", 1, 2.0), ("none", 2, 2.5), ("d/8+blockwise8", 2, 2.625)]
    ]
    none, eighth = narrow.table(done)
    assert (none["loss"], none["seeds"], none["above_none"]) == (2.25, 2, 0.0)
    assert (eighth["loss"], eighth["seeds"], eighth["above_none"], eighth["weights"]) == (2.625, 1, 0.125, 7)


def change_bytes(options: Any, case: str) -> float:
    """What an island has changed, as it travels: bytes for each weight, of both stages on average."""
    run = islands.run_of(case, options)
    layouts = [stage_layout(run, stage) for stage in range(run.S)]
    return sum(difference_bytes(run, one) / one.numel for one in layouts) / len(layouts)


@pytest.mark.slow
def test_each_island_sends_its_change_once_to_each_other_and_the_slow_line_is_free_meanwhile() -> None:
    sizes = "--virtual --lines 20 --ffn 1024 --microbatches 4 --job 0.1 --steps 1"
    options = islands.parse(["--case", "1", "4/12/blockwise8", *sizes.split()])
    one, four = islands.bench(options)
    sent = 3 * change_bytes(options, "4/12/blockwise8") / 13
    assert four["bytes_weight_step"] == pytest.approx(sent, rel=0.02)
    assert one["bytes_weight_step"] > 5 and one["to_1"] == 1.0 and four["to_1"] > 2
    assert one["trains"] is None and 0.5 < four["busy"] < four["trains"] < 1.0


def test_a_codec_may_be_one_for_each_boundary() -> None:
    assert codec_spec("topk:0.05+blockwise8") == CodecSpec.symmetric("topk:0.05+blockwise8")
    assert codec_spec("topk:0.05+bf16,none") == CodecSpec(
        forward=("topk:0.05+bf16", "none"), backward=("bf16", "none")
    )


def test_a_short_training_has_the_loss_of_its_last_steps() -> None:
    """The first loss is that of a model that knows nothing: log 256, about."""
    run = codecs_loss.codec_run("topk:0.05+blockwise8,none", seed=1, steps=2, microbatches=1)
    small = replace(run, model=replace(run.model, hidden=32, heads=2, ffn_hidden=32))
    assert 5.3 < codecs_loss.final_loss(small, last=2) < 5.8
    assert codecs_loss.crossing(small) < codecs_loss.crossing(replace(small, codec=codec_spec("none"))) / 1.9


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (slow_links, ["--codec", "zip"], "'zip' names no codec: it must be one of none, bf16"),
        (slow_links, ["--codec", "none,none,none"], "a list of 2, one for each boundary of 3 stages"),
        (slow_links, ["--keep", "0"], "a part of 0.0 cannot be kept: it must be above 0 and below 1"),
        (slow_links, ["--stages", "1"], "there must be two stages, a replica of each"),
        (slow_links, ["--window", "4", "0"], "a round and a window of 1 at least"),
        (slow_links, ["--lines", "0"], "argument --lines: invalid"),
        (slow_links, ["--job", "nan"], "argument --job: invalid"),
        (islands, ["--case", "3/8"], "3/8: 3 islands must divide --peers and --microbatches"),
        (codecs_loss, ["--codec", "topk:2"], "'topk:2' names no codec"),
        (codecs_loss, ["--last", "0"], "--last 0: it must be from 1 to --steps (60)"),
    ],
)
def test_what_cannot_be_measured_is_said(
    module: Any, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        module.parse(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.skipif(bool(why_not()), reason=f"a network lab {why_not()}")
def test_what_crosses_the_lines_is_what_the_formula_says_with_a_codec_for_each_boundary(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How fast that is depends on what else the machine does; the bytes do not."""
    where = "--lines mixed --rtt 20 --codec adatopk"
    sizes = "--rounds 1 --steps 1 --microbatches 2 --window 2"
    monkeypatch.setattr(sys, "argv", ["slow_links.py", *where.split(), *sizes.split()])
    with fork_server.fork_children():
        assert slow_links.main() == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (row["codec"], row["planned"]) == ("adatopk", "topk:0.05+blockwise8, none")
    assert row["tokens_per_s"] > 0 and 0.0 < row["busy"] <= 1.0
    assert 1.0 < row["wire"] < 1.1, "headers and heartbeats are in it"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.skipif(bool(why_not()), reason=f"a network lab {why_not()}")
def test_islands_of_processes_send_what_those_in_virtual_time_do(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--case 2/3/blockwise8 --lines 50 --ffn 1024 --microbatches 4 --peers 2"
    sizes = words.split()
    monkeypatch.setattr(sys, "argv", ["islands.py", *sizes])
    with fork_server.fork_children():
        assert islands.main() == 0
    (real,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    (virtual,) = islands.bench(islands.parse([*sizes, "--virtual"]))
    assert real["bytes_weight_step"] == pytest.approx(virtual["bytes_weight_step"], rel=0.05)
    assert real["tokens_per_s"] > 0 and 0.0 < real["busy"] <= 1.0 and 0.0 < real["trains"] < 1.0
