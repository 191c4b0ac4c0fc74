"""Real processes of a run that names its trainer: tickets, proofs of the data, and vouchers that are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from peers.events import StepDone
from peers.net.identity import Identity
from swarm.manifest import AdmissionSpec, audit_run
from swarm.wire.messages import GiveVoucher, unpack
from tests.process.swarm_processes import Swarm

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_named_trainer_proves_its_data_and_vouches_for_peers(tmp_path: Path) -> None:
    text, key = tmp_path / "text.txt", tmp_path / "trainer.key"
    text.write_text("It was a dark and stormy night. " * 200)
    trainer = Identity.load_or_create(key).peer_id
    run = audit_run(stages=2, steps=45)
    run = replace(
        run, data=replace(run.data, source="files", tokens=0), admission=AdmissionSpec(trainers=(trainer,))
    )
    with Swarm(tmp_path, run, data=[text]) as swarm:
        swarm.bootstrap()
        keys = [tmp_path / f"peer{stage}.key" for stage in range(2)]
        for stage, own in enumerate(keys):
            swarm.peer(stage, "--identity", str(own))
        swarm.all_serve()
        program = swarm.trainer("--identity", str(key))
        swarm.until(
            lambda: all(own.with_name(f"{own.name}.voucher").exists() for own in keys), "vouchers", 120
        )
        assert program.heard(StepDone)
        for own in keys:
            kept = unpack(own.with_name(f"{own.name}.voucher").read_bytes(), GiveVoucher)
            assert kept.voucher.trainer == trainer and kept.voucher.steps >= 20
        swarm.ends(program)
