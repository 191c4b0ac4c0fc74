"""What there is to plan with: devices, the lines between them, and the work of a step, in numbers.

Distances are kept region by region, so ten thousand devices in ten cities cost a matrix of 10 × 10. Where
every pair differs, each device is a region of its own.

    devices.toml      read_devices(text) -> Network
    a run's model     peers/programs/descriptions.py makes the Job
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from swarm.codecs import SLOW_BPS, packed_part
from swarm.errors import MALFORMED, SetupError, did_you_mean
from swarm.manifest import CodecSpec, tomllib
from swarm.manifest.rules import Rule, integer, list_of, shown

BACKWARD_FORWARDS = 2.0
"""A backward pass is two products where a forward is one: for the inputs, and for the weights."""

MEMORY_SHARE = 0.5
"""Of the memory that the state leaves, for microbatches in flight; as in `peers/owner/memory_limit.py`."""

CARDS_LATENCY_S, CARDS_BPS = 0.5e-3, 6e9
"""Between two cards of one machine, unless [machine] says otherwise: what two processes handed over in
memory, frames and all, on two busy cores (2026-11-26)."""
MAX_MACHINES = 1000
"""Of several cards: each is a row of a matrix."""
MAX_CARDS = 64

MAX_LATENCY_S = 1e6
"""Of a line: with more it is none."""

MAX_DEVICES = 100_000
"""Ten times the largest swarm that we simulate: a `count` beyond it is a typo."""


@dataclass(frozen=True, slots=True)
class Device:
    """One volunteer's machine, as the planner sees it."""

    name: str
    region: int
    """Index into `Network.regions`."""
    flops_per_s: float
    """What it reaches on a stage's arithmetic, not what its data sheet says."""
    memory_bytes: float = math.inf
    upload_bps: float = math.inf
    """Bits a second out of it, to all others together."""
    download_bps: float = math.inf
    """Bits a second into it, from all others together."""

    def __post_init__(self) -> None:
        for what, value in (("flops_per_s", self.flops_per_s), ("memory_bytes", self.memory_bytes)):
            if not value > 0 or (what == "flops_per_s" and math.isinf(value)):
                raise SetupError(f"device {self.name!r} has {what} = {value:g}: it must be above 0")
        for what, value in (("upload", self.upload_bps), ("download", self.download_bps)):
            if not value > 0:
                raise SetupError(f"device {self.name!r} cannot be reached: its {what} is {value:g} bit/s")


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Devices and what lies between them. A line is the same both ways; a device's up and down may differ."""

    devices: tuple[Device, ...]
    regions: tuple[str, ...]
    latency_s: np.ndarray
    """[R, R] one way; on the diagonal: between two devices inside the region."""
    bandwidth_bps: np.ndarray
    """[R, R] bits a second that one pair of devices has; inf = only the devices' own lines limit it."""
    places: tuple[int, ...] = ()
    """[R] the region that a region lies in: a machine with several cards is one of its own, inside another.
    None given: each in itself."""
    region_of: np.ndarray = field(init=False)
    """[N] of every device, as an index."""
    place_of: np.ndarray = field(init=False)
    """[N] the region that every device lies in, and can be lost with, as an index."""
    flops_per_s: np.ndarray = field(init=False)
    """[N] of every device, as all that follows."""
    memory_bytes: np.ndarray = field(init=False)
    upload_bps: np.ndarray = field(init=False)
    download_bps: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        if not self.places:
            object.__setattr__(self, "places", tuple(range(len(self.regions))))
        for name in ("latency_s", "bandwidth_bps"):
            matrix_RR = np.array(getattr(self, name), dtype=np.float64)
            matrix_RR.flags.writeable = False
            object.__setattr__(self, name, matrix_RR)
        usable_RR = (self.latency_s >= 0) & (self.latency_s <= MAX_LATENCY_S) & (self.bandwidth_bps > 0)
        for i, j in np.argwhere(~usable_RR):
            a, b = self.regions[i], self.regions[j]
            pair = f"two devices in {a!r}" if a == b else f"{a!r} and {b!r}"
            raise SetupError(
                f"{pair} cannot reach one another, by {self.bandwidth_bps[i, j]:g} bit/s with a latency of "
                f"{self.latency_s[i, j]:g} s. Leave one of them out, or say how the way around is"
            )
        seen: set[str] = set()
        for device in self.devices:
            if device.name in seen:
                raise SetupError(f"two devices are called {device.name!r}")
            seen.add(device.name)
        region_of = np.array([device.region for device in self.devices], dtype=np.int64)
        object.__setattr__(self, "region_of", region_of)
        object.__setattr__(self, "place_of", np.array(self.places, dtype=np.int64)[region_of])
        for name in ("flops_per_s", "memory_bytes", "upload_bps", "download_bps"):
            of_each = [getattr(device, name) for device in self.devices]
            object.__setattr__(self, name, np.array(of_each, dtype=np.float64))

    def __len__(self) -> int:
        return len(self.devices)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """[N, N] latencies in s, 0 on the diagonal, and bandwidths in bit/s from the row's device to the
        column's, inf on it. For small N only: they grow with N².
        """
        every = np.arange(len(self))
        latency_NN, line_NN = self.between(every, every)
        bandwidth_NN = np.minimum(np.minimum(line_NN, self.upload_bps[:, None]), self.download_bps)
        np.fill_diagonal(latency_NN, 0.0)
        np.fill_diagonal(bandwidth_NN, np.inf)
        return latency_NN, bandwidth_NN

    def between(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[a, b] latencies in s and bandwidths in bit/s of the lines between these devices and those."""
        here = self.region_of[a][:, None], self.region_of[b]  # np.ix_ takes four times as long
        return self.latency_s[here], self.bandwidth_bps[here]

    def machine_of(self, device: int) -> str:
        """The machine of which it is one of several cards; empty: it is the only one."""
        region = self.devices[device].region
        return self.regions[region] if self.places[region] != region else ""


def carried_s(bits: np.ndarray | tuple[float, float], bit_s: np.ndarray) -> np.ndarray:
    """[...] seconds of bodies on lines of so many seconds a bit. `bits`: as they are; and as slow lines carry
    them, packed, if there are any."""
    return bit_s * (np.where(bit_s * SLOW_BPS < 1.0, bits[0], bits[1]) if len(bits) > 1 else bits[0])


def all_reduce_s(
    latency_s: np.ndarray, part_s: np.ndarray, up_s: np.ndarray, down_s: np.ndarray, there: np.ndarray
) -> np.ndarray:
    """[...] seconds of a stage's all-reduce: all send to all at once, so a part of the gradient has come to
    its owner when its line and both ends are through; then each sum goes to all.

    Args:
        latency_s, part_s: [..., n, n] of the line from the row's device to the column's, for a part.
        up_s, down_s: [..., n] of the others' parts; the former are out of an owner's way before its sum is.
        there: [..., n] whether it is a device at all.
    """
    arrival_s = latency_s + np.maximum(np.maximum(part_s, up_s[..., None]), down_s[..., None, :])
    arrival_s *= there[..., None] & there[..., None, :] & ~np.eye(there.shape[-1], dtype=bool)
    return (np.maximum(arrival_s.max(axis=-2), up_s) + arrival_s.max(axis=-1)).max(axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one step. Numbers per stage are tuples of S, per boundary (s to s + 1) of S - 1."""

    stages: int
    microbatches: int
    """M, in one step."""
    forward_flops: tuple[float, ...]
    """Per stage, of one microbatch; the backward is `BACKWARD_FORWARDS` as much."""
    forward_bytes: tuple[float, ...]
    """Per boundary, of one microbatch's activations as they are on the wire, after the codec."""
    backward_bytes: tuple[float, ...]
    """Per boundary, of the gradient of those."""
    gradient_bytes: tuple[float, ...]
    """Per stage, of the whole vector that its members exchange, as it is on the wire: a sum and the settled
    answer to it may differ; then their mean."""
    state_bytes: tuple[float, ...]
    """Per stage: what a newcomer downloads."""
    activation_bytes: tuple[float, ...]
    """Per stage: what one microbatch in flight keeps in the device's memory between forward and backward."""
    fixed_bytes: tuple[float, ...] = ()
    """Per stage: what is in a device's memory before it computes anything: the state, sums, gradients. None
    given: the state."""
    packed: StepWork | None = None
    """The same with the bytes that slow lines carry (`packing`); None: they carry those above."""

    def __post_init__(self) -> None:
        if self.stages < 1 or self.microbatches < 1:
            raise SetupError(f"a job of {self.stages} stages and {self.microbatches} microbatches a step")
        others = {"forward_bytes": self.stages - 1, "backward_bytes": self.stages - 1}
        for name in [each.name for each in fields(self) if each.name.endswith(("_flops", "_bytes"))]:
            values: tuple[float, ...] = getattr(self, name)
            wanted = others.get(name, self.stages if values or name != "fixed_bytes" else 0)
            if len(values) != wanted:
                raise SetupError(f"{name} has {len(values)} numbers; {self.stages} stages need {wanted}")
            if not all(0 <= value < math.inf for value in values):
                raise SetupError(f"{name} = {values}: bytes and operations cannot be negative or infinite")

    def packing(self, codec: CodecSpec) -> StepWork:
        """The same, whose bytes slow lines carry packed; of exact sums as much is left as of float32."""
        there = [codec.forward_at(boundary) for boundary in range(self.stages - 1)]
        back = [codec.backward_at(boundary, sent) for boundary, sent in enumerate(there)]
        sent = {"forward_bytes": there, "backward_bytes": back, "gradient_bytes": ["none"] * self.stages}
        packed = {
            name: tuple(
                size * packed_part(one) for size, one in zip(getattr(self, name), codecs, strict=True)
            )
            for name, codecs in sent.items()
        }
        return replace(self, packed=replace(self, packed=None, **packed))

    def least_bytes(self, stage: int) -> float:
        """What a device needs to hold the stage with one microbatch in flight, as its owner is told."""
        return self._fixed_bytes(stage) + self.activation_bytes[stage] / MEMORY_SHARE

    def fits(self, stage: int, device: Device) -> bool:
        return self.least_bytes(stage) <= device.memory_bytes

    def room(self, stage: int, device: Device) -> float:
        """How many microbatches in flight the device can hold beside the state of the stage."""
        free_bytes = MEMORY_SHARE * (device.memory_bytes - self._fixed_bytes(stage))
        if not self.activation_bytes[stage] or math.isinf(free_bytes):
            return math.inf
        return max(1.0, free_bytes // self.activation_bytes[stage])

    def bytes_out(self, stage: int) -> float:
        """What a microbatch has the upload of its peer send: activations on, gradients back."""
        on = self.forward_bytes[stage] if stage < self.stages - 1 else 0.0
        return on + (self.backward_bytes[stage - 1] if stage else 0.0)

    def bytes_in(self, stage: int) -> float:
        """The same of its download."""
        back = self.backward_bytes[stage] if stage < self.stages - 1 else 0.0
        return back + (self.forward_bytes[stage - 1] if stage else 0.0)

    def _fixed_bytes(self, stage: int) -> float:
        return (self.fixed_bytes or self.state_bytes)[stage]


def check_fit(network: Network, job: StepWork) -> None:
    """
    Raises:
        SetupError: no division of the devices can be: fewer than stages, or a stage that none can hold.
    """
    if len(network) < job.stages:
        raise SetupError(
            f"{len(network)} devices cannot serve {job.stages} stages: each stage needs at least one. Cut "
            "the model into fewer stages (model.stages), or bring more devices"
        )
    for stage in range(job.stages):
        if not any(job.fits(stage, device) for device in network.devices):
            largest = max(network.devices, key=lambda device: device.memory_bytes)
            raise SetupError(
                f"no device can hold stage {stage}: it needs {job.least_bytes(stage) / 1e9:.3g} GB, and the "
                f"largest, {largest.name!r}, has {largest.memory_bytes / 1e9:.3g} GB. Cut the model into "
                "more stages"
            )


# --- devices.toml -------------------------------------------------------------------------------------------

_AMOUNT = Rule(
    "a number: 0, inf, or 1e-9 to 1e15",
    lambda v: type(v) in (int, float) and (v in (0, math.inf) or 1e-9 <= v <= 1e15),
    float,
)
"""What can be reckoned with. `Device` and `Network` say what else they cannot take."""
_NAME = Rule(
    "a name of 1 to 80 characters", lambda v: type(v) is str and 0 < len(v) <= 80 and v.isprintable()
)
_ENDS = Rule(
    'like ["Oslo", "Rome"]', lambda v: type(v) is list and len(v) == 2 and all(type(end) is str for end in v)
)
_TABLE = Rule("a table: [its name] on a line of its own, then its keys", lambda v: type(v) is dict)
_TABLES = Rule("tables: [[their name]] on a line of its own before each", list_of(_TABLE.accepts, math.inf))
_FILE = {**dict.fromkeys(("defaults", "inside", "machine"), _TABLE), "devices": _TABLES, "links": _TABLES}
_LINE = {"latency_ms": _AMOUNT, "bandwidth_mbps": _AMOUNT}
_LINK = {"between": _ENDS, **_LINE}
_AMOUNTS = ("tflops", "speed", "memory_gb", "upload_mbps", "download_mbps")
_GROUP = {**dict.fromkeys(_AMOUNTS, _AMOUNT), "cards": integer(1, MAX_CARDS)}
_DEVICES = {"name": _NAME, "region": _NAME, "count": integer(1, MAX_DEVICES), **_GROUP}


def read_devices(text: str) -> Network:
    """The network that a `devices.toml` describes (docs/planning.md has an example).

    Raises:
        SetupError: not TOML; a key that is unknown or missing; a number that cannot be; a pair of regions
            with no link, with two, or with one of no bandwidth. The text names the table and what to change.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except MALFORMED as error:
        raise SetupError(f"the devices are not TOML: {str(error)[:200]}") from None
    tables = _checked(tables, _FILE, "the devices' file")
    defaults = _checked(tables.get("defaults", {}), _GROUP, "[defaults]")
    if not tables.get("devices"):
        raise SetupError("there are no devices: at least one [[devices]] with name, region, count is needed")
    regions: dict[str, int] = {}
    devices: list[Device] = []
    cards: list[int] = []
    """Of each of these."""
    for number, own in enumerate(tables["devices"]):
        where = f"[[devices]] {own.get('name', number + 1)!r}"
        group = defaults | _checked(own, _DEVICES, where, needed=("name", "region"))
        if "tflops" not in group:
            raise SetupError(f"tflops is missing in {where} (and in [defaults]): 1e12 operations a second")
        devices += _devices(group, regions.setdefault(group["region"], len(regions)))
        cards += [group.get("cards", 1)] * (len(devices) - len(cards))
        if sum(cards) > MAX_DEVICES:
            raise SetupError(f"more than {MAX_DEVICES} devices: look at the count of {where}")
        if sum(count > 1 for count in cards) > MAX_MACHINES:
            raise SetupError(
                f"more than {MAX_MACHINES} machines with several cards: look at the count of {where}"
            )
    members = np.bincount([device.region for device in devices])
    latency_s, bandwidth_bps = _lines(tables, tuple(regions), members)
    machine = _checked(tables.get("machine", {}), _LINE, "[machine]")
    return _with_cards(
        Network(tuple(devices), tuple(regions), latency_s, bandwidth_bps),
        cards,
        machine.get("latency_ms", 1e3 * CARDS_LATENCY_S) / 1e3,
        machine.get("bandwidth_mbps", CARDS_BPS / 1e6) * 1e6,
    )


def _with_cards(network: Network, cards: Sequence[int], latency_s: float, bandwidth_bps: float) -> Network:
    """The same with several devices for a machine that has several cards, and a line of memory between them.

    The machine's own line is not in the way of what stays inside: it is in those to others instead, in equal
    parts. `cards`: of each device.
    """
    devices: list[Device] = []
    regions, places = list(network.regions), list(network.places)
    share_bps = [math.inf] * len(regions)
    for device, count in zip(network.devices, cards, strict=True):
        if count == 1:
            devices.append(device)
            continue
        devices += [
            replace(device, name=f"{device.name}/{card}", region=len(regions), upload_bps=math.inf,
                    download_bps=math.inf)
            for card in range(count)
        ]  # fmt: skip
        regions.append(device.name)
        places.append(device.region)
        share_bps.append(min(device.upload_bps, device.download_bps) / count)
    share_R, here = np.array(share_bps), np.ix_(places, places)
    latency_RR = network.latency_s[here]
    bandwidth_RR = np.minimum(np.minimum(network.bandwidth_bps[here], share_R[:, None]), share_R)
    for machine in range(len(network.regions), len(regions)):
        latency_RR[machine, machine], bandwidth_RR[machine, machine] = latency_s, bandwidth_bps
    return Network(tuple(devices), tuple(regions), latency_RR, bandwidth_RR, tuple(places))


def _devices(group: Mapping[str, Any], region: int) -> list[Device]:
    flops_per_s = group["tflops"] * 1e12 * group.get("speed", 1.0)
    memory_bytes = group.get("memory_gb", math.inf) * 1e9
    limits = [group.get(key, math.inf) * 1e6 for key in ("upload_mbps", "download_mbps")]
    names = [f"{group['name']}-{i}" for i in range(group.get("count", 0))] or [group["name"]]
    return [Device(each, region, flops_per_s, memory_bytes, *limits) for each in names]


def _lines(
    tables: Mapping[str, Any], regions: tuple[str, ...], members: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[R, R] one-way latencies in s and bandwidths in bit/s; `members` is [R], devices of a region."""
    size = len(regions)
    latency_s, bandwidth_bps = np.zeros((size, size)), np.full((size, size), np.nan)

    def put(a: int, b: int, line: Mapping[str, Any]) -> None:
        latency_s[a, b] = latency_s[b, a] = line["latency_ms"] / 1e3
        bandwidth_bps[a, b] = bandwidth_bps[b, a] = line["bandwidth_mbps"] * 1e6

    if tables.get("inside"):
        inside = _checked(tables["inside"], _LINE, "[inside]", needed=_LINE)
        for region in range(size):
            put(region, region, inside)
    given: dict[tuple[int, int], str] = {}
    for number, link in enumerate(tables.get("links", [])):
        ends = link.get("between")
        where = f"[[links]] {' - '.join(ends) if _ENDS.accepts(ends) else number + 1}"
        line = _checked(link, _LINK, where, needed=_LINK)
        for end in ends:
            if end not in regions:
                raise SetupError(f"{where}: no device is in {end!r}{did_you_mean(end, regions)}")
        a, b = sorted(regions.index(end) for end in ends)
        if (a, b) in given:
            raise SetupError(f"{where} is given twice (also as {given[a, b]}): a line is the same both ways")
        given[a, b] = where
        put(a, b, line)
    for a, b in np.argwhere(np.isnan(bandwidth_bps)):
        if a != b:
            raise SetupError(
                f"{regions[a]!r} cannot be reached from {regions[b]!r}: no [[links]] has between = "
                f'["{regions[a]}", "{regions[b]}"]'
            )
        if members[a] > 1:
            raise SetupError(
                f"nothing is said of the line between two devices in {regions[a]!r}: add [inside] with "
                "latency_ms and bandwidth_mbps"
            )
        bandwidth_bps[a, a] = np.inf  # no two devices are there
    return latency_s, bandwidth_bps


def _checked(
    table: Mapping[str, Any], rules: Mapping[str, Rule], where: str, *, needed: Collection[str] = ()
) -> dict[str, Any]:
    """The values of a table in their canonical form."""
    checked = dict[str, Any]()
    for name, value in table.items():
        if name not in rules:
            hint, known = did_you_mean(name, rules), ", ".join(rules)
            raise SetupError(f"{name[:80]} in {where}: unknown key{hint}; it takes {known}")
        try:
            checked[name] = rules[name].check(value)
        except ValueError:
            why = f"it must be {rules[name].allowed}"
            raise SetupError(f"{name} = {shown(value)} in {where}: {why}") from None
    for name in needed:
        if name not in checked:
            raise SetupError(f"{name} is missing in {where}: it must be {rules[name].allowed}")
    return checked
