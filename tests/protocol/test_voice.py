"""Whose word counts: peers that a trainer of the manifest has seen working."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from peers.net.identity import Identity
from swarm.manifest import AdmissionSpec, Run, audit_run
from swarm.protocol.statements import Signer, Statement, is_signed, sign
from swarm.protocol.voice import (
    FOUNDERS_VOICE,
    KNOWN_AFTER_STEPS,
    MIN_STEPS,
    RENEW_EVERY,
    VALID_STEPS,
    Worked,
    heard,
    voice_of,
    voices,
    vouch,
)
from swarm.records import PeerRecord, Voucher

TRAINER, PEER, FOUNDER, STRANGER = (Identity(bytes([n]) * 32) for n in range(1, 5))
RUN = replace(audit_run(), admission=AdmissionSpec(trainers=(TRAINER.peer_id,), founders=(FOUNDER.peer_id,)))


class Sworn(Statement, frozen=True, array_like=True):
    peer: str
    steps: int
    t: int


def record(peer: Signer, voucher: Voucher | None = None) -> PeerRecord:
    return PeerRecord(peer=peer.peer_id, run=RUN.id, stage=0, state="serving", version=0, voucher=voucher)


def voucher_for(
    peer: Signer, *, steps: int = 30, t: int = 40, by: Signer = TRAINER, run: Run = RUN, before: int = 100
) -> Voucher:
    return vouch(by, run.id, Worked(peer.peer_id, steps, t, before))


def voice(voucher: Voucher | None, *, peer: Signer = PEER, version: int = 41) -> int:
    return voice_of(peer.peer_id, voucher, RUN, STRANGER, version=version)


def test_work_that_a_trainer_of_the_manifest_saw_gives_voice() -> None:
    assert voice(voucher_for(PEER)) == 30
    assert voice(voucher_for(PEER, steps=10**9)) == 100


@pytest.mark.parametrize(
    "voucher",
    [
        None,
        voucher_for(PEER, steps=MIN_STEPS - 1),
        voucher_for(PEER, by=STRANGER),
        voucher_for(STRANGER),
        voucher_for(PEER, run=replace(RUN, seed=77)),
        msgspec.structs.replace(voucher_for(PEER), steps=99),
        msgspec.structs.replace(voucher_for(PEER), t=1000),
        msgspec.structs.replace(voucher_for(PEER), before=99),
        msgspec.structs.replace(voucher_for(PEER, by=STRANGER), trainer=TRAINER.peer_id),
        Voucher(TRAINER.peer_id, 30, 40, b""),
    ],
    ids=[
        "none",
        "too-short",
        "another-trainer",
        "another-peer",
        "another-run",
        "more-steps",
        "later",
        "more-before",
        "forged",
        "bare",
    ],
)
def test_no_other_voucher_gives_voice(voucher: Voucher | None) -> None:
    assert voice(voucher) == 0


def test_a_voucher_ends() -> None:
    voucher = voucher_for(PEER, t=40)
    assert voice(voucher, version=40 + VALID_STEPS) == 30
    assert voice(voucher, version=41 + VALID_STEPS) == 0


def test_a_signature_of_one_kind_of_statement_is_none_of_another() -> None:
    fields = (PEER.peer_id, 30, 40)
    signature = sign(TRAINER, RUN.id, Sworn(*fields))
    assert is_signed(STRANGER, TRAINER.peer_id, RUN.id, Sworn(*fields), signature)
    assert not is_signed(STRANGER, TRAINER.peer_id, RUN.id, Worked(*fields), signature)


def test_founders_have_voice_from_the_start_and_keep_it() -> None:
    strangers = [record(Identity(bytes([n]) * 32)) for n in range(10, 13)]
    worked, founder = record(PEER, voucher_for(PEER)), record(FOUNDER)
    forged = record(STRANGER, voucher_for(PEER))
    of = [*strangers, forged]
    both = {PEER.peer_id: 30, FOUNDER.peer_id: FOUNDERS_VOICE}
    assert voices(RUN, [*of, worked, founder], STRANGER, version=41) == both
    assert voices(RUN, [*of, founder], STRANGER, version=41) == {FOUNDER.peer_id: FOUNDERS_VOICE}
    assert voices(RUN, of, STRANGER, version=41) == {}


def test_a_founders_voucher_gives_it_more_voice_and_never_less() -> None:
    for steps, voice in ((10, FOUNDERS_VOICE), (60, 60)):
        founder = record(FOUNDER, voucher_for(FOUNDER, steps=steps))
        assert voices(RUN, [founder], STRANGER, version=41) == {FOUNDER.peer_id: voice}


@pytest.mark.parametrize("t", [RENEW_EVERY - 9, RENEW_EVERY - 1, RENEW_EVERY + 1])
@pytest.mark.parametrize("before", [0, 15])
def test_a_voucher_counts_once_all_have_seen_it_and_until_then_the_one_before_it(t: int, before: int) -> None:
    counts = RENEW_EVERY + KNOWN_AFTER_STEPS
    peer = record(PEER, voucher_for(PEER, t=t, before=before))
    for version, voice in ((0, 30), (t, before), (counts - 1, before), (counts, 30)):
        assert voices(RUN, [peer], STRANGER, version=version).get(PEER.peer_id, 0) == voice


def test_a_newcomer_counts_vouchers_from_the_newest() -> None:
    """It knows of no version; and what a founder says of its work takes the voice of nobody."""
    old, new = record(PEER, voucher_for(PEER, t=40)), record(STRANGER, voucher_for(STRANGER, t=300))
    assert voices(RUN, [old, new], STRANGER, version=0) == {STRANGER.peer_id: 30}
    made_up = record(FOUNDER, Voucher(TRAINER.peer_id, 100, 10**6, bytes(64)))
    both = {PEER.peer_id: 30, FOUNDER.peer_id: FOUNDERS_VOICE}
    assert voices(RUN, [old, made_up], STRANGER, version=0) == both


def test_words_count_by_voice_and_alike_where_none_has_it() -> None:
    assert heard(["a", "b", "c"], {"b": 30}) == ["b"]
    assert heard(["a", "c"], {"b": 30}) == ["a", "c"]
