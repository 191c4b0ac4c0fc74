"""A trainer: it walks the run's microbatches, sends each through the stages, and follows where the run is."""

from peers.trainer.samples import Batches, entering
from peers.trainer.trainer import Trainer, TrainerSettings

__all__ = ["Batches", "Trainer", "TrainerSettings", "entering"]
