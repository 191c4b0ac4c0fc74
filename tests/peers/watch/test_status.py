"""`swarm status`: asks every peer at once, and draws what is and what is wrong."""

from __future__ import annotations

import asyncio
import io
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from peers.net.identity import Identity
from peers.ports import Answer, NetworkPath, Request
from peers.programs.status import join_line, picture, run_status, table, to_json
from peers.programs.tool_options import StatusOptions
from peers.status_query import LOOKED_S, TrafficStatus
from peers.watch.metrics import served
from peers.watch.monitor import Monitor, WatchPace
from swarm.errors import Refused, SetupError
from swarm.ids import Generation
from swarm.manifest import demo_run
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation, SwarmHealth
from swarm.monitoring.validation import checked
from swarm.records import NO_STAGE, PeerRecord, State
from swarm.wire.messages import AskStatus, LedgerCounts, LinkStatus, PastStep, PeerStatus, pack, unpack
from tests.peers.alone import Line, Records
from tests.peers.network import CalmNetwork

RUN = demo_run(stages=2, steps=40)

pytestmark = pytest.mark.usefixtures("greenwich")


def record(peer: str, stage: int, *, state: State = "serving", version: int = 3) -> PeerRecord:
    return PeerRecord(
        peer=peer,
        run=RUN.id,
        stage=stage,
        state=state,
        version=version,
        speed=1.5,
        since=1000.0,
        device="cpu",
    )


def status(peer: str, stage: int, *, version: int = 4, audit: LedgerCounts | None = None) -> PeerStatus:
    return PeerStatus(
        trainers=("trainer",),
        peer=peer, stage=stage, version=version, state="serving", device="cpu", done=5, inflight=2,
        max_inflight=4, speed=2.25, computed=70, coordinator=peer, audit=audit or LedgerCounts(),
        since=1000.0,
        past=(PastStep(version=4, took_s=1.0, loss=3.25),),
    )  # fmt: skip


@pytest.fixture
async def network() -> AsyncIterator[CalmNetwork]:
    """Three peers that answer, and one who looks."""
    network = CalmNetwork(silence_s=0.05)
    for name, stage in (("peer-a", 0), ("peer-b", 0), ("peer-c", 1)):
        peer = network.join(name)

        async def answer(request: Request, name: str = name, stage: int = stage) -> Answer:
            if unpack(request.header, AskStatus).run != RUN.id:
                raise Refused("another run")
            return Answer(pack(status(name, stage)))

        peer.transport.serve("status", answer)
        await peer.directory.announce(record(name, stage))
    network.join("viewer")
    yield network
    await network.close()


async def look(network: CalmNetwork) -> SwarmHealth:
    looker = network.join("looker")
    seen = await Monitor(RUN, looker.transport, looker.directory, pace=WatchPace(ask_s=1.0)).once()
    return picture(RUN, msgspec.structs.replace(seen, at=1090.0))


def drawn(view: SwarmHealth) -> str:
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(table(view, 100))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@pytest.mark.virtual_time
async def test_what_is_handed_over_in_memory_is_said(network: CalmNetwork) -> None:
    link = LinkStatus(peer="peer-c", bytes_in=3 * 10**9, bytes_out=10**9, memory_bytes=25 * 10**8)

    async def answer(request: Request) -> Answer:
        return Answer(pack(msgspec.structs.replace(status("peer-a", 0), links=(link, link))))

    network.peers["peer-a"].transport.serve("status", answer)
    view = await look(network)
    assert [peer.memory_bytes for peer in view.peers] == [5 * 10**9, 0, 0]
    assert "1 peer handed over 5,000.0 MB in memory, both ways: to others on the same machine" in drawn(view)
    assert json.loads(to_json(view))["stages"][0]["peers"][0]["memory_bytes"] == 5 * 10**9


@pytest.mark.virtual_time
async def test_peers_say_more_than_their_records(network: CalmNetwork) -> None:
    view = await look(network)
    assert [(peer.peer, peer.version) for peer in view.peers] == [("peer-a", 4), ("peer-b", 4), ("peer-c", 4)]
    assert (view.version, view.loss, view.alerts) == (4, 3.25, ())
    assert [stage.serving for stage in view.stages] == [2, 1]
    assert drawn(view) == GOLDEN.format(id=RUN.id)


GOLDEN = """\
demo  {id}                                                      00:18:10
 step  ━━━━━━━━╸                                                                               4/40
 loss  3.250 → 3.250  ▁

stage  peers  load  version  work/s  slowest      fastest
    0      2   0.0        4    4.50  peer-a 2.25  peer-b 2.25
    1      1   0.0        4    2.25  peer-c 2.25  peer-c 2.25

stage  peer    device  version  step  work/s  in flight  queue    up  computed  last
    0  peer-a  cpu           4   5/8    2.25        2/4    0.0  1:30        70  serving
    0  peer-b  cpu           4   5/8    2.25        2/4    0.0  1:30        70  serving
    1  peer-c  cpu           4   5/8    2.25        2/4    0.0  1:30        70  serving"""


def test_what_was_decided_about_moves_and_how_often_the_run_went_back_are_said() -> None:
    why = "stage 1 is 2.0× as loaded as stage 0\x1b[31m"
    told = [
        msgspec.structs.replace(
            status(name, stage, version=v), generation=generation, rebalance=said, trainers=()
        )
        for name, stage, v, generation, said in (
            ("peer-a", 0, 2, Generation(1, 2), why),
            ("peer-b", 0, 9, Generation(), "all is well"),
            ("peer-c", 1, 2, Generation(1, 2), why),
        )
    ]
    records = [record(said.peer, said.stage) for said in told]
    statuses = [checked(said, known, RUN) for said, known in zip(told, records, strict=True)]
    view = picture(RUN, Observation(at=1090.0, records=tuple(records), statuses=tuple(statuses)))
    assert view.version == 2  # peer-b has not heard yet that the run went back
    said = drawn(view)
    assert "moves: stage 1 is 2.0× as loaded as stage 0?[31m" in said
    assert "the run went back to a checkpoint 1 time" in said
    assert "no trainer that a peer of stage 0 knows of: the run waits for swarm train" in said
    shown = json.loads(to_json(view))
    assert (shown["went_back"], shown["version"]) == (1, 2)


@pytest.mark.virtual_time
async def test_keepers_stand_below_the_peers_and_are_none_of_them(network: CalmNetwork) -> None:
    keeper = network.join("keeper")
    held = msgspec.structs.replace(record("keeper", NO_STAGE, state="keeping", version=2), device="disk")
    await keeper.directory.announce(msgspec.structs.replace(held, speed=0.0))

    async def answer(request: Request) -> Answer:
        empty = status("keeper", NO_STAGE, version=2)
        return Answer(pack(msgspec.structs.replace(empty, state="keeping", speed=0.0, past=())))

    keeper.transport.serve("status", answer)
    view = await look(network)
    lines = drawn(view).splitlines()
    assert lines[-1].split() == ["–", "keeper", "disk", "2", "–", "–", "2/4", "0.0", "1:30", "70", "keeping"]
    assert view.alerts == ()
    said = json.loads(to_json(view))
    assert [(k["peer"], k["state"], k["version"]) for k in said["keepers"]] == [("keeper", "keeping", 2)]
    assert sum(len(stage["peers"]) for stage in said["stages"]) == 3


@pytest.mark.virtual_time
async def test_a_dead_and_a_hung_peer_are_named_and_do_not_count(network: CalmNetwork) -> None:
    network.kill("peer-b")
    network.stop("peer-c")
    view = await look(network)
    assert [stage.serving for stage in view.stages] == [1, 0]
    text = drawn(view)
    assert "! stage 1 has no peer: the run waits until one joins" in text
    assert "! peer peer-b does not answer" in text
    assert "! peer peer-c does not answer" in text
    peers = [line.split() for line in text.splitlines() if "cpu" in line]
    assert [(cells[1], cells[3], cells[-1]) for cells in peers] == [
        ("peer-a", "4", "serving"),
        ("peer-b", "3", "answer"),
        ("peer-c", "3", "answer"),
    ]


@pytest.mark.virtual_time
async def test_a_peer_that_answers_nonsense_is_named(network: CalmNetwork) -> None:
    async def nonsense(request: Request) -> Answer:
        return Answer(b"\xff")

    liar, looker = network.join("peer-d"), network.join("looker")
    liar.transport.serve("status", nonsense)
    await liar.directory.announce(record("peer-d", 1))
    view = await Monitor(RUN, looker.transport, looker.directory, pace=WatchPace(ask_s=1.0)).once()
    assert "malformed PeerStatus header" in view.silent["peer-d"]


@pytest.mark.parametrize(
    "lie",
    [
        {"state": "[/b]"},
        {
            "past": tuple(
                PastStep(version=v, took_s=1.0, loss=(-1.0) ** v * 1e308 * (v in (2, 3))) for v in range(1, 5)
            )
        },
    ],
)
def test_nothing_that_a_peer_says_ends_the_dashboard(lie: dict[str, object]) -> None:
    said = msgspec.structs.replace(status("peer-a", 0), **lie)
    records = (record("peer-a", 0),)
    look = Observation(at=1100.0, records=records, statuses=(checked(said, records[0], RUN),))
    assert "peer-a" in drawn(picture(RUN, look))


def test_a_stranger_has_no_weights_disagree_and_hides_no_two_that_do() -> None:
    names = ("a", "b", "liar")
    records = tuple(record(name, 0) for name in names)
    aggregator = Aggregator(RUN)
    aggregator.observe(Observation(at=1000.0, records=records, voice={"a": 5, "b": 5}))

    def look(at: float, digest: str, version: int = 4) -> tuple[object, ...]:
        said = {"a": "same", "b": digest, "liar": f"made up {at}"}
        statuses = tuple(
            msgspec.structs.replace(
                status(name, 0, version=4 if name != "liar" else version), kind="cpu", digest=said[name]
            )
            for name in names
        )
        aggregator.observe(Observation(at=at, statuses=statuses))
        return aggregator.health(now=at).stages[0].disagree

    assert look(1001.0, "same") == ()
    for number in range(40):  # of versions that there are not yet, which would be the newest
        look(1002.0 + number, "other", version=number)
    assert look(1050.0, "other", version=40) == (("other", ("b",)), ("same", ("a",)))


@pytest.mark.parametrize("until", [2010.0, 2050.0])
def test_a_stranger_raises_and_hides_no_alert_where_others_have_voice(until: float) -> None:
    """It has a trainer that nobody else has, and lacks microbatches; one that is silent joined in future."""
    liar = msgspec.structs.replace(
        status("liar", 0), trainers=("none",), audit=LedgerCounts(missing=3)
    )  # fmt: skip

    def alerts(*names: str, voice: dict[str, int] | None = None) -> str:
        aggregator = Aggregator(RUN)
        records = [record(name, name == "b") for name in names if name != "silent"]
        records += [msgspec.structs.replace(record(name, 0), since=1e9) for name in names if name == "silent"]
        aggregator.observe(Observation(at=2000.0, records=tuple(records), voice=voice))
        honest = [
            msgspec.structs.replace(status(one, one == "b"), trainers=()) for one in names if one in "ab"
        ]
        for at in (2001.0, until):
            said = (*honest, liar) if "liar" in names else tuple(honest)
            aggregator.observe(Observation(at=at, statuses=said))
        return "; ".join(alert.text for alert in aggregator.health(now=until).alerts)

    missing, nobody = (
        "peer liar reports 3 microbatches missing",
        "stage 0 has only peers that have not worked",
    )
    assert missing in alerts("a", "b", "liar")
    said = alerts("a", "b", "liar", "silent", voice={"a": 5, "b": 5})
    assert "no trainer" in said and missing not in said and nobody not in said
    assert nobody in alerts("b", "liar", voice={"b": 5})
    assert nobody not in alerts("b", "liar")


async def test_records_alone_need_no_call_and_the_dead_and_trainers_stay_away() -> None:
    line, records = Line(), Records()
    records.known = [record("b", 1), record("a", 0), record("d", 1, state="joining")]
    records.known += [record("c", 0, state="left"), record("e", NO_STAGE, state="feeding")]
    view = await Monitor(RUN, line, records).once(calls=False)  # type: ignore[arg-type]
    shown = picture(RUN, view)
    assert not line.calls and not shown.keepers
    assert [peer.peer for peer in shown.peers] == ["a", "b", "d"]
    assert (shown.version, shown.loss, shown.stages[1].serving) == (3, None, 1)


def test_the_address_of_a_peer_that_answers_is_shown_to_join_with() -> None:
    home, far = "/ip4/127.0.0.1/tcp/1/p2p/b", "/ip4/192.0.2.7/tcp/1\x1b/p2p/b"
    records = (
        msgspec.structs.replace(record("a", 0), addresses=("/ip4/192.0.2.6/tcp/1/p2p/a",)),
        msgspec.structs.replace(record("b", 1), addresses=(home, far)),
    )
    view = picture(RUN, Observation(at=0.0, records=records, silent={"a": "no answer"}))
    assert join_line(view).endswith(f"swarm peer --run {RUN.id} --join '/ip4/192.0.2.7/tcp/1?/p2p/b'")
    assert join_line(picture(RUN, Observation(at=0.0, records=(record("a", 0),)))) == ""


def test_some_addresses_are_shown_to_join_with_first_those_that_can_be_dialled() -> None:
    ids = [Identity(bytes([n]) * 32).peer_id for n in range(5)]
    home, wide, relayed, other, far = (
        *(
            f"/ip4/{host}/tcp/1/p2p/{one}"
            for host, one in zip(("192.168.0.7", "44.1.2.3"), ids, strict=False)
        ),
        f"/ip4/44.1.2.9/tcp/1/p2p/{ids[4]}/p2p-circuit/p2p/{ids[2]}",
        *(f"/ip4/44.1.2.{n}/tcp/1/p2p/{ids[n]}" for n in (3, 4)),
    )

    def line(*addresses: str) -> str:
        records = [
            msgspec.structs.replace(record(f"p{n}", 0), addresses=(address,))
            for n, address in enumerate(addresses)
        ]
        return join_line(picture(RUN, Observation(at=0.0, records=tuple(records))))

    assert line(relayed, home, wide).endswith(f" --join {wide} --join {home} --join {relayed}")
    assert line(relayed, home, wide, other, far).endswith(f" --join {wide} --join {other} --join {far}")
    assert line(relayed).endswith(f" --join {relayed}")


def test_a_run_without_peers_says_what_is_missing() -> None:
    text = drawn(picture(RUN, Observation(at=0.0, records=())))
    assert "0/40" in text
    assert "! stage 0 has no peer" in text


def test_a_count_that_is_wrong_is_shouted() -> None:
    bad = status("a", 0, audit=LedgerCounts(steps=3, missing=1, duplicated=2))
    text = drawn(picture(RUN, Observation(at=0.0, records=(record("a", 0),), statuses=(bad,))))
    assert "1 microbatch missing from steps that were taken" in text
    assert "2 microbatches counted twice" in text


@pytest.mark.virtual_time
async def test_json_holds_all_that_the_table_shows(network: CalmNetwork) -> None:
    network.kill("peer-b")
    said = json.loads(to_json(await look(network)))
    assert (said["run"], said["version"], said["steps"], said["loss"]) == (RUN.id, 4, 40, 3.25)
    assert [stage["serving"] for stage in said["stages"]] == [1, 1]
    first, second = said["stages"][0]["peers"]
    assert tuple(said) == SwarmHealth.__struct_fields__
    assert (first["peer"], first["answered"], first["done"], first["audit"]["duplicated"]) == (
        "peer-a",
        True,
        5,
        0,
    )
    assert (second["answered"], second["version"]) == (False, 3)
    assert "went away" in second["why"] or second["why"]
    assert [alert["peer"] for alert in said["alerts"]] == ["peer-b"]


@pytest.mark.net
async def test_no_route_to_the_run_is_said_in_one_line() -> None:
    peer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    with pytest.raises(SetupError, match=r"127\.0\.0\.1"):
        await run_status(StatusOptions(run="0" * 32, join=(f"/ip4/127.0.0.1/tcp/9/p2p/{peer}",)))


def test_records_stay_small() -> None:
    assert len(msgspec.msgpack.encode(record("p" * 52, 1))) < 400


def test_who_comes_by_a_name_of_another_gets_no_numbers_of_this_machine() -> None:
    """A web page may have its own name lead to this machine, and would read the answer (DNS rebinding)."""

    def answered(host: str) -> int:
        request = urllib.request.Request(place.replace("0.0.0.0", "127.0.0.1"), headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code

    with served(("127.0.0.1", 0), CollectorRegistry()) as place:
        for host in ("evil.example", "evil.example:9090", "127.0.0.1.evil.example", ""):
            assert answered(host) == 421
        for host in ("localhost", "LocalHost:9090", "[::1]:9090"):
            assert answered(host) == 200
    with served(("0.0.0.0", 0), CollectorRegistry()) as place:  # a scraper may have any name for it
        assert answered("peer:9090") == 200


@pytest.mark.virtual_time
async def test_all_lines_are_looked_at_twice_a_second_however_many_ask() -> None:
    """One that asked without end took all of a peer's time, once that had met a crowd."""

    class Lines(dict[str, NetworkPath]):
        looked = 0

        def items(self) -> Any:
            self.looked += 1
            return super().items()

    lines = Lines({f"peer {n}": NetworkPath(received_bytes=n, sent_bytes=1) for n in range(100)})
    traffic = TrafficStatus(SimpleNamespace(lines=lines))  # type: ignore[arg-type]
    for looks in (1, 2):
        told = [traffic.now() for _ in range(50)][-1]
        assert (lines.looked, told.bytes_in, told.bytes_out) == (looks, 4950, 100)
        assert [link.peer for link in told.links] == [f"peer {n}" for n in range(99, 35, -1)]
        await asyncio.sleep(LOOKED_S)
