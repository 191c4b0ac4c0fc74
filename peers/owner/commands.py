"""What the owner of this machine wants of a peer: that it works, pauses, or leaves.

A command holds at once, whatever the peer is doing. `peers.stage.pause` carries it out;
`peers.owner.control_socket` and `peers.owner.gpu_contention` only give it here.
"""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol, TypeAlias

from peers.waiting import pulse

NO_ROOM = "no room"
"""The reason of a pause for which the device has no room for the stage."""

Doing: TypeAlias = Literal["starting", "serving", "pausing", "paused", "leaving"]


class Stoppable(Protocol):
    """What serves a stage now."""

    def leave(self) -> None: ...

    def pause(self) -> None: ...


class Owner:
    """The command in force, and how far it is carried out.

    There may be several reasons to pause at once, each by its name (`by hand`, `busy`, `NO_ROOM`); the device
    is used again when none is left.
    """

    def __init__(self) -> None:
        self.left = False
        """For good: a pause does not matter any more."""
        self.doing: Doing = "starting"
        self.words = ""
        """About `doing`, for people."""
        self._reasons: dict[str, str] = {}
        self._serving: Stoppable | None = None
        self.changed = asyncio.Event()
        """Is set when a command or what is done changes next; then another event takes its place."""

    @property
    def paused(self) -> bool:
        """Whether the owner wants the device now."""
        return bool(self._reasons) and not self.left

    @property
    def why(self) -> str:
        """All reasons to pause."""
        return "; ".join(self._reasons.values())

    # -- commands ---------------------------------------------------------------------------------

    def pause(self, by: str, why: str) -> None:
        """Hand the device back. Saying it again changes nothing but the words."""
        self._reasons[by] = why
        if self._serving is not None:
            self._serving.pause()
            self.doing = "leaving" if self.left else "pausing"
        pulse(self.changed)

    def resume(self, *by: str) -> None:
        """Take back the commands of those; none named: of all."""
        for name in by or tuple(self._reasons):
            self._reasons.pop(name, None)
        pulse(self.changed)

    def leave(self) -> None:
        """The peer ends in good order."""
        self.left, self.doing = True, "leaving"
        if self._serving is not None:
            self._serving.leave()
        pulse(self.changed)

    # -- how far it is ----------------------------------------------------------------------------

    def serves(self, serving: Stoppable | None) -> None:
        """Send commands there from now on; those of before, too."""
        self._serving = serving
        if serving is not None and self.left:
            serving.leave()
        elif serving is not None and self.paused:
            serving.pause()

    def does(self, doing: Doing, words: str = "") -> None:
        self.doing, self.words = doing, words
        pulse(self.changed)
