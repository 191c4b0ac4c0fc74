"""How long the network waits: one object, given to everything that waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NetTimings:
    """Waiting times, in seconds."""

    # -- a stream
    tick_s: float = 0.25
    """Between two checks of a stream's clocks."""
    alive_every_s: float = 1.0
    silence_s: float = 3.5
    """Three heartbeats and a half."""
    send_stall_s: float = 10.0
    """A peer that takes none of an answer for this long is given up."""

    # -- calls
    dial_s: float = 4.0
    """For connecting and opening a stream; a round trip around the world takes 0.3 s, and TLS some of them. A
    peer that is cut off should not be noticed later than by silence."""
    revival_s: float = 10.0
    """How long a call waits for our own p2pd to be started again, which takes 0.3 s: no other is to blame."""
    punched_after_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    """When to check, each time after the last, whether libp2p found a direct path beside a relayed one."""

    # -- a direct connection beside p2pd
    direct_s: float = 2.0
    """For each of its steps: asking, connecting, opening. Only bodies wait for it, so long at most."""
    direct_again_s: float = 60.0
    """Not tried again for so long after it failed or broke; twice as long each time."""
    direct_again_most_s: float = 3600.0
    grant_s: float = 10.0
    """How long it may be opened after it was granted."""
    knock_s: float = 2.0
    """How long a stranger on its port may take to say what opens it."""

    # -- p2pd
    control_s: float = 5.0
    """For requests that p2pd answers from its own memory (1 ms on an idle core)."""
    probe_every_s: float = 5.0
    """A p2pd that answers none of four probes in a row hangs, and is killed. 40 s: a machine may be busy."""
    revivals: int = 8
    """Deaths of p2pd in a row after which we give up: about half a minute, with the pauses between them."""

    # -- relays
    relay_s: float = 15.0
    """How long a relay may take to accept us; one does so in 0.2 s, at most two are used."""
    revival_relay_s: float = 5.0
    """The same when p2pd was started again: calls wait for that. A relay that comes later is announced."""
    reserve_s: float = 10.0
    """The same when one relay is tried alone."""
    observers_s: float = 4.0
    """Once a relay took us, we wait so long for other observers to be connected: one of them may be gone."""
    notice_s: float = 1.0
    """Until libp2p believes an address, besides twice the time that connecting took: observers tell it within
    two round trips more, and it checks 0.25, 0.75, 1.75, 3.75 … s after its start."""
    relayless_s: float = 30.0
    """Without a relay for so long, others are tried. p2pd tries those that it has again and again."""

    # -- the directory; all but the last two are stretched in a large run
    refresh_s: float = 2.0
    renew_s: float = 5.0
    life_s: float = 20.0
    """A dead peer's record is gone after this; four renewals may be lost before a living one's is."""
    search_every_s: float = 30.0
    """For the nodes near the keys that are read often."""
    manifest_life_s: float = 300.0
    """It is renewed three times in that."""
    greet_every_s: float = 5.0
    """How often those to join at are dialled while we have lost them."""


DEFAULT_TIMINGS = NetTimings()
