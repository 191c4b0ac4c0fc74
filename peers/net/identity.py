"""What names a peer, in libp2p's forms: its identity, an Ed25519 key, and the addresses to dial it at.

Key file: protobuf `PrivateKey{type = Ed25519, data = seed + public key}`, 68 bytes, as p2pd reads it.
Peer id: base58 of an identity multihash of protobuf `PublicKey{type = Ed25519, data = public key}`. So it
*is* the public key.
Address: a multiaddr, direct (`/ip4/1.2.3.4/tcp/5/p2p/<peer>`) or through a relay
(`/ip4/1.2.3.4/tcp/5/p2p/<relay>/p2p-circuit/p2p/<peer>`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import base58
import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from peers.options import check_peer_address
from swarm.errors import SetupError
from swarm.ids import SIGNATURE_BYTES, PeerId

_PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
"""Field 1 (type) = 1 (Ed25519); field 2 (data), 64 bytes follow."""
_ID_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
"""Hash function 0 = the 36 bytes themselves: field 1 = 1 (Ed25519); field 2, 32 bytes."""
VERIFIED = 16_384
"""Checks of signatures that are remembered, 8 MB: vouchers come again with each picture of the directory."""
PEER_ID_LETTERS = 52
Signature: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of a raw 32-byte Ed25519 public key."""
    return base58.b58encode(_ID_PREFIX + public_key).decode()


def public_key_of(peer_id: PeerId) -> bytes | None:
    """The raw 32-byte public key that a peer id is, or None if it is not an Ed25519 peer id."""
    if len(peer_id) != PEER_ID_LETTERS:
        return None
    try:
        data = base58.b58decode(peer_id)
    except ValueError:
        return None
    key = data[len(_ID_PREFIX) :]
    return key if len(key) == 32 and peer_id_of(key) == peer_id else None


def verify(peer_id: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether the peer signed the data. Never raises on a stranger's bytes."""
    key = public_key_of(peer_id)
    if key is None or len(signature) != SIGNATURE_BYTES:
        return False
    with contextlib.suppress(InvalidSignature, ValueError):
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
        return True
    return False


_verified = lru_cache(maxsize=VERIFIED)(verify)


class Identity:
    """A peer's key pair. Fulfils `swarm.protocol.statements.Signer`."""

    def __init__(self, seed: bytes) -> None:
        """`seed`: 32 secret bytes."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.public_key = self._key.public_key().public_bytes_raw()
        self.peer_id: PeerId = peer_id_of(self.public_key)

    @staticmethod
    def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
        """Whether the peer signed the data. A question that is asked again costs nothing."""
        return _verified(peer, data, signature)

    @classmethod
    def generate(cls) -> Identity:
        return cls(os.urandom(32))

    def sign(self, data: bytes) -> bytes:
        """64 bytes; deterministic."""
        return self._key.sign(data)

    def to_file_bytes(self) -> bytes:
        return _PRIVATE_PREFIX + self._seed + self.public_key

    @classmethod
    def from_file_bytes(cls, data: bytes) -> Identity:
        """Raises ValueError if this is not an Ed25519 key in libp2p's form."""
        if len(data) != 68 or not data.startswith(_PRIVATE_PREFIX):
            raise ValueError("not an Ed25519 key in libp2p's form")
        identity = cls(data[4:36])
        if identity.public_key != data[36:]:
            raise ValueError("its public half does not belong to its private half")
        return identity

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The key in `path`; if there is no such file, a new key is written there (mode 600).

        Raises:
            SetupError: the file cannot be read or written, or is not a key.
        """
        if not path.exists():
            try:
                cls.generate().save(path)
            except FileExistsError:
                pass  # another program was faster
            except OSError as error:
                text = f"cannot write the identity file {path}: {error.strerror}. Choose a writable folder."
                raise SetupError(text) from None
        return cls.load(path)

    def save(self, path: Path) -> None:
        """Write a new file (mode 600). Raises FileExistsError and other OSErrors."""
        handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb", 0) as file:
                file.write(self.to_file_bytes())
                os.fsync(handle)  # a manifest that names it may be on the disk a moment later
            os.link(draft, path)  # appears whole or not at all, and never replaces a key
        finally:
            Path(draft).unlink()

    @classmethod
    def load(cls, path: Path) -> Identity:
        """The key in `path`. Raises SetupError: it cannot be read, or is not a key."""
        try:
            with path.open("rb") as file:
                return cls.from_file_bytes(file.read(4096))
        except OSError as error:
            raise SetupError(f"cannot read the identity file {path}: {error.strerror}") from None
        except ValueError as error:
            what = "Move it away to get a new identity, or name another file."
            raise SetupError(f"{path} is not an identity file: {error}. {what}") from None


# --- addresses ----------------------------------------------------------------------------------------------

CIRCUIT = "/p2p-circuit"
"""In an address: what is before it is a relay's."""
MAX_ADDRESSES = 16
"""Of one peer; what a stranger says beyond them is not read."""
MAX_ADDRESSED = 65_536
"""Peers whose addresses are kept, as many as records."""
IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressBook:
    """Where peers can be dialled. Of too many, those that were learnt of longest ago are forgotten."""

    def __init__(self) -> None:
        self._known: dict[PeerId, tuple[str, ...]] = {}

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Dial the peer at these from now on (multiaddrs, with or without `/p2p/...`)."""
        self._known.pop(peer, None)
        self._known[peer] = tuple(addresses)
        if len(self._known) > MAX_ADDRESSED:
            del self._known[next(iter(self._known))]

    def of(self, peer: PeerId) -> tuple[str, ...]:
        return self._known.get(peer, ())

    def latest(self, count: int) -> list[PeerId]:
        """The peers that were learnt of last, the latest first."""
        return list(islice(reversed(self._known), count))


class Endpoint(NamedTuple):
    """What a direct address says besides the peer's id."""

    kind: str
    """`ip4`, `ip6`, `dns`, `dns4` or `dns6`."""
    host: str
    port: int

    @property
    def ip(self) -> IpAddress | None:
        """None if it is a name, or nothing that p2pd reads as an address."""
        with contextlib.suppress(ValueError):
            ip = plain_ip(self.host)
            return ip if self.kind == f"ip{ip.version}" else None
        return None


def endpoint_of(address: str) -> Endpoint | None:
    """Where a multiaddr leads that can be dialled directly by TCP; None for any other."""
    match without_peer_id(address).split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6" as kind, host, "tcp", port]:
            is_number = port.isascii() and port.isdigit() and len(port) <= 5
            return Endpoint(kind, host, int(port)) if is_number else None
    return None


def tcp_endpoints(addresses: Sequence[str]) -> list[Endpoint]:
    """Where these lead, if all of them can be dialled directly by TCP; else nothing."""
    endpoints = [endpoint_of(address) for address in addresses[:MAX_ADDRESSES]]
    known = [endpoint for endpoint in endpoints if endpoint is not None]
    return known if len(known) == len(endpoints) else []


def is_relay(address: str) -> bool:
    """Whether this names a peer and an IP address to dial it at. p2pd ends with a panic on anything else."""
    place, _, peer = address.rpartition("/p2p/")
    found = endpoint_of(place)
    return (
        place == without_peer_id(place) and found is not None and found.ip is not None
        and 0 < found.port < 65536 and public_key_of(peer) is not None
    )  # fmt: skip


def is_public(address: str) -> bool:
    """Whether others on the internet may dial this: a relay's address that is of no local network."""
    endpoint = endpoint_of(address)
    return is_relay(address) and endpoint is not None and endpoint.ip is not None and endpoint.ip.is_global


def is_loopback(address: str) -> bool:
    """Whether only this machine can dial this multiaddr or host. Raises SetupError: it is neither."""
    endpoint = endpoint_of(address if address.startswith("/") else f"{host_part(address)}/tcp/1")
    return endpoint is not None and endpoint.ip is not None and endpoint.ip.is_loopback


def plain_ip(host: str) -> IpAddress:
    """The IP address, if that is all it is; else ValueError.

    For Python `fe80::1%anything` is an address too, whatever follows the `%`; for p2pd it is none.
    """
    if "%" in host:
        raise ValueError(f"{host!r} has a scope")
    return ipaddress.ip_address(host)


def to_multiaddr(address: str, before: str = "") -> str:
    """`/ip4/...` as it is; `host:port` as a multiaddr, by `host_part`. Raises SetupError: neither; port 0."""
    if address.startswith("/"):
        if address.rstrip("/").endswith("/tcp/0"):
            raise SetupError(f"announced address {address!r} has port 0: name the port that others can dial")
        return address
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise SetupError(f"{address!r} is not an address: write host:port or /ip4/1.2.3.4/tcp/31337")
    return f"{host_part(host, before)}/tcp/{int(port)}"


def host_part(host: str, before: str = "") -> str:
    """The start of a multiaddr, as in `before` if a name leads there. Raises SetupError: no IP or name."""
    if "%" in host:
        raise SetupError(f"{host!r} has a scope (%...), which p2pd does not understand: leave it out")
    try:
        version = ipaddress.ip_address(host.strip("[]")).version
    except ValueError:
        try:
            found = socket.getaddrinfo(host, None, 0, socket.SOCK_STREAM)
        except OSError:
            raise SetupError(f"{host!r} is not an address and has no name server entry") from None
        hosts = [str(one[4][0]) for one in sorted(found, key=lambda one: one[0] != socket.AF_INET)]
        host = next((one for one in hosts if f"/{one}/" in before), hosts[0])  # IPv4, if there is any
        version = ipaddress.ip_address(host).version
    return f"/ip{version}/{host.strip('[]')}"


def with_peer_id(addresses: Iterable[str], peer_id: PeerId) -> tuple[str, ...]:
    """Addresses that others can paste: each ends in `/p2p/<peer id>`."""
    return tuple(f"{without_peer_id(address)}/p2p/{peer_id}" for address in addresses)


def without_peer_id(address: str) -> str:
    """What is dialled: `/ip4/1.2.3.4/tcp/5`, or with a relay `/ip4/1.2.3.4/tcp/5/p2p/<relay>/p2p-circuit`."""
    relay, circuit, _ = address.partition(CIRCUIT)
    return relay + circuit if circuit else address.split("/p2p/")[0]


def split_peer_id(address: str) -> tuple[str, PeerId]:
    """`/ip4/1.2.3.4/tcp/5/p2p/12D3...` into what is dialled, and the id. Raises SetupError: it has no id."""
    check_peer_address("the address", address)
    transport, _, peer_id = address.rpartition("/p2p/")
    return transport, peer_id


def by_peer(addresses: Iterable[str]) -> dict[PeerId, list[str]]:
    """Addresses, all of which end in a peer's id: without it, by peer. Raises as `split_peer_id` does."""
    places: dict[PeerId, list[str]] = {}
    for address in addresses:
        place, peer = split_peer_id(address)
        places.setdefault(peer, []).append(place)
    return places
