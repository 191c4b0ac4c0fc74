"""`swarm bootstrap`, `peer`, `train` and `keeper`. Each puts a loop that knows only ports on a node."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shlex
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from peers import options as arg
from peers.clock import now_s, unix_s
from peers.device import choose_device
from peers.events import Emit, JoinLine, Note, Started, Trouble
from peers.net.charter.entry import allowed_stages, enter
from peers.net.charter.signed import read_charter, write_charter
from peers.net.direct.memory import machine_of
from peers.net.identity import Identity, is_loopback
from peers.net.nat import listening_host, settled
from peers.net.node import Node
from peers.net.p2pd import Daemon, DaemonOptions
from peers.owner.commands import Owner
from peers.owner.control_socket import PeerAnswer, obeying
from peers.programs.manifest_pinning import check_code, pinned
from peers.programs.stage_choice import check_stages, choose_stage, unserved
from peers.start_line import TRAINED_ON, TRAINER_KEY, allowing, as_given, program, start_line
from peers.storage import atomic_file, cache_folder, charters_folder, results_folder
from peers.system import usable_cores
from peers.waiting import end_tasks, happens, unless
from swarm.charter import MAX_LEFT_S, Role, succeed
from swarm.errors import Refused, SetupError, SwarmError, count, stages_named
from swarm.ids import Stage
from swarm.manifest import Run, load_run, parse_run

if TYPE_CHECKING:  # torch is imported while p2pd starts
    from peers.stage.server import StagePeer
    from peers.transfer.leases import Snapshot
    from swarm.model.stage import StageCompute

OptionsT = TypeVar("OptionsT", bound=arg.NetworkOptions)
PreparedT = TypeVar("PreparedT")
RoleName: TypeAlias = Literal["bootstrap", "peer", "train", "keeper", "audit"]
AS: dict[str, Role] = {"peer": "peer", "train": "trainer", "keeper": "keeper", "audit": "peer"}
"""What a program is admitted as. A trainer that audits is admitted as a trainer."""
RENEWED_S = 10 * 86_400
"""A bootstrap with the owner's key renews a charter that expires within this."""
RENEW_EVERY_S = 60.0
"""Not before it was up for so long: by then it has heard of what the owner signed while it was away."""
GPU_WORKERS = 2
"""One reads and writes bytes of the host while the other's kernels run."""
CELLS_SHOWN = 4


class Networked(Generic[OptionsT]):
    preparing = True
    """Until it does what others count on: a signal ends it at once, whatever its threads do."""
    loop: Any = None
    """What is told to leave."""

    def __init__(self, options: OptionsT, *, emit: Emit) -> None:
        self.options, self._emit = options, emit
        self._node: Node | None = None

    def _note(self, text: str) -> None:
        self._emit(Note(text=text))

    def _tell_building(self, run: Run) -> None:
        if run.brings_model:
            self._note(f"builds and traces the model of {run.name!r}: seconds, or minutes if it is large")

    async def _run(self, loop: Any) -> None:
        self.loop, self.preparing = loop, False
        await loop.run()

    async def leave(self) -> None:
        if self.loop is not None:
            self.loop.leave()

    async def connected(self) -> int:
        """How many peers p2pd is connected to.

        Raises:
            SwarmError: there is no p2pd yet, or it does not answer.
        """
        if self._node is None:
            raise SwarmError("not in the network yet")
        return len(await self._node.control.connections())

    async def _daemon_options(self, join: Sequence[str], *, dialled: bool = True) -> DaemonOptions:
        """How p2pd is started, once it is known whether others can dial this machine (`dialled`: must)."""
        options = self.options
        wanted = DaemonOptions(
            host=listening_host(options.host, join, options.announce), port=options.port,
            announce=options.announce, be_relay=not options.no_relay, direct=not options.no_direct,
            direct_port=options.direct_port,
        )  # fmt: skip
        found, words = await settled(wanted, join, options.reach, needed=dialled)
        if words:
            self._emit(Note(text=words))
        return found

    async def _tell_missing(self, options: arg.MemberOptions, node: Node, run: Run, *mine: Stage) -> None:
        """Say which stages no peer serves yet, before a user wonders why nothing happens."""
        missing = unserved(await node.directory.lookup_all(), run, mine)
        if missing:
            names = stages_named(missing)
            if run.cells > run.S:
                names = ", ".join(map(run.place, missing[:CELLS_SHOWN]))
                more = len(missing) - CELLS_SHOWN
                names += f" and {count(more, 'more cell')}" if more > 0 else ""
            allowed = "".join(f" --allow-code {shlex.quote(word)}" for word in options.allow_code)
            self._note(
                f"the run waits for {count(len(missing), 'more peer')}: no peer serves {names} yet. "
                f"Start {'one for each' if missing[1:] else 'it'}, here or elsewhere:\n"
                f"    {start_line('peer', options.run, options.join[0])}{allowed}"
            )

    @contextlib.asynccontextmanager
    async def _joined(
        self, role: RoleName, run: arg.MemberOptions, prepare: Callable[[], PreparedT],
        accepts: Callable[[Run], object] = lambda _: None,
    ) -> AsyncIterator[tuple[Node, Run, PreparedT]]:  # fmt: skip
        """The node in the network, the run's manifest, and what `prepare` found; an error of `accepts` is
        raised at once.

        Meanwhile `prepare` imports torch in a thread, which may take seconds.
        """
        options = await self._daemon_options(run.join, dialled=role not in ("train", "audit"))
        daemon = Daemon.spawn(options, identity_path=self.options.identity)
        prepared = asyncio.ensure_future(asyncio.to_thread(prepare))
        try:
            async with Node(daemon=daemon, join=run.join, run_id=run.run, charters=charters_folder()) as node:
                self._node = node
                if run.max_upload is not None:
                    node.transport.limit_upload(run.max_upload)
                self._emit(started(role, node, node.run_id or ""))
                terms = await unless(prepared, manifest(node, run.allow_code))
                accepts(terms)
                audits = role == "audit" and node.peer_id in terms.admission.trainers
                admitted_as = "trainer" if audits else AS[role]
                stamps = cache_folder() / "stamps"  # each takes minutes to make
                await unless(prepared, enter(node, admitted_as, run.token, stamps, self._note))
                yield node, terms, await prepared
        finally:
            prepared.cancel()


def address_for_others(addresses: Sequence[str]) -> str:
    """The first address that another machine can dial, or else one of this machine only."""
    return next((address for address in addresses if not is_loopback(address)), addresses[0])


class Bootstrap(Networked[arg.BootstrapOptions]):
    """DHT entry point: publishes the manifest and keeps it published."""

    def __init__(self, options: arg.BootstrapOptions, *, emit: Emit) -> None:
        super().__init__(options, emit=emit)
        self._leaving = asyncio.Event()
        self._key: Identity | None = None

    async def run(self) -> None:
        options = self.options
        run = parse_run(sys.stdin.read()) if str(options.manifest) == "-" else load_run(options.manifest)
        if not run.pinned:
            self._tell_building(run)
            run = await asyncio.to_thread(
                pinned, run, options.data, options.tokenizer, options.start, options.eval_data
            )
        self.preparing = False
        wanted = await self._daemon_options(options.join)
        async with Node(
            options=wanted, identity_path=options.identity, join=options.join, run_id=run.id,
            charters=charters_folder(),
        ) as node:  # fmt: skip
            await node.directory.publish_manifest(run)
            await self._publish_charter(node, run, options.charter)
            self._node = node
            self._emit(started("bootstrap", node, run.id))
            charters = node.directory.charters
            called = run.id if charters.charter is None else str(charters.name)
            words = ["--run", called, "--join", address_for_others(node.addresses)]
            if (file := options.join_file) is not None:  # whole or not at all: others wait for it
                with atomic_file.as_setup_error(f"--join-file {file} cannot be written"):
                    atomic_file.write_whole(file, "".join(f"{word}\n" for word in words).encode())
            self._emit(self._join_line(run, words))
            while not await happens(self._leaving, RENEW_EVERY_S):
                await self._renew(node)

    def _join_line(self, run: Run, words: Sequence[str]) -> JoinLine:
        """What starts all else that the run needs."""
        options, path = self.options, self.options.join_file
        begins = program()
        joined = f"@{shlex.quote(str(path))}" if path is not None else shlex.join(words)
        train = f"{begins} train {joined}"
        if run.admission.trainers:  # no other key may train; swarm init puts one beside the owner's
            key = Path(TRAINER_KEY) if options.identity is None else options.identity.with_name(TRAINER_KEY)
            train += f" --identity {shlex.quote(str(key))}"
        code = allowing(run.code)  # the owner starts these
        train = f"{train}{as_given(options, *TRAINED_ON)}{code}"
        others = (train, f"{begins} keeper {joined} --dir ckpt{code}", f"{begins} dashboard {joined}")
        line, local = f"{begins} peer {shlex.join(words)}", is_loopback(words[-1])
        return JoinLine(line=line, stages=run.cells, others=others, local=local)

    async def _publish_charter(self, node: Node, run: Run, path: Path | None) -> None:
        """That of the file, or the one that is known to be newer; which is written there from now on."""
        charters, key = node.directory.charters, self.options.identity
        self._key = None if key is None else await asyncio.to_thread(Identity.load, key)
        if path is None:
            with contextlib.suppress(OSError, Refused):  # none is there
                if key is not None and read_charter(made := key.with_name("charter"))[0].run == run.id:
                    raise SetupError(f"{made} lies beside the key: give it as --charter, or all are admitted")
            if charters.charter is None:
                self._note("without --charter every peer that has the manifest's id is admitted")
            return
        try:
            await charters.offer(*read_charter(path))
        except (OSError, Refused) as error:
            raise SetupError(f"--charter {path} is none that swarm init made: {error}") from None
        if charters.charter is None or charters.charter.run != node.run_id:
            raise SetupError(
                f"{path} is not the charter of the manifest: give both as swarm init made them. A manifest "
                "that was changed since is another run: swarm init NAME --manifest FILE makes it"
            )
        await charters.ask()  # the owner may have signed one while this was away
        await self._renew(node, 0.0)

        def keep() -> None:
            try:
                write_charter(path, charters.owner, charters.sealed)
            except OSError as error:
                self._emit(Trouble(text=f"--charter {path} cannot be written: {error.strerror}"))

        keep()
        node.door.on_change.append(keep)

    async def _renew(self, node: Node, left_s: float = RENEWED_S) -> None:
        """Renew the charter, if the key is its owner's, and it expires within `left_s` or too far ahead."""
        charters, key = node.directory.charters, self._key
        if (charter := charters.charter) is None or key is None or key.peer_id != charters.owner:
            return
        if not left_s < charter.expires - (now := unix_s()) <= MAX_LEFT_S:
            await charters.publish(succeed(charter, now=now), key)
            self._note(f"the charter was renewed: it is {charter.sequence + 1} now")

    async def leave(self) -> None:
        self._leaving.set()


def started(role: RoleName, node: Node, run_id: str) -> Started:
    """The event of a program that can be reached."""
    return Started(role=role, peer=node.peer_id, addresses=node.addresses, run=run_id, pid=os.getpid())


async def manifest(node: Node, allow_code: Sequence[str] = ()) -> Run:
    """The manifest of the run that `node` is of, from the DHT.

    Args:
        allow_code: packages that it may name functions of, besides those that are declared for it.

    Raises:
        SetupError: it is not acceptable, names other code, or leaves open what its model is: no peer could
            see a difference.
    """
    run = await node.manifest()
    check_code(run, allow_code)
    if run.brings_model and not run.pinned:
        what = "which data or model it has: its owner has to publish it anew"
        raise SetupError(f"run {run.id} does not say {what}")
    return run


class Peer(Networked[arg.PeerOptions]):
    """Serves a stage on this machine's device."""

    _movable = False

    def __init__(self, options: arg.PeerOptions, *, emit: Emit) -> None:
        """Raises SetupError: the options are those of several peers."""
        if options.stages:
            raise SetupError("--stages is for several devices (--device all, or cuda:0,cuda:1): take --stage")
        super().__init__(options, emit=emit)
        self.loop = self.owner = Owner()

    async def run(self) -> None:
        options = self.options
        chosen = [] if options.stage == "auto" else [options.stage]
        accepts = partial(check_stages, "--stage", chosen, cells=True)
        async with contextlib.AsyncExitStack() as stack:
            joined = self._joined("peer", options, partial(choose_device, options.device), accepts)
            node, run, device = await stack.enter_async_context(joined)
            import torch

            from peers.storage.start_weights import offer_start

            torch.set_num_threads(1)  # cores are for several microbatches at once
            await asyncio.to_thread(offer_start, run, options.start)
            await self._obey_the_owner(stack, node, device)
            if options.pause_when_busy:
                self._watch_the_device(stack, device)
            self._tell_building(run)
            stage = await self._choose_stage(node, run, device)
            await self._tell_missing(options, node, run, stage)
            await self._serve(node, run, stage, device)

    async def _obey_the_owner(self, stack: contextlib.AsyncExitStack, node: Node, device: str) -> None:
        """A peer that cannot be paused works all the same."""
        owner, identity = self.owner, self.options.identity
        path = "" if identity is None else str(identity.absolute())

        def about() -> PeerAnswer:
            return PeerAnswer(
                pid=os.getpid(), peer=node.peer_id, device=device, identity=path, doing=owner.doing,
                words=owner.words,
            )  # fmt: skip

        try:
            await stack.enter_async_context(obeying(owner, about))
        except SetupError as error:
            self._emit(Trouble(text=f"swarm pause will not reach this peer: {error.text}"))

    def _watch_the_device(self, stack: contextlib.AsyncExitStack, device: str) -> None:
        """Raises SetupError: it cannot be watched."""
        from peers.owner.gpu_contention import nvml_of, watch
        from swarm.policy.contention import ContentionDetector

        others = nvml_of(device).others
        watching = asyncio.create_task(watch(self.owner, others, ContentionDetector(), self._emit))
        stack.callback(watching.cancel)

    async def _choose_stage(self, node: Node, run: Run, device: str) -> Stage:
        """The one that was given, or of those that fit the one that needs this peer most."""
        if self.options.stage != "auto":
            return allowed_stages(node, [self.options.stage])[0]
        allowed = allowed_stages(node, range(run.cells))
        fits = await asyncio.to_thread(self._fitting, run, allowed, device)
        self._movable, machine = len(fits) == run.cells, machine_of(run.id)
        stage = await choose_stage(node.peer_id, run, node.directory, node.addresses, machine, fits)
        self._emit(Note(text=f"joins {run.place(stage)}, which needs a peer most"))
        return stage

    def _build(self, run: Run, stage: Stage, device: str) -> tuple[StageCompute, int, int]:
        """The stage, how many microbatches it admits, and how many are computed at once: as many as cores, or
        `GPU_WORKERS`, and memory are for.

        Raises:
            SetupError: it does not fit; before anything is fetched.
        """
        import torch

        from peers.device import describe, limit_memory
        from peers.owner.memory_limit import needs_of
        from swarm.model.stage import StageCompute

        options, most = self.options, self.options.max_vram
        host_sums = options.host_sums and device != "cpu"
        needs = needs_of(run, stage, host_sums=host_sums)
        needs.check(most)
        needs.check_device(device, describe(device).total_bytes)
        limit_memory(device, most)
        admits = options.max_inflight
        try:
            compute = StageCompute(
                run, stage, device, recompute=options.recompute, recompute_layers=options.recompute_layers,
                host_sums=host_sums,
            )  # fmt: skip
            compute.use_lock(threading.Lock())
            if admits == "auto" or most is not None:
                measured = needs_of(run, stage, microbatch=compute.saved_bytes(), host_sums=host_sums)
                measured.check(most)
                free, host_free = describe(device).free_bytes, describe("cpu").free_bytes
                fits = measured.inflight(free, most, host_free=host_free)
                admits = fits if admits == "auto" else min(fits, admits)
        except torch.OutOfMemoryError as error:
            raise SetupError(f"stage {stage} does not fit on {device} now: {error}") from None
        wanted = 1 if device == "mps" else GPU_WORKERS
        if device == "cpu":
            wanted = (options.threads or usable_cores()) // run.batch.microbatch_threads
        return compute, admits, max(1, min(wanted, needs.workers(describe(device).free_bytes, most)))

    def _fitting(self, run: Run, cells: Sequence[Stage], device: str) -> list[Stage]:
        """Those whose stages fit: one that did not would be lost to the run. Raises SetupError: none does."""
        from peers.device import describe
        from peers.owner.memory_limit import gib, needs_of
        from swarm.model.stage import foretold_bytes

        options, most, island = self.options, self.options.max_vram, run.island(0)
        counts = most is not None and not (options.recompute or options.recompute_layers)
        stages, host_sums = {cell % run.S for cell in cells}, options.host_sums and device != "cpu"
        kept = {stage: foretold_bytes(island, stage) if counts else 0 for stage in stages}
        least = {s: needs_of(island, s, microbatch=kept[s], host_sums=host_sums).least for s in stages}
        total, smallest = describe(device).total_bytes, min(least.values())
        if smallest > (room := total if most is None else min(most, total)):
            raise SetupError(
                f"no stage that this peer may serve fits: the smallest needs {gib(smallest)}, and "
                f"{gib(room)} of {device} are given: give more, take a larger device, or have the run's "
                "owner cut the model into more stages (model.stages)"
            )
        return [cell for cell in cells if least[cell % run.S] <= room]

    async def _serve(self, node: Node, run: Run, stage: Stage, device: str) -> None:
        """Serve a stage, and others if they need this device more, until the owner has it leave."""
        from peers.islands.directory import split_cell
        from peers.stage import pause as paused
        from peers.stage.server import StagePeer
        from peers.stage.settings import Checkpoints, StageSettings
        from peers.transfer.start import FetchedStart
        from peers.vouching.own import OwnVoucher

        options, owner, emit = self.options, self.owner, self._emit
        checkpoints = None
        if options.checkpoint_dir is not None:
            checkpoints = Checkpoints(folder=options.checkpoint_dir, keep=options.keep)
        elif (folder := results_folder()) is not None:
            checkpoints = Checkpoints(folder=folder, keep=1, only_last=True)

        key, started_at = options.identity, now_s()
        voucher = OwnVoucher(None if key is None else key.with_name(f"{key.name}.voucher"))

        def settings(max_inflight: int, workers: int = 1) -> StageSettings:
            return StageSettings(
                max_inflight=max_inflight, workers=workers, device_name=device, addresses=node.addresses,
                machine=machine_of(run.id), checkpoints=checkpoints, joined_at=time.time(),
                started_at=started_at, movable=self._movable, upload_bps=options.max_upload or 0.0,
                leave_within_s=options.leave_within, pause_within_s=options.pause_within, voucher=voucher,
            )  # fmt: skip

        fetched = FetchedStart(run)

        async def build(cell: Stage, kept: Snapshot | None) -> StagePeer:
            island, stage = split_cell(run, cell)
            if run.cells > run.S:
                emit(Note(text=f"this peer is for {run.place(cell)}"))
            await fetched.prepare(stage, node.transport, node.directory, emit)
            compute, *room = await asyncio.to_thread(self._build, island, stage, device)
            self.preparing, mine = False, settings(*room)
            node.door.stage = cell
            peer = StagePeer(island, stage, compute, node.transport, node.directory, mine, emit, kept=kept)
            node.transport.on_gone = peer.peer_gone
            return peer

        def hold(cell: Stage, kept: Snapshot | None) -> paused.PausedPeer:
            node.transport.on_gone = None
            return paused.PausedPeer(
                *split_cell(run, cell), kept, node.transport, node.directory, settings(1), owner
            )

        await paused.PeerLife(stage, owner, build, hold, place=run.place, device=device, emit=emit).run()


class Train(Networked[arg.TrainOptions]):
    """Feeds microbatches to a run."""

    async def run(self) -> None:
        options = self.options
        async with self._joined("train", options, lambda: None) as (node, run, _):
            from peers.islands.trainers import IslandTrainers
            from peers.storage.dataset import Dataset
            from peers.storage.index import index_among
            from peers.storage.samples import fetch_eval, open_data, open_eval
            from peers.trainer import TrainerSettings
            from peers.transfer.blocks import BlockExchange

            batches = await asyncio.to_thread(
                open_data, run, options.data, options.tokenizer, options.cache_size
            )
            if run.brings_model:
                from swarm.model.custom import custom_model

                self._tell_building(run)
                await asyncio.to_thread(custom_model, run)  # once
            held_out = await asyncio.to_thread(open_eval, run, options.eval_data, options.tokenizer)
            opened = ((options.data, batches), (options.eval_data, held_out))
            of_index = [d.blocks for at, d in opened if isinstance(d, Dataset) and index_among(at)]
            gives = bool(of_index) and not options.no_share
            exchange = BlockExchange(run, node.transport, node.directory, of_index, self._emit, gives=gives)
            await asyncio.to_thread(fetch_eval, run, held_out)
            await self._tell_missing(options, node, run)
            window = None if options.window == "auto" else options.window
            settings = TrainerSettings(window=window, steps=options.steps)
            trainers = IslandTrainers(
                run, batches, node.transport, node.directory, settings, self._emit, held_out=held_out
            )
            announcing = [asyncio.create_task(exchange.announce(node.addresses))] if gives else []
            try:
                await self._run(trainers)
            finally:
                await end_tasks(announcing)


class Keeper(Networked[arg.KeeperOptions]):
    """Keeps checkpoints on this machine's disk, and gives them to newcomers."""

    async def run(self) -> None:
        options = self.options
        prepare = partial(importlib.import_module, "peers.transfer.keeper")
        accepts = partial(kept_stages, chosen=options.stages)
        async with self._joined("keeper", options, prepare, accepts) as (node, run, _):
            from peers.transfer.keeper import CheckpointKeeper, KeepingSettings

            settings = KeepingSettings(
                folder=options.dir, keep=options.keep, stages=kept_stages(run, options.stages),
                addresses=node.addresses, joined_at=time.time(),
                charter=lambda: (node.directory.charters.owner, node.directory.charters.sealed),
            )  # fmt: skip
            keeping = CheckpointKeeper(run, node.transport, node.directory, settings, self._emit)
            node.transport.on_gone = keeping.leases.gone
            if options.data is not None:
                from peers.storage.dataset import Dataset
                from peers.storage.samples import open_data
                from peers.transfer.blocks import BlockExchange

                data = await asyncio.to_thread(open_data, run, [options.data])
                assert isinstance(data, Dataset), "files are not samples that code makes"
                BlockExchange(run, node.transport, node.directory, [data.blocks], self._emit)
            await self._run(keeping)


def kept_stages(run: Run, chosen: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The stages to keep, ascending; all if none is chosen. Raises SetupError: the run has no such stage."""
    check_stages("--stages", chosen, run)
    return tuple(sorted(set(chosen))) or tuple(range(run.S))
