"""The programs: bootstrap, peer, train. Each puts a loop on a node; the loops themselves know ports only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from peers.events import Emit, JoinLine, Note, Started, Trouble
from peers.net.nat import settled
from peers.net.node import Node
from peers.net.p2pd import Daemon, DaemonOptions
from peers.options import BootstrapOptions, NetworkOptions, PeerOptions, TrainOptions
from peers.owner.commands import Owner
from peers.owner.control_socket import Said, heard
from peers.programs.stage_choice import choose_stage
from peers.storage import results_folder
from swarm.errors import SetupError, SwarmError
from swarm.ids import Stage
from swarm.manifest import Run, check_id, load_run, parse_run

if TYPE_CHECKING:  # torch is imported while p2pd starts
    from peers.stage.server import StagePeer
    from peers.trainer import Trainer
    from peers.transfer.server import Snapshot
    from swarm.model.stage import StageCompute


async def daemon_options(
    options: NetworkOptions, join: Sequence[str], emit: Emit, *, needed: bool = True
) -> DaemonOptions:
    """How p2pd is started, once it is known whether others can dial us. `needed`: they have to."""
    wanted = DaemonOptions(
        host=options.host, port=options.port, announce=options.announce, be_relay=not options.no_relay
    )
    settled_options, words = await settled(wanted, join, options.reach, needed=needed)
    if words:
        emit(Note(text=words))
    return settled_options


class Networked:
    """A program with a node."""

    _node: Node | None = None

    async def connected(self) -> int:
        """How many peers p2pd is connected to.

        Raises:
            SwarmError: there is no p2pd yet, or it does not answer.
        """
        if self._node is None:
            raise SwarmError("not in the network yet")
        return await self._node.peer_count()


def to_hand_out(addresses: Sequence[str]) -> str:
    """The first address that another machine can dial, or else one of this machine only."""
    return next((a for a in addresses if not a.startswith(("/ip4/127.", "/ip6/::1/"))), addresses[0])


class Bootstrap(Networked):
    """DHT entry point: publishes the manifest and keeps it published."""

    def __init__(self, options: BootstrapOptions, *, emit: Emit) -> None:
        self._options, self._emit = options, emit
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        options = self._options
        run = parse_run(sys.stdin.read()) if str(options.manifest) == "-" else load_run(options.manifest)
        if not run.pinned:
            from peers.programs.manifest_pinning import pinned
            from peers.storage.samples import open_data

            run = pinned(run, open_data(run, options.data, options.tokenizer))
        async with Node(
            options=await daemon_options(options, options.join, self._emit),
            identity_path=options.identity,
            join=options.join,
            run_id=run.id,
        ) as node:
            await node.directory.publish_manifest(run.to_toml())
            self._node = node
            self._emit(started("bootstrap", node, run.id))
            words = ["--run", run.id, "--join", to_hand_out(node.addresses)]
            if options.join_file is not None:
                write_join_file(options.join_file, words)
            self._emit(JoinLine(line=f"swarm peer {' '.join(words)}"))
            await self._leaving.wait()

    async def leave(self) -> None:
        self._leaving.set()


def write_join_file(path: Path, words: Sequence[str]) -> None:
    """Whole or not at all: others wait for it to be there.

    Raises:
        SetupError: it cannot be written.
    """
    new = path.with_name(path.name + ".new")
    try:
        new.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise SetupError(f"--join-file {path} cannot be written: {error.strerror}") from None


def started(role: Literal["bootstrap", "peer", "train", "keeper"], node: Node, run_id: str) -> Started:
    """What a program says when it can be reached."""
    return Started(role=role, peer=node.peer_id, addresses=node.addresses, run=run_id, pid=os.getpid())


async def manifest(node: Node, run_id: str) -> Run:
    """The manifest that `run_id` is the hash of, from the DHT.

    Raises:
        SetupError: it is not acceptable, or leaves open what its model is: nobody could see a difference.
    """
    run = check_id(await node.directory.fetch_manifest(run_id), run_id)
    if run.brings_model and not run.pinned:
        raise SetupError(
            f"run {run.id} does not say which data or model it has: its owner has to publish it anew"
        )
    return run


class Peer(Networked):
    """Serves a stage on this machine's device."""

    def __init__(self, options: PeerOptions, *, emit: Emit) -> None:
        self._options, self._emit = options, emit
        self.owner = Owner()

    async def run(self) -> None:
        options = self._options
        # p2pd starts while torch is imported: both take time, and they use different processes.
        daemon = Daemon.spawn(
            await daemon_options(options, options.join, self._emit), identity_path=options.identity
        )
        try:
            import torch

            from peers import device

            name = device.choose_device(options.device)
            torch.set_num_threads(1)  # cores are for several microbatches at once
        except BaseException:
            daemon.close_now()
            raise
        async with Node(daemon=daemon, join=options.join, run_id=options.run) as node:
            self._node = node
            if options.max_upload is not None:
                node.transport.limit_upload(options.max_upload)
            self._emit(started("peer", node, options.run))
            run = await manifest(node, options.run)
            async with contextlib.AsyncExitStack() as stack:
                await self._hear_the_owner(stack, node, name)
                if options.pause_when_busy:
                    self._watch_the_device(stack, name)
                stage = await self._choose_stage(node, run)
                await self._serve(node, run, stage, name)

    async def leave(self) -> None:
        self.owner.leave()

    async def _hear_the_owner(self, stack: contextlib.AsyncExitStack, node: Node, device: str) -> None:
        """A peer that cannot be paused works all the same."""
        owner, identity = self.owner, self._options.identity
        path = "" if identity is None else str(identity.absolute())

        def said() -> Said:
            return Said(
                pid=os.getpid(), peer=node.peer_id, device=device, identity=path, doing=owner.doing,
                words=owner.words,
            )  # fmt: skip

        try:
            await stack.enter_async_context(heard(owner, said))
        except SetupError as error:
            self._emit(Trouble(text=f"swarm pause will not reach this peer: {error.text}"))

    def _watch_the_device(self, stack: contextlib.AsyncExitStack, device: str) -> None:
        """Raises SetupError: it cannot be watched."""
        from peers.owner.gpu_contention import nvml_of, watch
        from swarm.policy.contention import ContentionDetector

        watching = asyncio.create_task(watch(self.owner, nvml_of(device), ContentionDetector(), self._emit))
        stack.callback(watching.cancel)

    async def _choose_stage(self, node: Node, run: Run) -> Stage:
        wish = self._options.stage
        if wish != "auto":
            if wish >= run.S:
                raise SetupError(f"--stage {wish}: run {run.name!r} has stages 0 to {run.S - 1}")
            return wish
        stage = await choose_stage(node.peer_id, run, node.directory, node.addresses)
        self._emit(Note(text=f"stage {stage} is taken: it is among the slowest"))
        return stage

    def _build(self, run: Run, stage: Stage, device: str) -> tuple[StageCompute, int]:
        """The stage, and how many microbatches it admits.

        Raises:
            SetupError: it does not fit; before anything is fetched.
        """
        import torch

        from peers.device import limit_memory
        from peers.owner.memory_limit import needs_of
        from swarm.model.stage import StageCompute

        options = self._options
        needs_of(run, stage).check(options.max_vram)
        limit_memory(device, options.max_vram)
        try:
            compute = StageCompute(run, stage, device, recompute=options.recompute)
            return compute, self._admits(run, compute, device)
        except torch.OutOfMemoryError as error:
            raise SetupError(f"stage {stage} does not fit on {device} now: {error}") from None

    def _admits(self, run: Run, compute: StageCompute, device: str) -> int:
        """Microbatches in flight, by wish or by what fits in the memory that is free now."""
        from peers.device import free_bytes
        from peers.owner.memory_limit import needs_of

        options = self._options
        if options.max_inflight != "auto" and options.max_vram is None:
            return options.max_inflight
        needs = needs_of(run, compute.stage, microbatch=compute.saved_bytes())
        needs.check(options.max_vram)
        fits = needs.inflight(free_bytes(device), options.max_vram)
        return fits if options.max_inflight == "auto" else min(fits, options.max_inflight)

    def _workers(self, run: Run, stage: Stage, device: str) -> int:
        """Microbatches that are computed at once: what cores and memory are for. On a GPU one."""
        from peers.device import free_bytes, usable_cores
        from peers.owner.memory_limit import needs_of

        if device != "cpu":
            return 1
        by_cores = (self._options.threads or usable_cores()) // run.batch.microbatch_threads
        return max(1, min(by_cores, needs_of(run, stage).workers(free_bytes(device), self._options.max_vram)))

    def _fits_anywhere(self, run: Run) -> bool:
        """Whether it may be sent to any stage: one that did not fit there would be lost to the run."""
        from peers.owner.memory_limit import needs_of

        most = self._options.max_vram
        return most is None or all(needs_of(run, stage).least <= most for stage in range(run.S))

    async def _serve(self, node: Node, run: Run, stage: Stage, device: str) -> None:
        """Serve a stage, and others if they need this device more, until the owner has it leave."""
        from peers.stage import pause as paused
        from peers.stage.server import Checkpoints, StagePeer, StageSettings

        options, owner, emit = self._options, self.owner, self._emit
        checkpoints = None
        if options.checkpoint_dir is not None:
            checkpoints = Checkpoints(folder=options.checkpoint_dir, keep=options.keep)
        elif (folder := results_folder()) is not None:
            checkpoints = Checkpoints(folder=folder, keep=1, only_last=True)

        movable = options.stage == "auto" and await asyncio.to_thread(self._fits_anywhere, run)

        def settings(max_inflight: int, workers: int = 1) -> StageSettings:
            return StageSettings(
                max_inflight=max_inflight, workers=workers, device_name=device, addresses=node.addresses,
                checkpoints=checkpoints, joined_at=time.time(), movable=movable,
                leave_within_s=options.leave_within, pause_within_s=options.pause_within,
            )  # fmt: skip

        async def build(stage: Stage, kept: Snapshot | None) -> StagePeer:
            compute, max_inflight = await asyncio.to_thread(self._build, run, stage, device)
            mine = settings(max_inflight, self._workers(run, stage, device))
            peer = StagePeer(run, stage, compute, node.transport, node.directory, mine, emit, kept=kept)
            node.transport.on_gone = peer.peer_gone
            return peer

        def hold(stage: Stage, kept: Snapshot | None) -> paused.PausedPeer:
            node.transport.on_gone = None
            return paused.PausedPeer(run, stage, kept, node.transport, node.directory, settings(1), owner)

        await paused.serve(stage, owner, build, hold, device=device, emit=emit)


class Train(Networked):
    """Feeds microbatches to a run."""

    def __init__(self, options: TrainOptions, *, emit: Emit) -> None:
        self._options, self._emit = options, emit
        self.trainer: Trainer | None = None
        self._left = asyncio.Event()

    async def run(self) -> None:
        options = self._options
        daemon = Daemon.spawn(
            await daemon_options(options, options.join, self._emit, needed=False),
            identity_path=options.identity,
        )
        async with Node(daemon=daemon, join=options.join, run_id=options.run) as node:
            from peers.storage.samples import open_data
            from peers.trainer import Trainer, TrainerSettings

            self._node = node
            self._emit(started("train", node, options.run))
            run = await manifest(node, options.run)
            batches = await asyncio.to_thread(open_data, run, options.data, options.tokenizer)
            if run.brings_model:
                from swarm.model.custom import custom_model

                await asyncio.to_thread(custom_model, run)  # seconds, once
            window = None if options.window == "auto" else options.window
            settings = TrainerSettings(window=window, steps=options.steps)
            self.trainer = Trainer(run, batches, node.transport, node.directory, settings, self._emit)
            if self._left.is_set():
                self.trainer.leave()
            await self.trainer.run()

    async def leave(self) -> None:
        self._left.set()
        if self.trainer is not None:
            self.trainer.leave()
