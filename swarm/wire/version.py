"""The number of the protocol. Peers with different numbers do not take part in one run, and say so."""

from __future__ import annotations

PROTOCOL_VERSION = 24
"""Raised by any change after which peers of before and after would misunderstand each other, or disagree on a
run: frames, messages, records, rules of a step, arithmetic. Programs from before the number count as 0."""


def differ(one: str, one_version: int, other: str, other_version: int) -> str:
    """The sentence that two programs cannot work together, and what to do."""
    return (
        f"{one} speaks version {one_version} of the swarm's protocol, {other} version {other_version}: "
        "update the older program"
    )
