"""The manifest: the public terms of a run. Text -> Run -> canonical text, whose hash is the run's id.

It holds everything that changes a weight, and nothing else: any two peers with the same manifest compute the
same run. A manifest comes from a stranger, so it is small (`MAX_MANIFEST_BYTES`), every key is known, every
value has a type and a range, and an error names the key, the value and what would be allowed.

The canonical text has every key, in the order of the dataclasses, defaults included and presets
expanded into numbers: that is what is published and hashed, so a default that changes later cannot change an
old run. Keys that were added later (`setting(later=True)`) are left out at their default, which therefore may
never change: manifests that are older than the key keep their hash.
"""

from __future__ import annotations

# ruff: noqa: F401  this is what others import
from swarm.manifest.examples import audit_run, demo_run
from swarm.manifest.run import MAX_CELLS, MAX_MANIFEST_BYTES, MAX_ROTATIONS, NO_ISLAND, Run, id_of
from swarm.manifest.tables import (
    MAX_FOUNDERS,
    AdmissionSpec,
    BatchSpec,
    CodecSpec,
    CustomModelSpec,
    DataSpec,
    EvalSpec,
    IslandsSpec,
    LoraSpec,
    ModelSpec,
    OptimizerSpec,
    OptimizerTerms,
    StartSpec,
    parts_summed,
)
from swarm.manifest.text import (
    PRESETS,
    check_id,
    load_run,
    parse_run,
    pin,
    read_cut,
    run_of,
    tomllib,
    write_cut,
)
