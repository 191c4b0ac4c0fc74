"""Small operator graphs made by hand, and operators whose seconds are the numbers that they touch."""

from __future__ import annotations

import random
from collections.abc import Sequence

from swarm.model.graph.ir import Operator, OpGraph, Value


def seconds_of(graph: OpGraph) -> list[float]:
    """An operator takes as many seconds as the largest tensor that it reads or makes has numbers."""
    names = [(*op.inputs, *op.parameters, *op.outputs) for op in graph.operators]
    return [float(max(graph.values[name].numel for name in of)) for of in names]


class Draft:
    """An operator graph in the making; every tensor is a row of float32."""

    def __init__(self, **inputs: int) -> None:
        self._values: dict[str, Value] = {}
        self._operators: list[Operator] = []
        self._parameters: list[str] = []
        for name, numel in inputs.items():
            self._value(name, numel, "int64", differentiable=False)
        self._inputs = tuple(inputs)

    def op(
        self,
        name: str,
        inputs: Sequence[str],
        numel: int,
        *,
        weight: int = 0,
        shares: str = "",
        cheap: bool = False,
        target: str = "aten.custom.default",
        module: str = "",
    ) -> Draft:
        """Add an operator that reads `inputs` and a weight, its own or one that it `shares`; makes `name`."""
        parameters = (shares,) if shares else ()
        if weight:
            parameters = (f"{name}.weight",)
            self._value(parameters[0], weight, "float32", differentiable=True)
            self._parameters.append(parameters[0])
        after_weight = bool(parameters) or any(self._values[one].differentiable for one in inputs)
        self._value(name, numel, "float32", differentiable=after_weight)
        operator = Operator(
            index=len(self._operators), name=name, target=target, module=module, inputs=tuple(inputs),
            parameters=parameters, buffers=(), outputs=(name,), cheap=cheap,
        )  # fmt: skip
        self._operators.append(operator)
        return self

    def graph(self, loss: str) -> OpGraph:
        return OpGraph(
            operators=tuple(self._operators), values=self._values, inputs=self._inputs, loss=loss,
            parameters=tuple(self._parameters), buffers=(), tied=(),
        )  # fmt: skip

    def _value(self, name: str, numel: int, dtype: str, *, differentiable: bool) -> None:
        self._values[name] = Value(name=name, shape=(numel,), dtype=dtype, differentiable=differentiable)


def random_graph(dice: random.Random, operators: int, *, chain: bool) -> OpGraph:
    """Each operator reads a few of those shortly before it (in a chain: the one before it)."""
    draft, names = Draft(x=dice.randint(1, 5)), ["x"]
    loose: set[str] = set()
    for number in range(operators):
        near = names[1:][-4:]
        reads = (
            [names[-1]] if chain else [name for name in near if dice.random() < 0.4] or [dice.choice(names)]
        )
        draft.op(f"v{number}", reads, dice.randint(1, 20), weight=dice.randint(1, 20))
        loose = (loose - set(reads)) | {f"v{number}"}
        names.append(f"v{number}")
    draft.op("loss", sorted(loose), 1)
    return draft.graph("loss")
