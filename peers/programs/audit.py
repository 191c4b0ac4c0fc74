"""`swarm audit`: the program of an auditor, which is a node as the roles are and serves nothing."""

from __future__ import annotations

import asyncio
from functools import partial

from peers.device import choose_device
from peers.programs.roles import Networked, kept_stages
from peers.programs.tool_options import AuditOptions
from peers.system import usable_cores
from swarm.audit import is_audited
from swarm.errors import SetupError
from swarm.manifest import Run


class Audit(Networked[AuditOptions]):
    """Computes again what replicas added to a run."""

    async def run(self) -> None:
        options = self.options
        prepare = partial(choose_device, options.device)
        async with self._joined("audit", options, prepare, self._accept) as (node, run, device):
            import torch

            from peers.audit.auditor import Auditor
            from peers.stage.device import DeviceThreads
            from peers.storage.start_weights import offer_start
            from swarm.model.stage import StageCompute

            torch.set_num_threads(1)
            await asyncio.to_thread(offer_start, run, options.start)
            cores = (options.threads or usable_cores()) // run.batch.microbatch_threads
            threads = DeviceThreads("audits", max(1, cores) if device == "cpu" else 1)
            auditor = Auditor(
                run, node.transport, node.directory, threads, kept_stages(run, options.stages),
                lambda stage: StageCompute(run, stage, device), self._emit,
            )  # fmt: skip
            await self._run(auditor)

    def _accept(self, run: Run) -> None:
        """Raises SetupError before a token is asked for, which would be of no use."""
        assert self._node is not None
        if not run.admission.may_audit(self._node.peer_id):
            raise SetupError(
                f"this peer ({self._node.peer_id}) may not audit run {run.name!r}: give the key of its owner "
                "as --identity, or that of a trainer that its manifest names"
            )
        check_audited(run)


def check_audited(run: Run) -> None:
    """Raise SetupError if no auditor can compute again what is added to the run while it goes on."""
    if run.cells > run.S or not (is_audited(run) and run.adds_exactly):
        raise SetupError(
            f"run {run.name!r} cannot be audited: it names no trainers, has islands, adds floats, or its "
            "codecs leave numbers out. Check it afterwards, with swarm verify"
        )
