"""Single stories, each once found by a random schedule or thought of, told to the end."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from swarm.sim.check import Checks
from swarm.sim.clock import Clock
from swarm.sim.dice import Dice
from swarm.sim.network import Lines, Network
from swarm.sim.paused import PausedPeer, Snapshot
from swarm.sim.peer import StagePeer
from swarm.sim.terms import Directory, Shelf, Terms
from swarm.sim.trainer import Trainer


@dataclass
class Story:
    """A swarm without chance but for the delays of messages."""

    terms: Terms
    clock: Clock = field(default_factory=Clock)
    peers: dict[str, StagePeer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = Dice(1)
        self.network = Network(self.clock, self.dice, Lines())
        self.directory = Directory(self.clock)
        self.checks = Checks(self.terms)
        self.shelf = Shelf(self.terms.stages)

    def make_peer(self, name: str, stage: int, kept: Snapshot | None = None) -> StagePeer:
        peer = StagePeer(
            self.clock, name, stage, self.terms, self.network, self.directory, self.checks, self.shelf,
            self.dice, None, compute_s=0.01, max_inflight=4, kept=kept,
        )  # fmt: skip
        self.peers[name] = peer
        return peer

    def add_peer(self, name: str, stage: int) -> StagePeer:
        peer = self.make_peer(name, stage)
        peer.start()
        return peer

    def add_trainer(self, name: str = "t") -> Trainer:
        trainer = Trainer(
            self.clock, name, self.terms, self.network, self.directory,
            lambda t: range(self.terms.microbatches), window=None,
        )  # fmt: skip
        trainer.start()
        return trainer

    def kill(self, name: str) -> None:
        self.network.kill(name, quietly=False)
        self.directory.died(name, forgotten_s=20.0)

    def until_version(self, name: str, version: int) -> None:
        peer = self.peers[name]
        assert self.clock.run(until=lambda: peer.version >= version, limit_s=self.clock.now + 60.0)

    def finishes(self, within_s: float) -> bool:
        """Whether every living peer takes all steps."""
        steps = self.terms.steps
        return self.clock.run(
            until=lambda: all(p.version == steps for p in self.peers.values() if p.alive),
            limit_s=self.clock.now + within_s,
        )


def test_a_member_that_slept_while_its_mate_took_many_steps_and_died() -> None:
    """It holds the gradient of a step whose go nobody remembers: it must not wait for that."""
    story = Story(Terms(stages=2, microbatches=2, steps=12))
    story.add_peer("awake", 0)
    sleeper = story.add_peer("sleeper", 0)
    story.add_peer("other", 1)

    def sleep(peer: StagePeer, point: str) -> None:
        if point == "prepared" and not sleeper.stopped and sleeper.version == 0:
            story.network.stop("sleeper")

    sleeper.at_point = sleep
    story.add_trainer()
    story.until_version("awake", 6)
    assert sleeper.stopped and sleeper.version == 0
    story.kill("awake")
    sleeper.go_on()
    assert story.finishes(within_s=60.0)
    assert sleeper.era.number == 1


def test_a_trainer_alone_remembers_how_far_the_run_was() -> None:
    story = Story(Terms(stages=2, microbatches=2, steps=4))
    story.add_peer("a", 0)
    story.add_peer("b", 1)
    story.add_trainer()
    story.until_version("a", 2)
    story.kill("a")
    story.kill("b")
    story.add_peer("c", 0)
    story.add_peer("d", 1)
    assert story.finishes(within_s=60.0)


@pytest.mark.parametrize(("steps_away", "asked"), [(0, []), (1, ["held"]), (2, ["state"])])
def test_who_resumes_takes_only_what_its_state_lacks(steps_away: int, asked: list[str]) -> None:
    story = Story(Terms(stages=2, microbatches=2, steps=steps_away))
    paused: list[PausedPeer] = []
    story.add_peer("awake", 0)
    peer = story.add_peer("paused", 0)
    story.add_peer("other", 1)

    def is_paused(kept: Snapshot | None) -> None:
        network, directory, shelf = story.network, story.directory, story.shelf
        paused.append(PausedPeer(story.clock, "paused", 0, kept, network, directory, shelf))

    assert story.clock.run(until=lambda: peer.joined, limit_s=5.0)
    peer.pause(is_paused)
    assert story.clock.run(until=lambda: bool(paused), limit_s=10.0)
    assert [at for at, _ in story.shelf.pinned.values()] == [0] and not peer.alive
    if steps_away:
        story.add_trainer()
        story.until_version("awake", steps_away)
    calls: list[str] = []
    again = story.make_peer("paused", 0, kept=paused[0].kept)
    call = again.call
    again.call = lambda to, method, *rest: calls.append(method) or call(to, method, *rest)  # type: ignore
    again.start()
    assert story.clock.run(until=lambda: again.joined, limit_s=story.clock.now + 20.0)
    assert again.version == steps_away and not story.shelf.pinned
    assert [method for method in calls if method in ("held", "state")] == asked
