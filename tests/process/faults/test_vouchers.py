"""Real processes of a run that names its trainer: tickets, proofs of the data, and vouchers that are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from peers.cli import Exit
from peers.events import Failed, Note, StepDone
from peers.net.identity import Identity
from swarm.manifest import AdmissionSpec, audit_run
from swarm.wire.messages import GiveVoucher, unpack
from tests.process.swarm_processes import Swarm

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_named_trainer_proves_its_data_and_vouches_for_peers_and_another_key_audits(tmp_path: Path) -> None:
    text, key, other = (tmp_path / name for name in ("text.txt", "trainer.key", "auditor.key"))
    text.write_text("It was a dark and stormy night. " * 200)
    trainer = Identity.load_or_create(key).peer_id
    run = audit_run(stages=2, steps=45, microbatches_per_step=4)
    admission = AdmissionSpec(trainers=(trainer, Identity.load_or_create(other).peer_id))
    run = replace(run, dtype="float32", data=replace(run.data, source="files", tokens=0), admission=admission)
    with Swarm(tmp_path, run, data=[text]) as swarm:
        swarm.bootstrap()
        keys = [tmp_path / f"peer{stage}.key" for stage in range(2)]
        for stage, own in enumerate(keys):
            swarm.peer(stage, "--identity", str(own))
        swarm.peer(0)
        swarm.all_serve()
        refused = swarm.start("audit0", ["audit", *swarm.membership()])
        refused.sentenced = True
        auditor = swarm.start(
            "audit1", ["audit", *swarm.membership(), "--stages", "0", "--identity", str(other)]
        )
        program = swarm.trainer("--identity", str(key))

        def vouched(own: Path) -> int:
            path = own.with_name(f"{own.name}.voucher")
            return unpack(path.read_bytes(), GiveVoucher).voucher.steps if path.exists() else 0

        # One that had nothing to do in a step has fewer at first.
        swarm.until(lambda: min(map(vouched, keys)) >= 20, "vouchers", 120)
        assert program.heard(StepDone)
        for own in keys:
            kept = unpack(own.with_name(f"{own.name}.voucher").read_bytes(), GiveVoucher)
            assert kept.voucher.trainer == trainer
        swarm.ends(program)
        swarm.ends(auditor)
        said = auditor.heard(Note)[-1].text
        assert said.endswith(" contributions were computed again") and int(said.split()[0]) > 0, swarm.story()
        assert refused.wait() == Exit.SETUP
        (why,) = refused.heard(Failed)
        assert "may not audit run 'counting': give the key of its owner" in why.text
