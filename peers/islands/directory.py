"""The directory as one island of a run sees it.

In the directory the stages of all islands are numbered in a row, as cells (`Run.cells`). An island's own
loops know nothing of the others: to them its cells are the stages of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec.structs import replace

from peers.events import Emit, Event
from peers.ports import Directory
from peers.voices import Voices
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.statements import Signer
from swarm.records import NO_STAGE, PeerRecord


def own_directory(run: Run, directory: Directory) -> Directory:
    """The directory as an island sees it, from that of the whole run; the same, if the run has no islands."""
    return directory if run.cells == run.S else IslandDirectory(run, directory)


class Island:
    """An island of a run, as its peers and the others see it."""

    def __init__(self, run: Run, signer: Signer, directory: Directory, version: Callable[[], int]) -> None:
        """`run`: its terms, under its own id; `directory`: that of the whole run."""
        self.run, self.directory = run, own_directory(run, directory)
        self.voices = Voices(run, signer, self.directory, version)


class Islands:
    """All islands of a run, as a peer of one of them sees them; a run without islands is its only one."""

    def __init__(self, run: Run, signer: Signer, directory: Directory, version: Callable[[], int]) -> None:
        """`run`: the peer's own island; `directory`: that of the whole run; `version`: where the run is."""
        self.own, self._directory = run, directory
        terms = [run.island(number) for number in range(run.whole.islands.count)]
        self.all = [Island(one, signer, directory, version) for one in terms]
        self.others = [number for number, one in enumerate(terms) if one != run]

    def voice(self, stages: Iterable[Stage] | None = None) -> dict[PeerId, int]:
        """How much the word of each peer counts that serves one of these stages, on any island; None: all."""
        return {peer: weight for one in self.all for peer, weight in one.voices.of_all(stages).items()}

    async def others_records(self) -> list[PeerRecord]:
        """The records of all peers of other islands, by their stages there, and of keepers, as they are."""
        S, records = self.own.S, await self._directory.lookup_all()
        there = [r for r in records if r.stage == NO_STAGE or r.stage // S in self.others]
        return [replace(r, stage=r.stage if r.stage == NO_STAGE else r.stage % S) for r in there]


def telling_cells(run: Run, emit: Emit) -> Emit:
    """`emit` for a peer or trainer of an island: where it says a stage, it says the cell."""

    def told(event: Event) -> None:
        stage = getattr(event, "stage", None)
        emit(replace(event, stage=run.cell(stage)) if isinstance(stage, int) and stage >= 0 else event)

    return told if run.cells > run.S else emit


def split_cell(run: Run, cell: Stage) -> tuple[Run, Stage]:
    """The island that a cell belongs to, and its stage there; a run without islands is its own."""
    number, stage = divmod(cell, run.S)
    return run.island(number), stage


class DirectoryView:
    """A directory of which only some records are seen, perhaps changed. Fulfils `peers.ports.Directory`."""

    def __init__(
        self, directory: Directory, seen: Callable[[PeerRecord], PeerRecord | None],
        state: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """`seen`: a record as it is seen; None: not at all. `state`: what that depends on, if anything."""
        self._directory, self._seen, self._state = directory, seen, state
        self._shown: dict[Stage | None, tuple[Sequence[PeerRecord], object, Sequence[PeerRecord]]] = {}

    def _cell(self, stage: Stage) -> Stage:
        """What the whole directory calls a stage."""
        return stage

    def _cells(self, stages: Collection[Stage] | None) -> Collection[Stage] | None:
        return None if stages is None else {self._cell(stage) for stage in stages}

    def _all_seen(self, records: Sequence[PeerRecord]) -> list[PeerRecord]:
        return [seen for record in records if (seen := self._seen(record)) is not None]

    def _same(self, key: Stage | None, records: Sequence[PeerRecord]) -> Sequence[PeerRecord]:
        """The same object as long as nothing has changed."""
        known, state = self._shown.get(key), self._state and self._state()
        if known is None or known[0] is not records or known[1] != state:
            known = self._shown[key] = (records, state, self._all_seen(records))
        return known[2]

    def watch(self, stages: Collection[Stage] | None) -> None:
        self._directory.watch(self._cells(stages))

    def peers(self) -> Sequence[PeerRecord]:
        return self._same(None, self._directory.peers())

    def at(self, stage: Stage) -> Sequence[PeerRecord]:
        return self._same(stage, self._directory.at(self._cell(stage)))

    def find(self, peer: PeerId) -> PeerRecord | None:
        found = self._directory.find(peer)
        return self._seen(found) if found is not None else None

    @property
    def lag_s(self) -> float:
        return self._directory.lag_s

    async def refresh(self, stages: Collection[Stage] | None = None) -> Sequence[PeerRecord]:
        return self._all_seen(await self._directory.refresh(self._cells(stages)))

    async def lookup_all(self) -> Sequence[PeerRecord]:
        return self._all_seen(await self._directory.lookup_all())

    async def announce(self, record: PeerRecord) -> None:
        await self._directory.announce(record)

    async def withdraw(self) -> None:
        await self._directory.withdraw()


class IslandDirectory(DirectoryView):
    """The view of one island; keepers, which serve all, are in each."""

    def __init__(self, run: Run, directory: Directory) -> None:
        """`run`: the island's terms."""
        super().__init__(directory, self._own)
        self._run, self._first = run, run.cell(0)

    def _cell(self, stage: Stage) -> Stage:
        return stage if stage == NO_STAGE else self._first + stage

    def _own(self, record: PeerRecord) -> PeerRecord | None:
        stage = record.stage - self._first
        if record.stage == NO_STAGE:
            return record
        return replace(record, stage=stage) if 0 <= stage < self._run.S else None

    def watch(self, stages: Collection[Stage] | None) -> None:
        super().watch(range(self._run.S) if stages is None else stages)

    async def announce(self, record: PeerRecord) -> None:
        await super().announce(replace(record, run=self._run.whole.id, stage=self._cell(record.stage)))
