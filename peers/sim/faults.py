"""What goes wrong, and when: kinds of faults, and a schedule of them drawn from a seed.

A kind is a function that does it to a swarm, or to one of those that it can hit. Its docstring is its
description.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from peers.sim.dice import Dice
from peers.sim.disks import Disk, Tear
from peers.sim.loop import PROCESS, WORLD, Killed, Process
from peers.sim.swarm import KeeperMember, Member, PeerMember, Swarm, TrainerMember
from swarm.ids import PeerId, Stage

POINTS = ("forward", "backward", "frozen", "reduce", "prepared", "took", "joining", "leaving")
"""Moments in the life of a stage peer at which a fault hurts most: `peers.fault_points`."""
MEETING_POINTS = ("meeting", "encoded", "given", "gathered", "summed", "kept")
"""Those of islands."""


class Fault(NamedTuple):
    """`kind` at time `at_s`; `lasts_s` for those that end; `which` picks among those that it can hit."""

    at_s: float
    kind: str
    which: float
    lasts_s: float
    point: str = ""
    number: int = 0
    """`kill at`: which time that a peer comes to the point."""

    def words(self) -> str:
        """For a timeline."""
        at = f" {self.point!r}, time {self.number}" if self.kind.endswith(" at") else ""
        return f"{self.at_s:.3f} s: {self.kind}{at} (which {self.which:.3f}, lasts {self.lasts_s:.2f} s)"


Happen = Callable[..., "bool | None"]
"""Given the swarm, the fault, and the one that it hits, if it hits one. False: there was nothing to hit, or
it waits for its moment."""
H = TypeVar("H", bound=Happen)


class Kind(NamedTuple):
    weight: int
    """Among all that a swarm can have."""
    happen: Happen
    among: Callable[[Swarm], Sequence[Any]] | None
    """Those of which it hits one."""
    needs: str
    """A member of `Setting.has`."""


KINDS: dict[str, Kind] = {}


def _kind(
    weight: int, among: Callable[[Swarm], Sequence[Any]] | None = None, *, needs: str = "peers"
) -> Callable[[H], H]:
    """Add a kind, named by its function."""

    def add(happen: H) -> H:
        KINDS[happen.__name__.replace("_", " ")] = Kind(weight, happen, among, needs)
        return happen

    return add


def inject(swarm: Swarm, fault: Fault) -> None:
    """Let a fault happen, and count it if it did."""
    kind = KINDS[fault.kind]
    if kind.among is None:
        happened = kind.happen(swarm, fault)
    else:
        hit = swarm.pick(kind.among(swarm), fault.which)
        happened = hit is not None and kind.happen(swarm, fault, hit)
    if happened is not False:
        swarm.injected[fault.kind] += 1


def _later(
    swarm: Swarm, after_s: float, text: str, do: Callable[..., object], *args: Any, of: Member | None = None
) -> None:
    """Say and do what ends a fault; `of`: if that process is alive."""

    def end() -> None:
        if of is None or of.process.alive:
            swarm.say(f"*** {text}")
            do(*args)

    swarm.loop.call_later(after_s, end)


# --- which it can hit ---------------------------------------------------------------------------------------


def _mortal(swarm: Swarm) -> list[PeerMember]:
    """Peers that have a replica."""
    there = swarm.staying()
    return [*swarm.safe(), *(m for m in swarm.living() if m.serving is None and there[m.stage])]


def _serving(swarm: Swarm) -> list[PeerMember]:
    return [m for m in swarm.living() if m.serving]


def _steady(swarm: Swarm) -> list[PeerMember]:
    """Peers that have a replica, and mean to stay."""
    return [m for m in swarm.safe() if m.stays]


def _everybody(swarm: Swarm) -> list[Member]:
    return [m for m in swarm.members() if m.alive]


def _keepers(swarm: Swarm) -> list[KeeperMember]:
    return [m for m in swarm.keepers if m.alive]


# --- processes end and stand still --------------------------------------------------------------------------


@_kind(8, _mortal)
def kill(swarm: Swarm, _: Fault, member: PeerMember) -> None:
    """A peer that has a replica dies; its connections break."""
    swarm.kill(member)


@_kind(7, _mortal)
def cut_power(swarm: Swarm, _: Fault, member: PeerMember) -> None:
    """The same, but no process is told."""
    swarm.kill(member, quietly=True)


@_kind(6)
def kill_at(swarm: Swarm, fault: Fault) -> bool:
    """The same, at one of `POINTS`."""

    def happens(process: Process) -> None:
        member = next((m for m in swarm.safe() if m.process is process), None)
        if member is not None:
            swarm.injected["kill at"] += 1
            swarm.say(f"*** at the point {fault.point!r}:")
            swarm.kill(member, quietly=swarm.dice.chance(0.3))
            raise Killed

    swarm.at_point(fault.point, fault.number, happens)
    return False


@_kind(3)
def lose_stage_at(swarm: Swarm, fault: Fault) -> bool:
    """When a peer has the whole gradient of a step, or has taken it, all of another stage die."""

    def happens(process: Process) -> None:
        member = next((m for m in swarm.living() if m.process is process), None)
        others = sorted({m.stage for m in _serving(swarm) if member and m.stage != member.stage})
        stage = swarm.pick(others, fault.which)
        if stage is not None:
            swarm.injected["lose stage at"] += 1
            _lose(swarm, stage, fault.lasts_s / 2)

    swarm.at_point("took" if fault.number % 2 else "prepared", fault.number, happens)
    return False


@_kind(5, lambda swarm: [m for m in swarm.living() if not m.process.stopped])
def stop(swarm: Swarm, fault: Fault, member: PeerMember) -> None:
    """SIGSTOP, and SIGCONT some seconds later."""
    swarm.say(f"*** {member.name} is stopped for {fault.lasts_s:.1f} s")
    swarm.network.stop(member.name)
    _later(swarm, fault.lasts_s, f"{member.name} goes on", swarm.network.go_on, member.name, of=member)


# --- lines and directory ------------------------------------------------------------------------------------


def _side(swarm: Swarm, fault: Fault) -> list[PeerId]:
    """Some of all processes, but not all."""
    names = sorted(m.name for m in _everybody(swarm))
    return swarm.dice.shuffled(names)[: 1 + int(fault.which * (len(names) - 1))] if len(names) > 1 else []


@_kind(6)
def cut(swarm: Swarm, fault: Fault, *, one_way: bool = False) -> bool:
    """Some of all are cut off from the rest, and come back some seconds later: half of them as after a long
    time, when their records have run out.
    """
    side, forgotten = _side(swarm, fault), not one_way and int(1000 * fault.which) % 2 == 1
    if not side:
        return False
    how = "reach none of the rest" if one_way else "are cut off" + " and forgotten" * forgotten
    swarm.say(f"*** {', '.join(sorted(side))} {how} for {fault.lasts_s:.1f} s")
    number = swarm.network.cut(side, one_way=one_way)
    if forgotten:
        _cut_off(swarm, side, fault.lasts_s)
        for peer in side:
            swarm.dht.forget(peer)
    _later(swarm, fault.lasts_s, "the cut is healed", swarm.network.heal, number)
    return True


@_kind(2)
def cut_one_way(swarm: Swarm, fault: Fault) -> bool:
    """What some of all send does not reach the rest, for some seconds."""
    return cut(swarm, fault, one_way=True)


@_kind(2)
def cut_off(swarm: Swarm, fault: Fault) -> bool:
    """Some of all do not reach the directory, for some seconds."""
    side = _side(swarm, fault)
    if not side:
        return False
    swarm.say(f"*** {', '.join(sorted(side))} reach no node of the DHT for {fault.lasts_s:.1f} s")
    _cut_off(swarm, side, fault.lasts_s)
    return True


def _cut_off(swarm: Swarm, side: Sequence[PeerId], lasts_s: float) -> None:
    swarm.dht.cut_off.update(side)
    swarm.loop.call_later(lasts_s, swarm.dht.cut_off.difference_update, side)


# --- members come, go and change ----------------------------------------------------------------------------


@_kind(5, _steady)
def leave(swarm: Swarm, _: Fault, member: PeerMember) -> None:
    """A peer drains, waits for the step that it has a share of, and goes."""
    swarm.say(f"*** {member.name} of stage {member.stage} is told to leave")
    member.told_to_leave = True  # a stopped process hears of it later
    swarm.loop.call_soon(member.owner.leave, context=member.process.context)


@_kind(40, needs="crowd")
def rush(swarm: Swarm, fault: Fault) -> None:
    """The next replicas that have something in their sums leave, one after the other, and others come."""

    def happens(process: Process) -> None:
        member = next((m for m in _steady(swarm) if m.process is process), None)
        if member is not None:
            leave(swarm, fault, member)

    for _ in range(3):
        swarm.at_point("backward", fault.number, happens)
    join(swarm, fault)


@_kind(6)
def join(swarm: Swarm, fault: Fault) -> None:
    """A newcomer downloads the state of a stage and serves."""
    member = swarm.add_peer(int(fault.which * swarm.run.cells))
    swarm.say(f"*** {member.name} joins stage {member.stage}")


@_kind(4, _serving)
def lose_sum(_: Swarm, __: Fault, member: PeerMember) -> None:
    """A backward breaks half-way and takes the peer's sum with it."""
    member.served.compute.breaks += 1


@_kind(5, lambda swarm: [t for t in swarm.trainers if t.alive])
def kill_trainer(swarm: Swarm, fault: Fault, trainer: TrainerMember) -> None:
    """A trainer dies, and another one comes later."""
    swarm.say(f"*** trainer {trainer.name} dies")
    swarm.network.kill(trainer.name, quietly=False)
    swarm.loop.call_later(fault.lasts_s, swarm.add_trainer)


@_kind(4)
def storm(swarm: Swarm, fault: Fault) -> None:
    """For up to a second half of all messages are lost, doubled or late."""
    network = swarm.network

    def end() -> None:
        network.lines = network.calm

    swarm.say("*** a storm begins")
    network.lines = replace(network.calm, lost=0.2, doubled=0.15, late=0.15)
    _later(swarm, min(1.0, fault.lasts_s), "the storm is over", end)


@_kind(3)
def lose_stage(swarm: Swarm, fault: Fault) -> None:
    """All peers of a stage die at once; others come from a checkpoint, or from nothing."""
    _lose(swarm, int(fault.which * swarm.run.cells), fault.lasts_s / 2)


def _lose(swarm: Swarm, stage: Stage, after_s: float) -> None:
    swarm.say(f"*** all of stage {stage} die")
    disk = None
    for member in _serving(swarm):
        if member.stage == stage:
            swarm.kill(member)
            disk = member.disk
    swarm.loop.call_later(after_s, swarm.add_peer, stage, disk, context=WORLD)


@_kind(3, _serving)
def restart(swarm: Swarm, fault: Fault, member: PeerMember) -> None:
    """A peer dies and comes back with its disk, which may be that of the last one of its stage."""
    swarm.restart(member, fault.lasts_s / 2)


@_kind(12, needs="disks")
def blackout(swarm: Swarm, fault: Fault) -> bool:
    """Some steps later all peers and keepers die at once, and come back one by one with their disks."""

    def happens(_: Process) -> None:
        swarm.injected["blackout"] += 1
        swarm.say("*** the power fails everywhere")
        for member in (*swarm.living(), *_keepers(swarm)):
            swarm.restart(member, swarm.dice.between(0.1, fault.lasts_s))
        raise Killed

    swarm.at_point("took", 3 * fault.number, happens)
    return False


@_kind(14, _keepers, needs="keeper")
def restart_keeper(swarm: Swarm, fault: Fault, member: KeeperMember) -> None:
    """A keeper dies and comes back with its disk."""
    swarm.restart(member, fault.lasts_s / 2)


@_kind(7, lambda swarm: [m for m in _serving(swarm) if not m.served.peer.core.leaving])
def pause(swarm: Swarm, fault: Fault, member: PeerMember) -> None:
    """The owner of a peer wants its device for a while, whatever other peers there are."""
    soon = partial(swarm.loop.call_soon, context=member.process.context)
    swarm.say(f"*** the owner of {member.name} wants its device for {fault.lasts_s:.1f} s")
    soon(member.owner.pause, "by hand", "the owner wants it")
    back = f"the owner of {member.name} gives its device back"
    _later(swarm, fault.lasts_s, back, soon, member.owner.resume, "by hand", of=member)


@_kind(4, lambda swarm: _steady(swarm) if swarm.run.cells > 1 else ())
def move(swarm: Swarm, fault: Fault, member: PeerMember) -> None:
    """A peer that has a replica goes to another stage."""
    to = (member.stage + 1 + int(fault.which * 97) % (swarm.run.cells - 1)) % swarm.run.cells
    swarm.say(f"*** {member.name} moves from stage {member.stage} to {to}")
    member.process.spawn(swarm.loop, member.served.peer.moving.move(to, why="a fault", going=set()))


# --- machines -----------------------------------------------------------------------------------------------


@_kind(2, Swarm.living)
def wrong_clock(swarm: Swarm, fault: Fault, member: PeerMember) -> None:
    """The wall clock of a peer jumps by up to an hour, and perhaps back."""
    error_s = (fault.lasts_s - 3.5) * 1000
    swarm.say(f"*** the clock of {member.name} jumps by {error_s:.0f} s")
    member.process.clock_error_s += error_s
    if fault.lasts_s < 1.0:
        right = f"the clock of {member.name} is right again"
        _later(swarm, fault.lasts_s, right, setattr, member.process, "clock_error_s", 0.0)


@_kind(3, _everybody)
def slow_threads(swarm: Swarm, fault: Fault, member: Member) -> None:
    """What a process gives to worker threads (disk, hashes) takes up to seconds longer, for a while."""
    swarm.say(f"*** the threads of {member.name} are slow for {fault.lasts_s:.1f} s")
    member.process.slow_s = fault.lasts_s / 2
    swarm.loop.call_later(fault.lasts_s, setattr, member.process, "slow_s", 0.0)


@_kind(10, lambda swarm: swarm.disks.all, needs="disks")
def fill_disk(swarm: Swarm, fault: Fault, disk: Disk) -> None:
    """A disk has no room for another file, for some seconds."""
    swarm.say(f"*** the disk {disk.folder.name} is full for {fault.lasts_s:.1f} s")
    disk.full = True
    swarm.loop.call_later(fault.lasts_s, setattr, disk, "full", False)


def _used_disks(swarm: Swarm) -> list[Disk]:
    return [m.disk for m in (*swarm.living(), *_keepers(swarm)) if m.disk is not None]


@_kind(12, _used_disks, needs="disks")
def tear_file(swarm: Swarm, fault: Fault, disk: Disk) -> None:
    """A process dies while it writes a file, of which a part may be there; it comes back with its disk."""

    def die() -> None:
        process = PROCESS.get()
        writer = next(m for m in (*swarm.peers, *swarm.keepers) if m.process is process)
        swarm.say(f"*** while {writer.name} writes a file:")
        swarm.restart(writer, fault.lasts_s / 2)

    kept = 1.0 if fault.number == 1 else swarm.dice.number()
    disk.tear = Tear(kept, renamed=fault.number < 4, kill=die)


@_kind(1, Swarm.safe)
def device_hangs(swarm: Swarm, fault: Fault, member: PeerMember) -> None:
    """A job never ends; the peer still says that it lives, until it is stopped by hand."""
    swarm.say(f"*** the device of {member.name} hangs; it is killed {fault.lasts_s:.1f} s later")
    member.served.device.hangs = True
    swarm.loop.call_later(fault.lasts_s, lambda: member.alive and swarm.kill(member))


@_kind(1, Swarm.safe)
def device_dies(swarm: Swarm, _: Fault, member: PeerMember) -> None:
    """Each job fails."""
    swarm.say(f"*** the device of {member.name} dies")
    member.served.device.dies = True


# --- the schedule -------------------------------------------------------------------------------------------


def calm(swarm: Swarm) -> None:
    """From here on nothing fails."""
    for disk in swarm.disks.all:
        disk.full, disk.tear = False, None
    swarm.say("*** from here on nothing fails")
    swarm.points.clear()
    swarm.network.calm = swarm.network.lines = replace(swarm.network.calm, lost=0.0, doubled=0.0, late=0.0)
    swarm.dht.cut_off.clear()
    for member in swarm.members():
        member.process.slow_s = 0.0
        if isinstance(member, PeerMember) and member.serving is not None:
            member.serving.compute.breaks = 0


def schedule(dice: Dice, has: Collection[str], *, most: int, within_s: float) -> list[Fault]:
    """Up to `most` faults of a swarm that `has` what their kinds need, by time."""
    bag = [name for name, kind in KINDS.items() if kind.needs in has for _ in range(kind.weight)]
    points = POINTS + MEETING_POINTS if "islands" in has else POINTS
    count = dice.below(most + 1)
    faults = [
        Fault(
            at_s=dice.between(0.0, within_s),
            kind=dice.pick(bag),
            which=dice.number(),
            lasts_s=dice.between(0.2, 1.0) if dice.chance(0.4) else dice.between(1.0, 7.0),
            point=dice.pick(points),
            number=1 + dice.below(4),
        )
        for _ in range(count)
    ]
    return sorted(faults)
