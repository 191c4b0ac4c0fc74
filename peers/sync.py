"""Bringing a member up to date: the gradient of a step that it missed, or the whole state."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from peers.core import StageCore
from peers.device_thread import Rank
from peers.faultpoints import fault_point
from peers.ports import Answer, Directory, Request, Transport
from peers.reduce import CHUNK_ELEMENTS, checksum, holds, read_part
from swarm.errors import BadAnswer, NotReady, Refused, SetupError, SwarmError
from swarm.ids import PeerId, Stage
from swarm.model.stage import StageCompute
from swarm.policy.rounds import Go, Held
from swarm.run import Run
from swarm.wire.codec import dtype_name, encode
from swarm.wire.messages import (
    FetchChunk,
    FetchVector,
    GoWire,
    OpenState,
    StateOpened,
    StateTensor,
    VectorChunk,
    pack,
    unpack,
    unpack_answer,
)

LEASE_S = 60.0
"""A snapshot is dropped when nobody read from it for this long, and before that if it was read to its end."""
MOST_LEASES = 2
"""Snapshots in host memory at once: each is a whole copy of weights and optimizer."""
CALL_S = 30.0
"""Limit for one chunk of 4 MB: a line of 1 Mbit/s just fits."""
MOST_CHUNK_BYTES = CHUNK_ELEMENTS * 8 + 64


@dataclass(slots=True)
class _Lease:
    opened: StateOpened
    tensors: dict[str, torch.Tensor]
    read_at: float
    readers: int = 0
    """Downloads that were opened and have not come to the last chunk."""


class StateServer:
    """Answers members that missed a step, and joiners."""

    def __init__(self, core: StageCore, transport: Transport) -> None:
        self._core = core
        self._leases: dict[str, _Lease] = {}
        transport.serve("held", self._serve_vector)
        transport.serve("state", self._serve_open)
        transport.serve("chunk", self._serve_chunk)

    async def _serve_vector(self, request: Request) -> Answer:
        """A chunk of the reduced gradient of step `t`: held, or applied last."""
        wanted = unpack(request.header, FetchVector)
        self._check_run(wanted.run)
        core, step = self._core, self._core.steps.get(wanted.t)
        if (
            step is not None
            and step.held is not None
            and step.reduced is not None
            and wanted.round in ("", step.held.round)
        ):
            vector, held, total = step.reduced, step.held, -1.0
        elif core.applied is not None and core.applied.go.t == wanted.t:
            vector, held, total = core.applied.reduced, core.applied.held, core.applied.go.total_sqnorm
        else:
            raise NotReady(f"no reduced gradient of step {wanted.t} is held here", version=core.version)
        _check_range(wanted.start, wanted.numel, vector.numel())
        meta, body = encode(vector[wanted.start : wanted.start + wanted.numel], "none")
        chunk = VectorChunk(
            crc=checksum(body), total_numel=vector.numel(), tensors=(meta,), round=held.round,
            sqnorm=held.sqnorm, digest=held.digest, total_sqnorm=total,
        )  # fmt: skip
        return Answer(pack(chunk), body)

    async def _serve_open(self, request: Request) -> Answer:
        """A snapshot between two jobs of the device: all of one version."""
        wanted = unpack(request.header, OpenState)
        core = self._core
        self._check_run(wanted.run)
        if wanted.stage != core.stage:
            raise Refused(f"this peer serves stage {core.stage}, not {wanted.stage}")
        if not core.joined:
            raise NotReady("this peer is joining itself", version=-1, retry_after_s=1.0)
        now = time.monotonic()
        for old in [k for k, lease in self._leases.items() if now - lease.read_at > LEASE_S]:
            del self._leases[old]
        version, go = core.version, core.last_go
        leases = self._leases.values()
        opened = next((lease.opened for lease in leases if lease.opened.version == version), None)
        if opened is None:
            for read in [k for k, lease in self._leases.items() if lease.readers <= 0]:
                del self._leases[read]
            if len(self._leases) >= MOST_LEASES:
                raise NotReady("others are downloading from this peer", version=version, retry_after_s=1.0)
            version, tensors, digest = await core.device.run(Rank.STEP, version, self._snapshot)
            described = await asyncio.to_thread(_describe, tensors)
            opened = StateOpened(
                lease=secrets.token_hex(8), version=version, weights_digest=digest,
                last_go=None
                if go is None or go.t != version - 1
                else GoWire(t=go.t, total_sqnorm=go.total_sqnorm),
                tensors=described,
            )  # fmt: skip
            self._leases[opened.lease] = _Lease(opened, tensors, now)
        lease = self._leases.get(opened.lease)
        if lease is not None:
            lease.readers += 1
        return Answer(pack(opened))

    def _snapshot(self) -> tuple[int, dict[str, torch.Tensor], str]:
        compute = self._core.compute
        return compute.version, compute.state(), compute.digest()

    async def _serve_chunk(self, request: Request) -> Answer:
        wanted = unpack(request.header, FetchChunk)
        self._check_run(wanted.run)
        lease = self._leases.get(wanted.lease)
        if lease is None or wanted.name not in lease.tensors:
            raise Refused(f"no such download: {wanted.lease[:20]!r}, {wanted.name[:40]!r}; open one again")
        lease.read_at = time.monotonic()
        vector = lease.tensors[wanted.name]
        _check_range(wanted.start, wanted.numel, vector.numel())
        meta, body = encode(vector[wanted.start : wanted.start + wanted.numel], "none")
        chunk = VectorChunk(crc=checksum(body), total_numel=vector.numel(), tensors=(meta,))
        # Downloads go through the tensors in the order that was offered.
        if wanted.name == lease.opened.tensors[-1].name and wanted.start + wanted.numel == vector.numel():
            lease.readers -= 1
        return Answer(pack(chunk), body)

    def _check_run(self, run: str) -> None:
        if run != self._core.run.id:
            raise Refused(f"this peer serves run {self._core.run.id}, not {run[:40]!r}")


def _check_range(start: int, numel: int, total: int) -> None:
    if not (start >= 0 and 0 < numel <= CHUNK_ELEMENTS and start + numel <= total):
        raise Refused(
            f"elements {start} … {start + numel} are not a chunk of {total}; at most {CHUNK_ELEMENTS} at once"
        )


def _describe(tensors: dict[str, torch.Tensor]) -> tuple[StateTensor, ...]:
    return tuple(
        StateTensor(name=name, numel=t.numel(), dtype=dtype_name(t.dtype), sha256=_sha256(t))
        for name, t in tensors.items()
    )


def _sha256(vector: torch.Tensor) -> str:
    return hashlib.sha256(memoryview(vector.contiguous().numpy()).cast("B")).hexdigest()  # type: ignore[arg-type]


async def fetch_gradient(
    core: StageCore, transport: Transport, source: PeerId, t: int, round_name: str
) -> tuple[torch.Tensor, Held, Go | None]:
    """The reduced gradient of step `t` from a member that holds it (or applied it: then with its go).

    Raises:
        PeerFault, NotReady, Refused: ask another.
    """
    numel, dtype = core.compute.numel, core.compute.dtype
    vector = torch.empty(numel, dtype=dtype)
    named: VectorChunk | None = None
    for start in range(0, numel, CHUNK_ELEMENTS):
        size = min(CHUNK_ELEMENTS, numel - start)
        wanted = FetchVector(run=core.run.id, t=t, round=round_name, start=start, numel=size)
        answer = await transport.call(
            source, "held", pack(wanted), max_answer_bytes=MOST_CHUNK_BYTES, deadline_s=CALL_S
        )
        chunk = unpack_answer(source, answer.header, VectorChunk)
        if chunk.total_numel != numel or (named is not None and chunk.round != named.round):
            raise BadAnswer(source, "the chunks of a gradient are not of one round")
        named = chunk
        vector[start : start + size] = read_part(
            source, chunk.tensors, chunk.crc, answer.body, size, "none", dtype
        )
    assert named is not None
    held = await asyncio.to_thread(holds, named.round, vector)
    if held != Held(named.round, named.sqnorm, named.digest):
        raise BadAnswer(source, "the gradient does not fit its digest")
    go = Go(t, named.total_sqnorm) if named.total_sqnorm >= 0 else None
    return vector, held, go


async def download_state(
    run: Run,
    stage: Stage,
    like: Mapping[str, torch.Tensor],
    transport: Transport,
    source: PeerId,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[StateOpened, dict[str, torch.Tensor]]:
    """Weights and optimizer of one version of `stage`, checked tensor by tensor.

    `like`: a state of that stage, for names, sizes and dtypes. `progress` is told (bytes so far, in all).

    Raises:
        PeerFault, NotReady, Refused: ask another.
    """
    question = pack(OpenState(run=run.id, stage=stage))
    answer = await transport.call(source, "state", question, deadline_s=CALL_S)
    opened = unpack_answer(source, answer.header, StateOpened)
    expected = {name: (t.numel(), dtype_name(t.dtype)) for name, t in like.items()}
    offered = {t.name: (t.numel, t.dtype) for t in opened.tensors}
    if offered != expected or len(opened.tensors) != len(expected):
        names = [t.name for t in opened.tensors][:8]
        raise BadAnswer(source, f"offers a state that is not stage {stage}'s: {names}")
    total = sum(t.numel() * t.element_size() for t in like.values())
    done = 0
    tensors = {name: torch.empty_like(t, device="cpu") for name, t in like.items()}
    for described in opened.tensors:
        target = tensors[described.name]
        for start in range(0, described.numel, CHUNK_ELEMENTS):
            size = min(CHUNK_ELEMENTS, described.numel - start)
            wanted = FetchChunk(run=run.id, lease=opened.lease, name=described.name, start=start, numel=size)
            answer = await transport.call(
                source, "chunk", pack(wanted), max_answer_bytes=MOST_CHUNK_BYTES, deadline_s=CALL_S
            )
            fault_point("joining")
            chunk = unpack_answer(source, answer.header, VectorChunk)
            target[start : start + size] = read_part(
                source, chunk.tensors, chunk.crc, answer.body, size, "none", target.dtype
            )
            done += size * target.element_size()
            progress(done, total)
        if await asyncio.to_thread(_sha256, target) != described.sha256:
            raise BadAnswer(source, f"{described.name} does not fit its SHA-256")
    digest = await asyncio.to_thread(_sha256, tensors["weights"])
    if digest[:32] != opened.weights_digest:
        raise BadAnswer(source, "the weights do not fit their digest")
    return opened, tensors


async def fetch_weights(run: Run, transport: Transport, directory: Directory) -> dict[str, torch.Tensor]:
    """The newest weights of all stages by name, from whoever serves them; for programs that only look.

    Raises:
        SetupError: a stage has nobody who gives them.
    """
    found: dict[str, torch.Tensor] = {}
    versions: set[int] = set()
    for stage in range(run.S):
        compute = StageCompute(run, stage)
        why = "nobody serves it"
        for record in await directory.refresh():
            if record.stage != stage or record.state != "serving":
                continue
            try:
                opened, tensors = await download_state(run, stage, compute.state(), transport, record.peer)
                compute.load_state(opened.version, tensors)
            except SwarmError as error:
                why = error.text
                continue
            versions.add(opened.version)
            found.update(compute.named_weights())
            break
        else:
            raise SetupError(f"the weights of stage {stage} are not to be had: {why}")
    if len(versions) > 1:
        raise SetupError(f"the run took a step meanwhile (versions {sorted(versions)}); try again")
    return found
