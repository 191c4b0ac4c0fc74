"""Devices and the lines between them: what a text says, and every refusal by its words."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swarm.errors import SetupError
from swarm.plan.network import CARDS_BPS, CARDS_LATENCY_S, Device, Network, StepWork, read_devices
from swarm.plan.search import search_overlapped
from tests.plan.documented import DEVICES

TWO = """
[defaults]
tflops = 10

[[devices]]
name = "a"
region = "Oslo"
count = 2

[[devices]]
name = "b"
region = "Rome"

[inside]
latency_ms = 1
bandwidth_mbps = 1000

[[links]]
between = ["Oslo", "Rome"]
latency_ms = 30
bandwidth_mbps = 200
"""


def network(
    latency_s: object = ((0.0, 0.1), (0.1, 0.0)), bandwidth_bps: object = ((1e9, 1e8), (1e8, 1e9))
) -> Network:
    devices = (Device("a", 0, 1e12), Device("b", 1, 1e12, upload_bps=1e7), Device("c", 1, 1e12))
    return Network(devices, ("Oslo", "Rome"), np.array(latency_s), np.array(bandwidth_bps))


def job(**fields: object) -> StepWork:
    usual: dict[str, object] = {
        "stages": 2,
        "microbatches": 8,
        "forward_flops": (1e9, 1e9),
        "forward_bytes": (1e6,),
        "backward_bytes": (1e6,),
        "gradient_bytes": (1e7, 1e7),
        "state_bytes": (1e8, 2e8),
        "activation_bytes": (1e6, 1e6),
    }
    return StepWork(**{**usual, **fields})  # type: ignore[arg-type]


def test_the_documented_example_is_a_network() -> None:
    found = read_devices(DEVICES)
    assert found.regions == ("Oregon", "Frankfurt")
    assert len(found) == 10
    laptop = found.devices[-1]
    assert laptop == Device("laptop-1", 1, 0.25 * 30e12, 8e9, 40e6, 250e6)
    latency_NN, bandwidth_NN = found.pairs()
    assert (latency_NN[0, 1], bandwidth_NN[0, 1]) == (0.005, 2e9)
    assert (latency_NN[0, 9], bandwidth_NN[0, 9]) == (0.143, 250e6)
    assert (latency_NN[9, 0], bandwidth_NN[9, 0]) == (0.143, 40e6)
    assert (latency_NN[9, 9], bandwidth_NN[9, 9]) == (0.0, math.inf)


def test_a_device_limits_its_own_lines() -> None:
    _, bandwidth_NN = network().pairs()
    assert bandwidth_NN[1, 0] == 1e7 and bandwidth_NN[0, 1] == 1e8


def test_the_matrices_are_the_networks_own() -> None:
    mine = np.array(((1e9, 1e8), (1e8, 1e9)))
    found = network(bandwidth_bps=mine)
    mine[0, 0] = 5.0
    assert found.bandwidth_bps[0, 0] == 1e9
    with pytest.raises(ValueError, match="read-only"):
        found.latency_s[0, 0] = 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bandwidth_bps": ((0.0, 1e8), (1e8, 1e9))}, "two devices in 'Oslo' cannot reach one another"),
        ({"bandwidth_bps": ((1e9, 0.0), (0.0, 1e9))},
         "'Oslo' and 'Rome' cannot reach one another, by 0 bit/s with a latency of 0."),
        ({"latency_s": ((0.0, math.inf), (math.inf, 0.0))},
         "'Oslo' and 'Rome' cannot reach one another, by 1e+08 bit/s with a latency of inf s"),
    ],
)  # fmt: skip
def test_a_matrix_that_cannot_be_is_refused_with_the_pair(change: dict[str, object], words: str) -> None:
    with pytest.raises(SetupError) as caught:
        network(**change)
    assert words in caught.value.text


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (lambda: Device("x", 0, 0.0), "device 'x' has flops_per_s = 0: it must be above 0"),
        (lambda: Device("x", 0, math.inf), "flops_per_s = inf"),
        (lambda: Device("x", 0, 1.0, memory_bytes=math.nan), "memory_bytes = nan"),
        (lambda: Device("x", 0, 1.0, upload_bps=0.0), "device 'x' cannot be reached: its upload is 0"),
        (lambda: Device("x", 0, 1.0, download_bps=math.nan), "cannot be reached: its download is nan bit/s"),
        (lambda: Network((Device("x", 0, 1.0),) * 2, ("Oslo",), np.zeros((1, 1)), np.ones((1, 1))),
         "two devices are called 'x'"),
    ],
)  # fmt: skip
def test_a_device_that_cannot_be_is_refused_by_name(device, words: str) -> None:
    with pytest.raises(SetupError) as caught:
        device()
    assert words in caught.value.text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[defaults]", "[defaults", "the devices are not TOML"),
        ("[defaults]", "[default]", "default in the devices' file: unknown key (did you mean defaults?)"),
        ("tflops = 10", "tflop = 10", "tflop in [defaults]: unknown key (did you mean tflops?)"),
        ("tflops = 10", "", "tflops is missing in [[devices]] 'a' (and in [defaults])"),
        ("tflops = 10", "tflops = true", "tflops = true in [defaults]: it must be a number"),
        ("count = 2", "count = 0", "count = 0 in [[devices]] 'a': it must be an integer from 1"),
        ("count = 2", "count = 99999999", "count = 99999999 in [[devices]] 'a'"),
        ("count = 2", "count = 100000", "more than 100000 devices: look at the count of [[devices]] 'b'"),
        ("count = 2", "cuont = 2", "cuont in [[devices]] 'a': unknown key (did you mean count?)"),
        ('region = "Oslo"', "", "region is missing in [[devices]] 'a': it must be a name"),
        ('name = "b"', 'name = "a-1"', "two devices are called 'a-1'"),
        ('["Oslo", "Rome"]', '["Oslo", "Roma"]', "no device is in 'Roma' (did you mean Rome?)"),
        ('["Oslo", "Rome"]', '["Oslo"]', "between = ['Oslo'] in [[links]] 1"),
        ('["Oslo", "Rome"]', '["Oslo", "Oslo"]', "'Oslo' cannot be reached from 'Rome': no [[links]] has"),
        ("bandwidth_mbps = 200", "bandwidth_mbps = -200",
         "bandwidth_mbps = -200 in [[links]] Oslo - Rome: it must be a number: 0, inf, or 1e-9 to 1e15"),
        ("tflops = 10", f"tflops = 1{'0' * 400}", "in [defaults]: it must be a number: 0, inf"),
        ("bandwidth_mbps = 200", "bandwidth_mbps = 1e-310", "bandwidth_mbps = 1e-310 in [[links]] Oslo"),
        ("bandwidth_mbps = 200", "bandwidth_mbps = nan", "bandwidth_mbps = nan in [[links]] Oslo - Rome"),
        ("bandwidth_mbps = 200", "bandwidth_mbps = 0", "'Oslo' and 'Rome' cannot reach one another"),
        ("bandwidth_mbps = 200", "", "bandwidth_mbps is missing in [[links]] Oslo - Rome"),
        ("bandwidth_mbps = 200", "bandwidth_mbps = 200\njitter = 3", "jitter in [[links]] Oslo - Rome: unk"),
        ("[inside]\nlatency_ms = 1\nbandwidth_mbps = 1000", "",
         "nothing is said of the line between two devices in 'Oslo'"),
        ("[inside]", "[[inside]]", "in the devices' file: it must be a table: [its name] on a line"),
        ("[[links]]", "[links]", "in the devices' file: it must be tables: [[their name]] on"),
        ("[[links]]", '[[links]]\nbetween = ["Rome", "Oslo"]\nlatency_ms = 1\nbandwidth_mbps = 1\n[[links]]',
         "[[links]] Oslo - Rome is given twice (also as [[links]] Rome - Oslo)"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_file_is_said_with_the_place(old: str, new: str, words: str) -> None:
    assert TWO.count(old) >= 1
    with pytest.raises(SetupError) as caught:
        read_devices(TWO.replace(old, new, 1))
    assert words in caught.value.text


def test_a_file_without_devices_is_refused() -> None:
    with pytest.raises(SetupError, match="there are no devices"):
        read_devices("")


def test_a_region_of_one_device_needs_no_line_inside() -> None:
    alone = TWO.replace("count = 2", "").replace("[inside]\nlatency_ms = 1\nbandwidth_mbps = 1000", "")
    found = read_devices(alone)
    assert [device.name for device in found.devices] == ["a", "b"]
    assert math.isinf(found.bandwidth_bps[0, 0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 0}, "a job of 0 stages and 8 microbatches"),
        ({"forward_bytes": (1.0, 2.0)}, "forward_bytes has 2 numbers; 2 stages need 1"),
        ({"gradient_bytes": (1.0, -2.0)}, "gradient_bytes = (1.0, -2.0): bytes and operations cannot be"),
        ({"forward_flops": (1.0, math.nan)}, "forward_flops = (1.0, nan)"),
    ],
)
def test_a_job_that_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(SetupError) as caught:
        job(**change)
    assert words in caught.value.text


def test_a_stage_fits_where_a_peer_of_it_would_be_let_in() -> None:
    """Half of what the fixed part leaves is for microbatches, and it must hold one."""
    held = job(fixed_bytes=(1e8, 4e8))
    assert held.fits(1, Device("x", 0, 1e12, memory_bytes=4.02e8))
    assert not held.fits(1, Device("x", 0, 1e12, memory_bytes=4.019e8))
    assert held.fits(0, Device("x", 0, 1e12, memory_bytes=1.02e8))
    assert held.room(1, Device("x", 0, 1e12, memory_bytes=4.1e8)) == 5.0
    assert job().least_bytes(1) == job(fixed_bytes=(1e8, 2e8)).least_bytes(1) == 2.02e8


# -- machines with several cards -----------------------------------------------------------------------------

CARDS = """
[defaults]
tflops = 30
memory_gb = 16

[[devices]]
name = "host"
region = "Oslo"
count = 2
cards = 4
upload_mbps = 400
download_mbps = 1000

[[devices]]
name = "laptop"
region = "Oslo"
upload_mbps = 40

[inside]
latency_ms = 5
bandwidth_mbps = 2000
"""


def test_cards_of_a_machine_are_devices_with_a_line_of_memory_between_them() -> None:
    network = read_devices(CARDS)
    assert [d.name for d in network.devices[:5]] == [
        "host-0/0",
        "host-0/1",
        "host-0/2",
        "host-0/3",
        "host-1/0",
    ]
    assert [network.machine_of(i) for i in range(9)] == ["host-0"] * 4 + ["host-1"] * 4 + [""]
    latency_NN, bandwidth_NN = network.pairs()
    assert (latency_NN[0, 3], bandwidth_NN[0, 3]) == (CARDS_LATENCY_S, CARDS_BPS)
    assert (latency_NN[0, 4], bandwidth_NN[0, 4]) == (0.005, 100e6), "a fourth of the machine's slower way"
    assert (latency_NN[0, 8], bandwidth_NN[0, 8], bandwidth_NN[8, 0]) == (0.005, 100e6, 40e6)
    assert set(network.place_of) == {network.regions.index("Oslo")}, "all can be lost together"
    slower = read_devices(CARDS + "[machine]\nbandwidth_mbps = 900\nlatency_ms = 2\n")
    latency_NN, bandwidth_NN = slower.pairs()
    assert (latency_NN[0, 1], bandwidth_NN[0, 1]) == (0.002, 900e6)


def test_one_machine_alone_needs_nothing_said_of_lines() -> None:
    network = read_devices('[[devices]]\nname = "a"\nregion = "x"\ntflops = 1\ncards = 2\n')
    assert [device.name for device in network.devices] == ["a/0", "a/1"]
    assert network.pairs()[1][0, 1] == CARDS_BPS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cards = 0", "cards = 0 in .*: it must be an integer from 1 to 64"),
        ('cards = "all"', 'cards = "all" in .*: it must be an integer'),
        ("cards = 2\ncount = 1001", "more than 1000 machines with several cards: look"),
        ("cards = 2\n[machine]\nspeed = 1", r"speed in \[machine\]: unknown key"),
    ],
)
def test_cards_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        read_devices(f'[[devices]]\nname = "a"\nregion = "x"\ntflops = 1\n{text}\n')


@pytest.mark.parametrize("stages", [4, 8])
def test_consecutive_stages_are_on_one_machine(stages: int) -> None:
    """Two machines of four cards with 100 Mbit/s between them: one boundary crosses that."""
    text = CARDS.replace('[[devices]]\nname = "laptop"\nregion = "Oslo"\nupload_mbps = 40\n', "")
    network = read_devices(text.replace("upload_mbps = 400", "upload_mbps = 100"))
    job = StepWork(
        stages=stages, microbatches=32, forward_flops=(1e12,) * stages, forward_bytes=(4e6,) * (stages - 1),
        backward_bytes=(4e6,) * (stages - 1), gradient_bytes=(4e7,) * stages, state_bytes=(1e8,) * stages,
        activation_bytes=(1e7,) * stages,
    )  # fmt: skip
    shuffled = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    mixed = Network(
        tuple(network.devices[i] for i in shuffled), network.regions, network.latency_s,
        network.bandwidth_bps, network.places,
    )  # fmt: skip
    found = search_overlapped(mixed, job, seed=1, budget_s=0.0, spent_s=lambda: 1.0).stage_of
    of_machine = {
        name: sorted({int(found[i]) for i in range(8) if mixed.machine_of(i) == name})
        for name in ("host-0", "host-1")
    }
    half = stages // 2
    assert sorted(of_machine.values()) == [list(range(half)), list(range(half, stages))]


def test_a_stage_on_two_machines_of_one_region_does_not_outlive_it() -> None:
    network = read_devices(CARDS)
    job = StepWork(
        stages=1, microbatches=4, forward_flops=(1e12,), forward_bytes=(), backward_bytes=(),
        gradient_bytes=(1e6,), state_bytes=(1e6,), activation_bytes=(1e6,),
    )  # fmt: skip
    with pytest.raises(SetupError, match="no plan was found that survives the loss of any one region"):
        search_overlapped(network, job, seed=1, budget_s=0.0, spent_s=lambda: 1.0, survive=True)
