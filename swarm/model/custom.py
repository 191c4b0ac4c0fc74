"""The only import of the tracing code by what every peer runs: only runs with a custom model use it.

So a peer of a built-in model imports neither the tracing nor the search for a cut, which is thousands of
lines and seconds. The functions are those of `swarm.model.graph.custom_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any


def _lazy(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        from swarm.model.graph import custom_model

        return getattr(custom_model, name)(*args)

    return call


if TYPE_CHECKING:
    from swarm.model.graph.custom_model import custom_model, drawn, model_inputs, pin_model, stage_module
    from swarm.model.graph.custom_model import stage_inputs as custom_inputs
else:
    custom_inputs, custom_model, drawn = map(_lazy, ("stage_inputs", "custom_model", "drawn"))
    model_inputs, pin_model, stage_module = map(_lazy, ("model_inputs", "pin_model", "stage_module"))

__all__ = ("custom_inputs", "custom_model", "drawn", "model_inputs", "pin_model", "stage_module")
