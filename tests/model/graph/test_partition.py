"""What a cut makes each stage compute, take and give, on graphs written by hand."""

from __future__ import annotations

import pytest

from swarm.errors import SetupError
from swarm.model.graph.ir import Operator, OpGraph, Value
from swarm.model.graph.partition import plan_stages, shared_parameters


def graph_of(
    operators: str, sizes: dict[str, int] | None = None, inputs: str = "x", loss: str = "loss"
) -> OpGraph:
    """A line an operator: `out <- in *parameter @buffer`; `!` before the name of an output: it is cheap."""
    made: list[Operator] = []
    values: dict[str, Value] = {}

    def value(name: str) -> None:
        values.setdefault(
            name, Value(name=name, shape=((sizes or {}).get(name, 1),), dtype="int8", differentiable=False)
        )

    for name in inputs.split():
        value(name)
    for line in operators.strip().splitlines():
        outputs, _, reads = line.partition("<-")
        names = outputs.replace("!", "").split()
        parameters = tuple(name[1:] for name in reads.split() if name[0] == "*")
        buffers = tuple(name[1:] for name in reads.split() if name[0] == "@")
        plain = tuple(name for name in reads.split() if name[0] not in "*@")
        for name in (*names, *parameters, *buffers):
            value(name)
        made.append(
            Operator(
                index=len(made), name=names[0], target="aten.op", module="", inputs=plain,
                parameters=parameters, buffers=buffers, outputs=tuple(names), cheap="!" in outputs,
            )
        )  # fmt: skip
    parameters = tuple(dict.fromkeys(name for op in made for name in op.parameters))
    return OpGraph(
        operators=tuple(made), values=values, inputs=tuple(inputs.split()), loss="loss",
        parameters=parameters, buffers=(), tied=(),
    )  # fmt: skip


def told(graph: OpGraph, assignment: list[int]) -> list[tuple[list[str], list[str], list[str]]]:
    """(operators, inputs, outputs) of each stage."""
    return [
        (
            [graph.operators[i].name for i in plan.operators],
            [value.name for value in plan.inputs],
            [value.name for value in plan.outputs],
        )
        for plan in plan_stages(graph, assignment)
    ]


def test_a_value_that_skips_stages_is_carried_through_them() -> None:
    graph = graph_of("a <- x *w\nb <- a *v\nc <- b *u\nloss <- c a *t", inputs="x")
    assert told(graph, [0, 1, 2, 3]) == [
        (["a"], ["x"], ["a"]),
        (["b"], ["a"], ["a", "b"]),
        (["c"], ["a", "b"], ["a", "c"]),
        (["loss"], ["a", "c"], ["loss"]),
    ]


def test_inputs_that_a_later_stage_needs_are_carried_from_the_first() -> None:
    graph = graph_of("a <- x *w\nb <- a *v\nloss <- b labels", inputs="x labels idle")
    plans = told(graph, [0, 1, 1])
    assert plans[0] == (["a"], ["x", "labels", "idle"], ["labels", "a"])
    assert plans[1] == (["b", "loss"], ["labels", "a"], ["loss"])


def test_cheap_values_are_computed_where_they_are_needed() -> None:
    graph = graph_of(
        "!positions <- @rates\n!mask <- positions\na <- x mask *w\nloss <- a mask *v", {"mask": 99}
    )
    assert told(graph, [0, 0, 0, 1]) == [
        (["positions", "mask", "a"], ["x"], ["a"]),
        (["positions", "mask", "loss"], ["a"], ["loss"]),
    ]


@pytest.mark.parametrize(
    ("sizes", "sent"),
    [
        ({"padding": 3, "mask": 9}, "padding"),
        ({"padding": 9, "mask": 3}, "mask"),
        ({"padding": 9, "mask": 9}, "padding"),
    ],
)
def test_what_follows_from_inputs_is_sent_if_it_is_smaller(sizes: dict[str, int], sent: str) -> None:
    graph = graph_of("mask <- padding\na <- x *w\nloss <- a mask *v", sizes, inputs="x padding")
    assert told(graph, [0, 0, 1])[1][1] == [sent, "a"]


def test_bytes_and_shared_parameters() -> None:
    graph = graph_of("a b <- x *w\nc <- a *v\nloss <- b c *w", {"a": 3, "b": 5, "c": 7})
    plans = plan_stages(graph, [0, 1, 2])
    assert [plan.bytes_out for plan in plans] == [8, 12, 1]
    assert [plan.parameters for plan in plans] == [("w",), ("v",), ("w",)]
    assert shared_parameters(plans) == {"w": (0, 2)}


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ([0, 0], "a cut of 3 operators names the stage of 2; cut it again"),
        ([0, 0, 2], r"a cut whose stages are \[0, 2\]: they must count up from 0"),
        ([-1, 0, 0], r"a cut whose stages are \[-1, 0\]: they must count up from 0"),
        ([1, 0, 1], "operator b of stage 0 reads a, which stage 1 makes: values flow to later stages only"),
        ([0, 1, 0], "operator loss of stage 0 reads b, which stage 1 makes"),
    ],
)
def test_a_cut_that_is_none_is_refused(assignment: list[int], words: str) -> None:
    graph = graph_of("a <- x *w\nb <- a *v\nloss <- b *u")
    with pytest.raises(SetupError, match=words):
        plan_stages(graph, assignment)


def test_the_loss_belongs_to_the_last_stage() -> None:
    graph = graph_of("loss <- x *w\nidle <- x *v")
    with pytest.raises(SetupError, match="operator loss makes the loss on stage 0: it belongs to the last"):
        plan_stages(graph, [0, 1])
