"""Single stories, each once found by a random schedule or thought of, told to the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.sim.check import Checks
from swarm.sim.clock import Clock
from swarm.sim.dice import Dice
from swarm.sim.network import Lines, Network
from swarm.sim.peer import Shelf, StagePeer
from swarm.sim.terms import Directory, Terms
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

    def add_peer(self, name: str, stage: int) -> StagePeer:
        peer = StagePeer(
            self.clock, name, stage, self.terms, self.network, self.directory, self.checks, self.shelf,
            self.dice, None, compute_s=0.01, max_inflight=4,
        )  # fmt: skip
        self.peers[name] = peer
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
