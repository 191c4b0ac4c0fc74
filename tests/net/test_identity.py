"""Keys, peer ids, signatures and addresses are libp2p's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peers.net import identity
from peers.net.identity import Identity, is_loopback, split_peer_id, tcp_endpoints, to_multiaddr
from swarm.errors import SetupError

KNOWN_SEED = bytes(range(32))
KNOWN_PEER_ID = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
"""p2pd's own answer for a key file with that seed."""


def test_the_peer_id_of_a_key_is_the_one_that_p2pd_gives_it() -> None:
    assert Identity(KNOWN_SEED).peer_id == KNOWN_PEER_ID


def test_the_peer_id_is_the_public_key_and_back() -> None:
    key = Identity.generate()
    public = identity.public_key_of(key.peer_id)
    assert public is not None
    assert identity.peer_id_of(public) == key.peer_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        "x" * 52,
        "0" * 52,
        "1" * 52,
        "z" * 52,
        "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG",
    ],
)
def test_other_texts_are_no_peer_ids(text: str) -> None:
    assert identity.public_key_of(text) is None
    assert not identity.verify(text, b"data", bytes(64))


def test_only_the_peers_own_signature_of_the_same_bytes_counts() -> None:
    mine, other = Identity.generate(), Identity.generate()
    signature = mine.sign(b"data")
    assert identity.verify(mine.peer_id, b"data", signature)
    assert not identity.verify(mine.peer_id, b"datA", signature)
    assert not identity.verify(other.peer_id, b"data", signature)
    assert not identity.verify(mine.peer_id, b"data", signature[:-1])
    assert not identity.verify(mine.peer_id, b"data", bytes(64))


def test_a_key_file_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_program_left_is_in_the_way_of_no_key(tmp_path: Path) -> None:
    """In a container each program has the same id: the next one took the draft for another program's key."""
    path = tmp_path / "key"
    (tmp_path / f".key.{os.getpid()}").write_bytes(b"")
    assert Identity.load_or_create(path).peer_id == Identity.load(path).peer_id


def test_a_key_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What names it is flushed, too: after a power cut a manifest and a charter were there, and no key."""
    path, flushed = tmp_path / "key", list[tuple[bytes, bool]]()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append((os.pread(file, 100, 0), path.exists())))
    Identity(KNOWN_SEED).save(path)
    assert flushed == [(path.read_bytes(), False)]


def test_a_file_that_is_no_key_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"my thesis")
    with pytest.raises(
        SetupError, match=r"is not an identity file: not an Ed25519 key in libp2p's form. Move it"
    ):
        Identity.load_or_create(path)
    assert path.read_bytes() == b"my thesis"
    key = Identity.generate().to_file_bytes()
    path.write_bytes(key[:36] + bytes(32))
    with pytest.raises(SetupError, match="its public half does not belong to its private half"):
        Identity.load_or_create(path)


def test_a_key_that_cannot_be_written_or_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot write the identity file .*: No such file or directory"):
        Identity.load_or_create(tmp_path / "nowhere" / "key")
    with pytest.raises(SetupError, match=r"cannot read the identity file .*: Is a directory"):
        Identity.load_or_create(tmp_path)


# -- addresses ---------------------------------------------------------------------------------------------


def test_only_addresses_that_can_be_dialled_directly_are_tried_before_p2pd_dials_them() -> None:
    peer = Identity.generate().peer_id
    direct = [f"/ip4/192.0.2.7/tcp/31337/p2p/{peer}", "/ip6/::1/tcp/5", "/dns4/example.org/tcp/80"]
    assert [endpoint[1:] for endpoint in tcp_endpoints(direct)] == [
        ("192.0.2.7", 31337),
        ("::1", 5),
        ("example.org", 80),
    ]
    relayed = f"/ip4/192.0.2.7/tcp/1/p2p/{peer}/p2p-circuit/p2p/{peer}"
    for other in (relayed, "/ip4/192.0.2.7/udp/1/quic", "nonsense", "/ip4/192.0.2.7/tcp/x"):
        assert tcp_endpoints([*direct, other]) == []


def test_addresses_are_read_as_people_write_them() -> None:
    assert to_multiaddr("1.2.3.4:31337") == "/ip4/1.2.3.4/tcp/31337"
    assert to_multiaddr("[::1]:5") == "/ip6/::1/tcp/5"
    assert to_multiaddr("/dns4/example.org/tcp/80") == "/dns4/example.org/tcp/80"
    for wrong in ("1.2.3.4", "1.2.3.4:0", "1.2.3.4:x", ":5", ""):
        with pytest.raises(SetupError, match="is not an address: write host:port or /ip4/"):
            to_multiaddr(wrong)
    with pytest.raises(SetupError, match=r"^'\[fe80::1%a\\x1b\]' has a scope \(%...\), which p2pd does not"):
        to_multiaddr("[fe80::1%a\x1b]:5")
    with pytest.raises(SetupError, match="has port 0: name the port that others can dial"):
        to_multiaddr("/ip4/1.2.3.4/tcp/0")
    assert split_peer_id("/ip4/1.2.3.4/tcp/5/p2p/12D3") == ("/ip4/1.2.3.4/tcp/5", "12D3")
    with pytest.raises(SetupError, match="is not the address of a peer: it ends in /p2p/"):
        split_peer_id("/ip4/1.2.3.4/tcp/5")


def test_loopback_is_this_machine_only_however_it_is_written() -> None:
    for here in ("127.0.0.1", "::1", "localhost", "/ip4/127.0.0.1/tcp/5/p2p/x", "/ip6/::1/tcp/5"):
        assert is_loopback(here)
    for there in ("0.0.0.0", "192.0.2.1", "/dns4/bootstrap/tcp/31337/p2p/x", "/ip4/192.0.2.2/tcp/5"):
        assert not is_loopback(there)
