"""A coordinator alone replaces no replica's weights (attack 1, by a peer that has worked for it)."""

from __future__ import annotations

from swarm.ids import Generation, PeerId, Position
from swarm.protocol.rollback import ReplicaState, bearers

VOICE = {"ann": 40, "bob": 40, "cid": 40, "liar": 100}
HERE, NEXT = Position(Generation(), 5), Position(Generation(), 6)


def told(**digests: str) -> dict[PeerId, ReplicaState]:
    return {peer: ReplicaState(HERE, digest, "cpu") for peer, digest in digests.items()}


def followed(
    goal: Position,
    digest: str,
    others: dict[PeerId, ReplicaState],
    *,
    mine: str = "true",
    proven: bool = False,
    voice: dict[PeerId, int] | None = None,
) -> list[PeerId]:
    own = ReplicaState(HERE, mine, "cpu")
    return bearers(goal, digest, own, others, voice or VOICE, me="ann", is_proven=proven)


def test_one_with_other_weights_moves_nobody() -> None:
    assert followed(HERE, "made up", told(bob="true", cid="true", liar="made up")) == []


def test_a_replica_with_other_weights_than_most_takes_theirs_from_those_that_have_them() -> None:
    others = told(bob="true", cid="true", liar="made up")
    equal = dict.fromkeys(VOICE, 40)
    assert followed(HERE, "true", others, mine="broken", voice=equal) == ["bob", "cid"]


def test_a_digest_of_another_kind_of_device_speaks_against_nothing() -> None:
    others = told(bob="true", dan="true") | {"cid": ReplicaState(HERE, "other bits", "cuda")}
    equal = dict.fromkeys(("ann", "bob", "cid", "dan"), 40)
    assert followed(HERE, "true", others, mine="broken", voice=equal) == ["bob", "dan"]


def test_one_with_more_voice_than_all_others_together_moves_nobody_alone() -> None:
    little = {"ann": 20, "bob": 20, "cid": 20, "liar": 100}
    assert followed(HERE, "made up", told(bob="true", cid="true", liar="made up"), voice=little) == []
    ahead = told(bob="true", cid="true") | {"liar": ReplicaState(NEXT, "made up", "cpu")}
    assert followed(NEXT, "made up", ahead, voice=little) == []


def test_of_two_replicas_each_believes_the_other_that_coordinates() -> None:
    """What is left: it cannot know which of them is right."""
    two = {"ann": 40, "liar": 40}
    assert followed(HERE, "made up", told(liar="made up"), voice=two) == ["liar"]


def test_a_version_that_nobody_else_has_is_followed_if_its_step_is_proven() -> None:
    others = told(bob="true", cid="true") | {"liar": ReplicaState(NEXT, "", "cpu")}
    assert followed(NEXT, "", others) == []
    assert followed(NEXT, "", others, proven=True) == ["liar"]


def test_a_proven_step_lends_no_weights_to_one_that_others_contradict() -> None:
    others = {
        "bob": ReplicaState(NEXT, "true", "cpu"), "cid": ReplicaState(NEXT, "true", "cpu"),
        "liar": ReplicaState(NEXT, "made up", "cpu"),
    }  # fmt: skip
    equal = dict.fromkeys(VOICE, 40)
    assert followed(NEXT, "made up", others, proven=True, voice=equal) == []
    assert followed(NEXT, "true", others, voice=equal) == ["bob", "cid"]


def test_where_most_have_taken_a_step_nothing_else_proves_it() -> None:
    others = {"bob": ReplicaState(NEXT, "true", "cpu"), "cid": ReplicaState(NEXT, "true", "cpu")}
    assert followed(NEXT, "true", others) == ["bob", "cid"]


def test_of_strangers_nothing_is_heard_where_any_has_voice() -> None:
    others = told(bob="true") | {f"z{number}": ReplicaState(HERE, "made up", "cpu") for number in range(9)}
    assert followed(HERE, "made up", others) == []
    assert followed(HERE, "made up", others, voice={"nobody": 1}) != [], "all count alike"


def test_two_liars_of_five_replace_nothing() -> None:
    five = dict.fromkeys(("ann", "bob", "cid", "liar", "other"), 40)
    others = told(bob="true", cid="true", liar="made up", other="made up")
    assert followed(HERE, "made up", others, voice=five) == []
