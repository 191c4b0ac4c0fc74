"""Charters: who may take part in a run, what is signed, and what strangers' bytes come to."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.net.charter import signed
from peers.net.charter.doorkeeper import MAX_SHOWN, Doorkeeper
from peers.net.identity import Identity
from peers.net.signed_records import MAX_SIGNED_BYTES, open_record, seal_record
from swarm import charter as rules
from swarm.charter import (
    MAX_CHARTER_BYTES,
    MAX_LIFE_S,
    MAX_USES,
    AdmissionRule,
    AdmissionTerms,
    Applicant,
    Ban,
    Charter,
    Credential,
    Token,
    TokenUses,
)
from swarm.errors import Refused, SetupError
from swarm.ids import RunName, fingerprint_of
from swarm.records import NO_STAGE, PeerRecord, Voucher

NOW = 1_800_000_000.0
RUN, OTHER_RUN = "ab" * 16, "cd" * 16
OWNER, THIEF, PETER, TINA, KIM, SAM = (Identity(bytes([n]) * 32) for n in range(1, 7))
DAY = 86_400


def charter(**changes: Any) -> Charter:
    fields = {"name": "demo", "run": RUN, "sequence": 1, "expires": int(NOW) + 20 * DAY}
    return rules.make(**(fields | changes))


def why(who: Identity, role: rules.Role = "peer", **changes: Any) -> str:
    """Why not, by the charter with these changes; empty if it is admitted."""
    more = {
        name: changes.pop(name) for name in ("trainers_of_manifest", "revoked", "stages") if name in changes
    }
    candidate = {name: changes.pop(name) for name in ("credential", "stage") if name in changes}
    uses, now = changes.pop("uses", TokenUses()), changes.pop("now", NOW)
    terms = AdmissionTerms(
        charter(**changes),
        OWNER.peer_id,
        stages=more.get("stages", 3),
        trainers=more.get("trainers_of_manifest", ()),
        revoked=frozenset(more.get("revoked", ())),
    )
    return rules.why_not_admitted(terms, Applicant(who.peer_id, role, **candidate), uses, now=now)


# --- names --------------------------------------------------------------------------------------------------


def test_a_run_is_called_by_its_name_and_100_bits_of_its_owner() -> None:
    fingerprint = fingerprint_of(OWNER.peer_id)
    assert len(fingerprint.replace("-", "")) * 5 == 100
    assert fingerprint != fingerprint_of(THIEF.peer_id)
    name = RunName("my run", fingerprint)
    assert str(name) == f"my run@{fingerprint}"
    for text in (str(name), str(name).replace("-", ""), f"my run@{fingerprint.upper()}"):
        assert RunName.parse(text) == name


@pytest.mark.parametrize(
    "text", ["", "demo", "demo@", "@" + "a" * 20, "demo@" + "a" * 19, "demo@" + "1" * 20]
)
def test_what_is_no_name_of_a_run_is_none(text: str) -> None:
    assert RunName.parse(text) is None


# --- charters as bytes --------------------------------------------------------------------------------------

_peers = st.sampled_from([one.peer_id for one in (OWNER, THIEF, PETER, TINA, KIM, SAM)])
_rules = st.builds(
    AdmissionRule, st.sampled_from(["open", "list", "token"]), st.lists(_peers, max_size=4).map(tuple)
)
_charters = st.builds(
    charter,
    sequence=st.integers(1, 2**40),
    peers=_rules,
    trainers=_rules,
    keepers=_rules,
    work_bits=st.integers(0, 40),
    founders=st.lists(_peers, max_size=4),
    trusted_stages=st.lists(st.integers(-5, 5), max_size=4),
    bans=st.lists(st.builds(Ban, _peers, st.text(max_size=20)), max_size=4, unique_by=lambda ban: ban.peer),
    revocations=st.lists(_peers, max_size=4),
)


@given(_charters, st.data())
def test_a_charter_comes_back_from_its_bytes_and_no_other_bytes_are_it(some: Charter, data: Any) -> None:
    packed = rules.encode(some)
    assert rules.decode(packed) == some
    place, bit = data.draw(st.integers(0, len(packed) - 1)), data.draw(st.integers(0, 7))
    other = packed[:place] + bytes([packed[place] ^ 1 << bit]) + packed[place + 1 :]
    with contextlib.suppress(Refused):
        assert rules.decode(other) != some
    for wrong in (packed[:-1], packed + b"\0"):
        with pytest.raises(Refused):
            rules.decode(wrong)


@given(st.binary(max_size=300))
def test_strangers_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    for opened in (
        lambda: rules.decode(data),
        lambda: signed.open_statement(data, OWNER.peer_id),
    ):
        with pytest.raises(Refused):
            opened()
    with contextlib.suppress(Refused):
        assert signed.open_credential(data, RUN, OWNER.peer_id, PETER.peer_id).token is None


def test_a_charter_that_is_too_large_or_not_canonical_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match=f"a charter of 16001 bytes; at most {MAX_CHARTER_BYTES} are allowed"):
        rules.decode(bytes(MAX_CHARTER_BYTES + 1))
    packed = rules.encode(charter(founders=(PETER.peer_id, TINA.peer_id)))
    first, second = sorted(one.peer_id.encode() for one in (PETER, TINA))
    swapped = packed.replace(first, b"x").replace(second, first).replace(b"x", second)
    with pytest.raises(Refused, match="malformed charter: a set that is not sorted"):
        rules.decode(swapped)
    long_number = packed.replace(b"\x01\xce", b"\xcc\x01\xce", 1)  # the sequence, in two bytes
    assert long_number != packed
    with pytest.raises(Refused, match="not in canonical form"):
        rules.decode(long_number)


@pytest.mark.parametrize(
    ("expires", "text"),
    [
        (NOW, "the charter of 'demo' has expired: its owner has to sign another one \\(swarm charter\\)"),
        (NOW + MAX_LIFE_S + 2 * 3600, "wants to hold for more than 30 days"),
    ],
)
def test_a_charter_holds_for_thirty_days_at_most(expires: float, text: str) -> None:
    assert re.search(text, rules.why_not_held(charter(expires=int(expires)), now=NOW))
    assert not rules.why_not_held(charter(expires=int(NOW) + 1), now=NOW)


def test_the_higher_sequence_holds_and_of_two_alike_all_take_the_same() -> None:
    first, second = charter(), charter(sequence=2)
    assert second.rank > first.rank
    forked = charter(sequence=2, work_bits=5)
    assert (forked.rank > second.rank) != (second.rank > forked.rank)


def test_the_next_charter_has_the_next_number_and_a_new_term() -> None:
    old = charter(bans=(Ban(SAM.peer_id, "x"),))
    new = rules.succeed(old, now=NOW + DAY, days=2, work_bits=7)
    assert (new.sequence, new.expires, new.work_bits, new.bans) == (2, int(NOW) + 3 * DAY, 7, old.bans)
    with pytest.raises(SetupError, match=r"this cannot be a charter: .*at most 16000 are allowed"):
        many = [Identity(n.to_bytes(32, "big")).peer_id for n in range(300)]
        rules.succeed(old, now=NOW, founders=many[:299], revocations=many)
    with pytest.raises(
        SetupError, match="this cannot be a charter: a malformed charter: Expected `int` <= 40"
    ):
        rules.succeed(old, now=NOW, work_bits=41)


def test_a_ban_is_added_once_and_lifted_once() -> None:
    bans = rules.ban(charter(), SAM.peer_id, "wrong\ngradients" + "!" * 200)
    assert bans[0].peer == SAM.peer_id
    assert bans[0].why.startswith("wrong?gradients!!")
    assert len(bans[0].why) == 100
    banned = charter(bans=bans)
    with pytest.raises(SetupError, match=f"{SAM.peer_id} is banned already: swarm charter shows why"):
        rules.ban(banned, SAM.peer_id, "again")
    assert rules.unban(banned, SAM.peer_id) == ()
    with pytest.raises(SetupError, match=f"{SAM.peer_id} is not banned: swarm charter lists who is"):
        rules.unban(charter(), SAM.peer_id)


# --- who may be what ----------------------------------------------------------------------------------------


def invitation(role: rules.Role = "peer", uses: int = 1, expires: float = NOW + DAY) -> Credential:
    return Credential(Token("token", role, expires, uses))


def test_by_default_all_may_serve_and_keep_and_only_the_named_train() -> None:
    assert why(PETER) == why(PETER, "keeper") == ""
    assert (
        why(PETER, "trainer")
        == "the run's charter names its trainers, and this is none of them: ask the owner"
    )
    named = AdmissionRule("list", (TINA.peer_id,))
    assert why(TINA, "trainer", trainers=named) == ""
    assert why(OWNER, "trainer", trainers=named) == "", "the owner may be all"


def test_a_list_admits_those_that_it_names_and_no_token() -> None:
    closed = AdmissionRule("list", (PETER.peer_id,))
    assert why(PETER, peers=closed) == ""
    assert "names its peers" in why(KIM, peers=closed)
    assert "names its peers" in why(KIM, peers=closed, credential=invitation())
    assert why(KIM, peers=closed, founders=(KIM.peer_id,)) == "", "founders are vouched for"
    assert "names its keepers" in why(KIM, "keeper", keepers=closed, founders=(KIM.peer_id,))


@pytest.mark.parametrize(
    ("credential", "text"),
    [
        (Credential(), "it has no token: ask the owner for one \\(swarm invite\\), and give it as --token"),
        (invitation("keeper"), "its token is for a keeper"),
        (invitation(expires=NOW), "its token has expired: ask the owner for another one"),
        (Credential(stamp_bits=40), "it has no token"),
    ],
)
def test_a_run_for_the_invited_says_what_is_wrong_with_others(credential: Credential, text: str) -> None:
    import re

    found = why(KIM, peers=AdmissionRule("token"), credential=credential)
    assert re.match(f"the run admits peers that were invited: {text}", found)
    assert why(KIM, peers=AdmissionRule("token"), credential=invitation()) == ""
    assert why(KIM, peers=AdmissionRule("token", (KIM.peer_id,)), credential=credential) == "", (
        "it is named, too"
    )


def test_a_token_that_more_identities_use_than_it_admits_admits_none() -> None:
    uses, closed = TokenUses(), AdmissionRule("token")
    uses.saw("token", KIM.peer_id, until=NOW + 20, now=NOW)
    assert why(KIM, peers=closed, credential=invitation(), uses=uses) == ""
    uses.saw("token", SAM.peer_id, until=NOW + 30, now=NOW)
    for both in (KIM, SAM):
        assert "its token is used by 2 identities, and admits 1: keep your --identity" in why(
            both, peers=closed, credential=invitation(), uses=uses
        )
        assert why(both, peers=closed, credential=invitation(uses=2), uses=uses) == ""
    assert why(SAM, peers=closed, credential=invitation(), uses=uses, now=NOW + 20) == "", (
        "the other has gone"
    )


def test_what_is_remembered_of_tokens_is_bounded_and_forgotten() -> None:
    uses = TokenUses(most=2)
    for token in ("a", "", "c"):
        uses.saw(token, KIM.peer_id, until=NOW + 10, now=NOW)
    assert [uses.users(token, now=NOW) for token in ("a", "", "c")] == [1, 1, 0]
    assert len(uses._until) == 2
    uses.saw("c", KIM.peer_id, until=NOW + 30, now=NOW + 20)
    assert [uses.users(token, now=NOW + 20) for token in ("a", "", "c")] == [0, 0, 1]
    uses.saw("c", KIM.peer_id, until=NOW + 25, now=NOW + 20)
    assert uses.users("c", now=NOW + 28) == 1, "the later time holds"


def test_a_token_that_is_everywhere_costs_no_more_than_one_that_is_used_twice() -> None:
    """Its users are counted at each call: of a thousand more than it admits no more is said."""
    uses = TokenUses()
    for n in range(3 * MAX_USES):
        uses.saw("thief's", f"peer {n}", until=NOW + 10, now=NOW)
    assert MAX_USES < uses.users("thief's", now=NOW) <= MAX_USES + 1
    uses.saw("thief's", "peer 0", until=NOW + 30, now=NOW)
    uses.saw("thief's", "late", until=NOW + 30, now=NOW + 20)
    assert uses.users("thief's", now=NOW + 20) == 2, "those that are there are seen, once others have gone"
    uses.saw("other", KIM.peer_id, until=NOW + 30, now=NOW)
    assert uses.users("other", now=NOW) == 1


def test_an_open_door_may_ask_for_work() -> None:
    asks = "the run asks for a stamp of 20 bits of work, and this has 0: start it again"
    assert why(KIM, work_bits=20) == asks
    assert why(KIM, work_bits=20, credential=Credential(stamp_bits=20)) == ""
    assert why(KIM, work_bits=20, credential=invitation()) == "", "who is invited needs none"
    assert why(KIM, work_bits=20, peers=AdmissionRule("open", (KIM.peer_id,))) == ""


def test_a_trusted_stage_is_for_the_named_and_the_invited() -> None:
    told = "stage 2 is served only by peers that the owner named or invited: it has no token"
    assert why(KIM, stage=2, trusted_stages=(0, -1)).startswith(told)
    assert why(KIM, stage=1, trusted_stages=(0, -1)) == ""
    assert why(KIM, stage=0, trusted_stages=(0, -1))
    assert why(KIM, stage=2, trusted_stages=(0, -1), credential=invitation()) == ""
    assert why(KIM, stage=2, trusted_stages=(0, -1), founders=(KIM.peer_id,)) == ""


def test_a_ban_is_above_all_that_admits() -> None:
    named = {
        "peers": AdmissionRule("open", (KIM.peer_id,)),
        "founders": (KIM.peer_id,),
        "bans": (Ban(KIM.peer_id, "wrong gradients"),),
        "credential": invitation(),
    }
    assert why(KIM, **named) == "the owner of the run banned it: wrong gradients"
    assert why(KIM, bans=(Ban(KIM.peer_id, ""),)) == "the owner of the run banned it: without a reason"
    assert why(PETER, bans=(Ban(KIM.peer_id, "x"),)) == ""


def test_each_of_many_bans_is_found() -> None:
    banned = [Identity(n.to_bytes(32, "big")) for n in range(200, 230)]
    bans = [Ban(one.peer_id, f"no {n}") for n, one in enumerate(banned)]
    for n, one in enumerate(banned):
        assert why(one, bans=bans).endswith(f"banned it: no {n}")
    assert why(KIM, bans=bans) == why(PETER, bans=bans) == why(SAM, bans=bans) == ""


def test_a_key_that_revoked_itself_is_out_and_the_owners_takes_all_with_it() -> None:
    text = "its key was revoked by itself: start with another identity"
    assert why(KIM, revocations=(KIM.peer_id,)) == why(KIM, revoked=(KIM.peer_id,)) == text
    assert why(PETER, revoked=(KIM.peer_id,)) == ""
    for told in ({"revoked": (OWNER.peer_id,)}, {"revocations": (OWNER.peer_id,)}):
        assert why(PETER, **told) == "the key of the run's owner was revoked: nobody is admitted any more"


def test_an_expired_charter_admits_nobody() -> None:
    assert "has expired: its owner has to sign another one" in why(PETER, now=NOW + 21 * DAY)


def test_a_manifest_that_names_its_trainers_is_above_the_charter() -> None:
    """It is what the run is; a charter can only take away from it."""
    text = "the run's manifest names its trainers (admission.trainers): give the --identity of one"
    assert why(KIM, "trainer", trainers=AdmissionRule("open"), trainers_of_manifest=(TINA.peer_id,)) == text
    assert (
        why(
            KIM,
            "trainer",
            trainers=AdmissionRule("list", (KIM.peer_id,)),
            trainers_of_manifest=(TINA.peer_id,),
        )
        == text
    )
    assert why(TINA, "trainer", trainers_of_manifest=(TINA.peer_id,)) == "", "named there is named"
    banned = (Ban(TINA.peer_id, "x"),)
    assert "banned" in why(TINA, "trainer", trainers_of_manifest=(TINA.peer_id,), bans=banned)


# --- what is signed -----------------------------------------------------------------------------------------


def test_a_charter_is_believed_with_its_owners_signature_only() -> None:
    sealed = signed.seal_charter(charter(), OWNER)
    assert signed.open_statement(sealed, OWNER.peer_id) == charter()
    assert len(sealed) < 200
    with pytest.raises(Refused, match="not signed by its owner"):
        signed.open_statement(sealed, THIEF.peer_id)
    changed = sealed.replace(b"demo", b"Demo")
    with pytest.raises(Refused, match="not signed by its owner"):
        signed.open_statement(changed, OWNER.peer_id)
    with pytest.raises(Refused, match="a charter of 20000 bytes; at most"):
        signed.open_statement(bytes(20_000), OWNER.peer_id)
    with pytest.raises(Refused, match="a malformed charter"):
        signed.open_statement(b"\xff", OWNER.peer_id)


def test_a_charter_is_on_the_disk_before_it_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = signed.seal_charter(charter(), OWNER)
    signed.write_charter(path := tmp_path / "charter", OWNER.peer_id, sealed)
    before, newer = path.read_bytes(), signed.seal_charter(charter(sequence=9), OWNER)
    flushed: list[tuple[bytes, bool]] = []

    def fsync(file: int) -> None:
        flushed.append((os.pread(file, 10_000, 0), path.read_bytes() == before))

    monkeypatch.setattr(os, "fsync", fsync)
    signed.write_charter(path, OWNER.peer_id, newer)
    assert flushed == [(path.read_bytes(), True)] and signed.read_charter(path)[2] == newer


def test_a_charter_lies_under_its_name_and_its_owners_fingerprint() -> None:
    fingerprint = fingerprint_of(OWNER.peer_id)
    assert signed.key_of(charter(), OWNER.peer_id) == f"demo@{fingerprint}.charter"
    assert signed.key_of(charter(), THIEF.peer_id) != f"demo@{fingerprint}.charter"


def test_a_revocation_is_believed_of_the_key_that_signed_it() -> None:
    sealed = signed.seal_revocation(RUN, KIM)
    assert signed.open_statement(sealed, KIM.peer_id) == signed.Revocation(RUN, KIM.peer_id)
    with pytest.raises(Refused, match="not signed by the key that it revokes"):
        signed.open_statement(sealed, PETER.peer_id)
    with pytest.raises(Refused, match="not signed by the key that it revokes"):
        signed.open_statement(sealed.replace(RUN.encode(), OTHER_RUN.encode()), KIM.peer_id)


def credential_of(token: str, who: Identity = KIM, run: str = RUN) -> bytes:
    return signed.seal_credential(signed.certify(token, run, who.peer_id)[1])


def test_a_token_becomes_a_certificate_of_one_peer_without_the_owner() -> None:
    token = signed.make_token(RUN, OWNER, "keeper", expires=int(NOW) + DAY, uses=3)
    role, _ = signed.certify(f" {token}\n", RUN, KIM.peer_id)
    shown = credential_of(token)
    assert role == "keeper"
    assert len(shown) < signed.MAX_CREDENTIAL_BYTES
    opened = signed.open_credential(shown, RUN, OWNER.peer_id, KIM.peer_id)
    assert opened.token is not None
    assert opened.token[1:] == ("keeper", NOW + DAY, 3)
    again = signed.open_credential(credential_of(token, SAM), RUN, OWNER.peer_id, SAM.peer_id)
    assert again.token == opened.token, "the same token: so many identities use it"


def test_a_certificate_is_of_one_run_one_owner_and_one_peer() -> None:
    token = signed.make_token(RUN, OWNER, "peer", expires=int(NOW) + DAY)
    shown = credential_of(token)
    for run, owner in ((OTHER_RUN, OWNER), (RUN, THIEF)):
        with pytest.raises(Refused, match="a token that the owner of this run did not make for it"):
            signed.open_credential(shown, run, owner.peer_id, KIM.peer_id)
    with pytest.raises(Refused, match="a token that was bound to another peer"):
        signed.open_credential(shown, RUN, OWNER.peer_id, SAM.peer_id)
    longer = shown.replace(msgspec.msgpack.encode(int(NOW) + DAY), msgspec.msgpack.encode(int(NOW) + 2 * DAY))
    assert longer != shown
    with pytest.raises(Refused, match="did not make for it"):
        signed.open_credential(longer, RUN, OWNER.peer_id, KIM.peer_id)
    with pytest.raises(Refused, match="a credential of 257 bytes; at most 256 are allowed"):
        signed.open_credential(bytes(257), RUN, OWNER.peer_id, KIM.peer_id)


def test_a_word_that_is_no_token_of_this_run_is_said() -> None:
    token = signed.make_token(RUN, OWNER, "peer", expires=int(NOW) + DAY)
    for wrong in ("", "swarm-invitation-", token[:-5], token[17:], token + "A" * 400, "swarm-invitation-é"):
        with pytest.raises(SetupError, match="--token is none that swarm invite printed: that is one word"):
            signed.certify(wrong, RUN, KIM.peer_id)
    with pytest.raises(SetupError, match=f"--token is for the run {RUN}, and this is {OTHER_RUN}"):
        signed.certify(token, OTHER_RUN, KIM.peer_id)


def test_a_stamp_is_of_one_peer_and_one_run() -> None:
    stamp = signed.find_stamp(RUN, KIM.peer_id, 15)
    assert signed.stamp_bits(RUN, KIM.peer_id, stamp) >= 15
    assert (
        max(signed.stamp_bits(RUN, SAM.peer_id, stamp), signed.stamp_bits(OTHER_RUN, KIM.peer_id, stamp)) < 15
    )
    shown = signed.seal_credential(None, stamp)
    assert signed.open_credential(shown, RUN, OWNER.peer_id, KIM.peer_id).stamp_bits >= 15


# --- at the door --------------------------------------------------------------------------------------------


def door(**changes: Any) -> Doorkeeper:
    """With the charter that has these changes; it expires in the year 2096."""
    found = Doorkeeper()
    found.set(terms(**changes))
    return found


def terms(**changes: Any) -> AdmissionTerms:
    return AdmissionTerms(charter(**({"expires": int(4e9)} | changes)), OWNER.peer_id, stages=3)


@pytest.fixture(autouse=True)
def _in_the_year_2096(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.net.charter.doorkeeper.unix_s", lambda: 4e9 - DAY)


def test_without_a_charter_the_door_is_open() -> None:
    nobody = Doorkeeper()
    assert nobody.refusal(KIM.peer_id, "part", True) == nobody.why_not(KIM.peer_id, "trainer", now=NOW) == ""
    assert not nobody.lacks_stamp(KIM.peer_id, "peer")


def test_a_banned_peer_may_nothing_and_is_asked_nothing() -> None:
    banned = door(bans=(Ban(KIM.peer_id, "wrong gradients"),))
    for method in ("", "work", "part", "status", "admit", "reach"):
        for incoming in (True, False):
            text = banned.refusal(KIM.peer_id, method, incoming)
            assert text == "not admitted: the owner of the run banned it: wrong gradients"
            assert banned.refusal(PETER.peer_id, "part", incoming) == ""


def test_each_method_is_for_who_needs_it() -> None:
    closed = door(
        peers=AdmissionRule("list", (PETER.peer_id,)), trainers=AdmissionRule("list", (TINA.peer_id,))
    )
    closed.stage = 1
    admitted = {
        method: [who for who in (PETER, TINA, KIM) if not closed.refusal(who.peer_id, method, True)]
        for method in ("", "admit", "status", "chunk", "work", "watch", "part", "report", "anything new")
    }
    everybody, trainers_too, peers = [PETER, TINA, KIM], [PETER, TINA], [PETER]
    assert admitted == {
        "": everybody, "admit": everybody, "status": everybody, "chunk": everybody,
        "work": trainers_too, "watch": trainers_too,
        "part": peers, "report": peers, "anything new": peers,
    }  # fmt: skip
    closed.stage = 0
    assert closed.refusal(TINA.peer_id, "work", True) == ""
    assert "not admitted as a trainer" in closed.refusal(PETER.peer_id, "work", True), "no peer feeds stage 0"


def test_it_was_thought_of_each_method_that_is_served() -> None:
    served = re.compile(r"\.serve\(\s*\"(\w+)\"")
    named = re.compile(r"METHOD = \"(\w+)\"")
    found = {
        method
        for path in Path(rules.__file__).parents[2].joinpath("peers").rglob("*.py")
        for method in (*served.findall(path.read_text()), *named.findall(path.read_text()))
    }
    for_peers = {"report", "directive", "summary", "run", "part", "held"}
    for_peers |= {"show", "reveal"}
    assert found - {"admit", "direct"} <= rules.READS | rules.TRAINERS_CALL | for_peers


def test_only_peers_are_called_for_work() -> None:
    closed = door(
        peers=AdmissionRule("list", (PETER.peer_id,)), trainers=AdmissionRule("list", (TINA.peer_id,))
    )
    closed.stage = 0
    assert closed.refusal(PETER.peer_id, "work", False) == closed.refusal(KIM.peer_id, "status", False) == ""
    for who in (TINA, KIM):
        for method in ("work", "part", "report"):
            assert "not admitted as a peer: the run's charter names" in closed.refusal(
                who.peer_id, method, False
            )


def test_only_trainers_ask_for_blocks_of_the_data_and_only_trainers_and_keepers_are_asked() -> None:
    lists = {"peers": PETER, "trainers": TINA, "keepers": KIM}
    closed = door(**{role: AdmissionRule("list", (who.peer_id,)) for role, who in lists.items()})
    asks = {who: closed.refusal(who.peer_id, "block", True) for who in (PETER, TINA, KIM)}
    assert [who for who, why in asks.items() if not why] == [TINA]
    asked = {who: closed.refusal(who.peer_id, "block", False) for who in (PETER, TINA, KIM)}
    assert [who for who, why in asked.items() if not why] == [TINA, KIM]
    assert closed.why_not_record(record(TINA, stage=NO_STAGE, state="feeding")) == ""
    assert closed.why_not_record(record(TINA, stage=NO_STAGE, state="left")) == ""
    for other in (PETER, KIM):
        assert "as a trainer" in closed.why_not_record(record(other, stage=NO_STAGE, state="feeding"))


def record(who: Identity, credential: bytes = b"", expires: float = 5.0, **changes: Any) -> Any:
    fields = {"peer": who.peer_id, "run": RUN, "stage": 0, "state": "serving", "version": 0}
    sealed = seal_record(PeerRecord(**(fields | changes)), expires, who, credential=credential)
    assert len(sealed) < MAX_SIGNED_BYTES
    return open_record(sealed, who.peer_id, expires)


def test_a_record_carries_what_admits_its_peer() -> None:
    invited = door(peers=AdmissionRule("token"), keepers=AdmissionRule("list"))
    token = signed.make_token(RUN, OWNER, "peer", expires=int(4e9))
    assert "it has no token" in invited.why_not_record(record(KIM))
    assert invited.why_not_record(record(KIM, credential_of(token))) == ""
    assert invited.refusal(KIM.peer_id, "part", True) == "", "who was seen with it may call"
    thief = record(SAM, credential_of(token, KIM))
    assert invited.why_not_record(thief).endswith("bound to another peer")
    foreign = signed.make_token(OTHER_RUN, OWNER, "peer", expires=int(4e9))
    assert "did not make for it" in invited.why_not_record(
        record(PETER, credential_of(foreign, PETER, OTHER_RUN))
    )
    assert "names its keepers" in invited.why_not_record(record(TINA, stage=NO_STAGE, state="keeping"))
    assert invited.why_not_record(record(TINA, run=OTHER_RUN)) == "", "of another run"


def test_the_largest_record_with_a_credential_is_under_a_kilobyte() -> None:
    token = signed.make_token(RUN, OWNER, "trainer", expires=int(4e9), uses=1000)
    certificate = signed.certify(token, RUN, KIM.peer_id)[1]
    credential = signed.seal_credential(certificate, (1 << 62) - 1)
    relayed = f"/ip4/255.255.255.255/tcp/65535/p2p/{SAM.peer_id}/p2p-circuit/p2p/{KIM.peer_id}"
    voucher = Voucher(OWNER.peer_id, 100, 1 << 40, bytes(64))
    assert len(credential) <= signed.MAX_CREDENTIAL_BYTES
    full = {"addresses": (relayed, relayed), "voucher": voucher, "device": "cuda:0 NVIDIA H100 80GB HBM3"}
    kept = PeerRecord(
        peer=KIM.peer_id, run=RUN, stage=63, state="serving", version=1 << 40, speed=1.5, **full
    )
    packed = seal_record(kept, 5.0, KIM, credential=credential)
    print(f"\n{len(packed)} bytes, {len(credential)} of them the credential")
    assert len(packed) < 1000


def test_two_that_use_one_token_are_both_refused_while_both_are_there() -> None:
    invited = door(peers=AdmissionRule("token"))
    token = signed.make_token(RUN, OWNER, "peer", expires=int(4e9))
    assert invited.why_not_record(record(KIM, credential_of(token))) == ""
    for who in (SAM, KIM):
        assert "is used by 2 identities, and admits 1" in invited.why_not_record(
            record(who, credential_of(token, who))
        )
    assert "is used by 2 identities" in invited.refusal(KIM.peer_id, "part", True)


def test_a_token_is_in_use_for_as_long_as_a_record_with_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run of thousands a record is renewed each 100 s: of two that did so by turns one was seen."""
    invited, began = door(peers=AdmissionRule("token")), 4e9 - DAY
    token = signed.make_token(RUN, OWNER, "peer", expires=int(4e9))
    assert invited.why_not_record(record(KIM, credential_of(token), expires=began + 400)) == ""
    for after_s, many in ((399, True), (461, False)):
        monkeypatch.setattr("peers.net.charter.doorkeeper.unix_s", lambda later=began + after_s: later)
        why_not = invited.why_not_record(record(SAM, credential_of(token, SAM), expires=began + after_s + 1))
        assert ("is used by 2 identities" in why_not) is many


@pytest.mark.parametrize("named", ["peers", "founders"])
def test_who_is_named_or_has_a_token_is_invited_whatever_the_door(named: str) -> None:
    """They need not wait behind a crowd: `tests/peers/transfer/test_state_leases.py`."""
    assert not Doorkeeper().invited(KIM.peer_id), "there is no charter"
    who = AdmissionRule("open", (PETER.peer_id,)) if named == "peers" else (PETER.peer_id,)
    opened = door(**{named: who})
    token = signed.make_token(RUN, OWNER, "peer", expires=int(4e9))
    for_keepers = signed.make_token(RUN, OWNER, "keeper", expires=int(4e9))
    opened.show(KIM.peer_id, credential_of(token))
    opened.show(SAM.peer_id, credential_of(for_keepers, SAM))
    said = [opened.invited(one.peer_id) for one in (PETER, OWNER, KIM, SAM, TINA)]
    assert said == [True, True, True, False, False]
    assert opened.refusal(TINA.peer_id, "part", True) == "", "she is admitted all the same"
    banned = door(bans=(Ban(PETER.peer_id, "x"),), **{named: who})
    assert not banned.invited(PETER.peer_id)


def test_a_banned_thief_of_a_token_does_not_use_it() -> None:
    invited = door(peers=AdmissionRule("token"), bans=(Ban(SAM.peer_id, "thief"),))
    token = signed.make_token(RUN, OWNER, "peer", expires=int(4e9))
    assert "thief" in invited.why_not_record(record(SAM, credential_of(token, SAM)))
    assert invited.why_not_record(record(KIM, credential_of(token))) == ""


def test_a_ban_of_a_token_puts_out_all_that_use_it_under_whatever_key() -> None:
    """Who was banned has a new key at once, and the token still."""
    secret = bytes(32)
    token = signed.make_token(RUN, OWNER, "peer", expires=int(4e9), seed=secret)
    bans = (Ban(KIM.peer_id, "liar"), Ban(Identity(secret).peer_id, "its token"))
    invited = door(peers=AdmissionRule("token", (PETER.peer_id,)), bans=tuple(sorted(bans)))
    for who in (SAM, TINA):
        why_not = invited.why_not_record(record(who, credential_of(token, who)))
        assert "its token was taken back: the owner of the run banned it: its token" in why_not
    assert invited.refusal(SAM.peer_id, "part", True)
    other = signed.make_token(RUN, OWNER, "peer", expires=int(4e9))
    assert invited.why_not_record(record(SAM, credential_of(other, SAM))) == ""
    assert invited.why_not_record(record(PETER, credential_of(token, PETER))) == "", "it is named, too"


def test_one_of_many_that_have_a_token_does_not_take_it_from_the_others() -> None:
    """Each has its secret key, which can say of itself that it is to be trusted no more."""
    shared = Token(TINA.peer_id, "peer", NOW + DAY, 100)
    closed = {"peers": AdmissionRule("token"), "credential": Credential(shared)}
    assert why(KIM, revoked=[TINA.peer_id], **closed) == ""
    assert why(KIM, revocations=(TINA.peer_id,), **closed) == ""
    assert "its token was taken back" in why(KIM, bans=(Ban(TINA.peer_id, "x"),), **closed)


def test_a_record_at_a_trusted_stage_is_of_a_trusted_peer() -> None:
    trusting = door(trusted_stages=(0,), peers=AdmissionRule("open", (PETER.peer_id,)))
    assert "stage 0 is served only by peers that the owner named" in trusting.why_not_record(record(KIM))
    assert trusting.why_not_record(record(KIM, stage=1)) == trusting.why_not_record(record(PETER)) == ""


def test_at_a_trusted_stage_only_the_trusted_call_as_replicas() -> None:
    trusting = door(trusted_stages=(0,), founders=(PETER.peer_id,))
    for stage, refused in ((0, True), (1, False)):
        trusting.stage = stage
        for method in ("report", "part"):
            assert bool(trusting.refusal(KIM.peer_id, method, True)) == refused
            assert trusting.refusal(PETER.peer_id, method, True) == ""
        assert trusting.refusal(KIM.peer_id, "summary", True) == "", "of another stage"


def test_stages_of_all_islands_are_trusted_and_fed_as_those_of_the_first() -> None:
    trusting = door(trusted_stages=(-1,), founders=(PETER.peer_id,))
    stages = trusting.terms.stages if trusting.terms is not None else 0
    for island in range(3):
        last, first = island * stages + stages - 1, island * stages
        assert trusting.why_not_record(record(KIM, stage=last)) and not trusting.why_not_record(
            record(KIM, stage=first)
        )
        trusting.stage = last
        assert trusting.refusal(KIM.peer_id, "part", True) and not trusting.refusal(
            PETER.peer_id, "part", True
        )
        assert trusting.refusal(KIM.peer_id, "work", True) == ""
        trusting.stage = first
        assert "as a trainer: " in trusting.refusal(KIM.peer_id, "work", True), "only trainers bring text"


def test_a_stamp_is_lacking_only_where_it_is_all_that_is_lacking() -> None:
    asking = door(work_bits=12)
    assert asking.lacks_stamp(KIM.peer_id, "peer")
    assert not asking.lacks_stamp(KIM.peer_id, "trainer"), "that is for the named"
    stamp = signed.find_stamp(RUN, KIM.peer_id, 12)
    asking.show(KIM.peer_id, signed.seal_credential(None, stamp))
    assert not asking.lacks_stamp(KIM.peer_id, "peer")
    assert asking.refusal(KIM.peer_id, "part", True) == ""


def test_what_callers_show_is_bounded() -> None:
    busy = Doorkeeper()
    with pytest.raises(Refused, match="a credential of 257 bytes"):
        busy.show(KIM.peer_id, bytes(257))
    for n in range(MAX_SHOWN + 1):
        busy.show(f"peer {n}", b"x")
    assert busy.shown("peer 0") == b""
    assert busy.shown("peer 1") == busy.shown(f"peer {MAX_SHOWN}") == b"x"
    busy.set(terms())
    assert "malformed credential" in busy.refusal("peer 1", "part", True)


def test_one_token_under_many_names_drives_out_nothing_that_others_showed() -> None:
    """Callers show what admits them once on each stream: they were refused until it broke."""
    invited = Doorkeeper(most_shown=4)
    invited.set(terms(peers=AdmissionRule("token")))
    token, stolen = (signed.make_token(RUN, OWNER, "peer", expires=at) for at in (int(4e9), 1))
    invited.show(KIM.peer_id, credential_of(token))
    crowd = [Identity(bytes([n]) * 32) for n in range(10, 19)]
    for one in crowd:
        invited.show(one.peer_id, credential_of(stolen, one))
    assert invited.shown(KIM.peer_id) == credential_of(token)
    assert [bool(invited.shown(one.peer_id)) for one in crowd] == [False] * 6 + [True] * 3


def test_what_was_shown_before_the_charter_was_known_and_is_false_is_looked_at_once() -> None:
    """It was checked at each call: 14 identities took all of a peer's time."""
    early = Doorkeeper()
    early.show(KIM.peer_id, credential_of(signed.make_token(RUN, KIM, "peer", expires=int(4e9))))
    early.set(terms(peers=AdmissionRule("token")))
    assert "the owner of this run did not make" in early.refusal(KIM.peer_id, "report", True)
    assert "it has no token" in early.refusal(KIM.peer_id, "report", True)
    good = credential_of(signed.make_token(RUN, OWNER, "peer", expires=int(4e9)))
    early.show(KIM.peer_id, good)
    assert "malformed" in early.why_not(KIM.peer_id, "peer", now=1.0, carried=b"x")
    assert early.shown(KIM.peer_id) == good, "what another record carries is not what it showed"


def test_what_admits_nobody_is_not_kept() -> None:
    asking = door(work_bits=40)
    for worthless in (signed.seal_credential(None, 1), b""):
        with pytest.raises(Refused, match="a credential that is worth nothing here"):
            asking.show(KIM.peer_id, worthless)
    with pytest.raises(Refused, match="a malformed credential"):
        asking.show(KIM.peer_id, b"x")
    assert "bits of work" in asking.why_not_record(record(KIM, signed.seal_credential(None, 1)))
    assert asking.shown(KIM.peer_id) == b""
    stamp = signed.seal_credential(None, signed.find_stamp(RUN, KIM.peer_id, 1))
    with pytest.raises(Refused, match="a credential that is worth nothing here"):
        door(peers=AdmissionRule("token")).show(KIM.peer_id, stamp)  # two hashes, and a place in memory


def test_records_that_anybody_can_make_drive_out_nothing_that_callers_showed() -> None:
    """Trainers have no record, and show their token once on each stream: they were refused until it broke."""
    opened = Doorkeeper(most_shown=4)
    opened.set(terms(trainers=AdmissionRule("token")))
    opened.show(KIM.peer_id, credential_of(signed.make_token(RUN, OWNER, "trainer", expires=int(4e9))))
    for number in range(10, 15):
        one = Identity(bytes([number]) * 32)
        assert opened.why_not_record(record(one, signed.seal_credential(None, 1))) == ""
    assert opened.why_not(KIM.peer_id, "trainer", now=4e9 - DAY) == ""


def test_a_new_charter_is_told_of_once() -> None:
    told: list[int] = []
    changing = door()
    changing.on_change.append(lambda: told.append(1))
    changing.set(terms())
    assert not told
    changing.set(terms(bans=(Ban(KIM.peer_id, "x"),)))
    assert told == [1]
