"""A model's own autograd.Functions: every cut computes the author's backward, or words say why not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.graph.cost import operations, reckoned_s
from swarm.model.graph.custom_model import _graph_digest
from swarm.model.graph.functions import OPERATOR
from swarm.model.graph.model_source import from_hf
from swarm.model.graph.trace import trace
from tests.model.graph.parity import cut, gradients, random_cuts
from tests.seeds import some

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
HERE = "tests.model.graph.test_own_functions."


class Net(nn.Module):
    """Two layers [3, 4] -> [3, 4], and `body(self, y)` between them."""

    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self, self.first(x))).pow(2).sum()


class Rounded(torch.autograd.Function):
    """Straight through: rounds, and hands the gradient on as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Reversed(torch.autograd.Function):
    """Gives what it was given; the gradient is turned round, by a number that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return -ctx.strength * grads[0], None


class Clipped(torch.autograd.Function):
    """Multiplies; gradients are clipped, and made where they are asked for. It writes in place to its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, bound: float = 0.5) -> torch.Tensor:
        ctx.save_for_backward(x, None, scale)
        ctx.bound, ctx.kept = bound, {"square": (x * x).clamp_(max=1.0)}
        made = torch.zeros_like(x)
        made[:, 1:].add_((x * scale)[:, 1:])
        return made + torch.tensor([0.25, 0.5, 0.75, 1.0]) * torch.ones(4, device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, nothing, scale = ctx.saved_tensors
        assert nothing is None
        one = other = None
        if ctx.needs_input_grad[0]:
            one = (grads[0] * scale).clamp(-ctx.bound, ctx.bound) + ctx.kept["square"]
        if ctx.needs_input_grad[1]:
            other = (grads[0] * x).clamp(-ctx.bound, ctx.bound).sum(0)
        return one, other, None


class Sorted(torch.autograd.Function):
    """Two outputs, one of whole numbers, by `setup_context`; its backward calls another Function."""

    @staticmethod
    def forward(x: torch.Tensor, descending: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sort(dim=-1, descending=descending)[:]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        (_, descending) = inputs
        assert descending is True and ctx.needs_input_grad == (True, False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        found = torch.zeros_like(grads[0]).scatter_(-1, places, Rounded.apply(7 * grads[0]))
        return found, None


class Asking(torch.autograd.Function):
    """Looks at what needs a gradient on the tensors themselves, in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        ctx.early = 2 * x if scale.requires_grad else None
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        one = grads[0] * scale if x.requires_grad else None
        return one, (grads[0] * ctx.early).sum(0) if ctx.early is not None else None


class Within(torch.autograd.Function):
    """Its forward and its backward call another, which looks at what it is told to need a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return Told.apply(x, scale) + Told.apply(2 * x, scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        return 3 * Told.apply(grads[0], scale), (3 * grads[0] * x).sum(0) if ctx.needs_input_grad[1] else None


class Told(torch.autograd.Function):
    """Another number for each of what needs a gradient, of what torch says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale + sum(2**n * need for n, need in enumerate(ctx.needs_input_grad))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("no gradient passes a Function's own code")


class Flat(torch.autograd.Function):
    """Has its transposed argument and its gradient made contiguous, which they are when it is traced."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (2 * x.t().contiguous().view(-1)).view(3, 4)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return (2 * grads[0].contiguous().view(-1)).view(3, 4).t()


def flattened(net: Net, y: torch.Tensor) -> torch.Tensor:
    flat = Flat.apply((3 * y).t())
    return flat.t().reshape(3, 4)


def sort(net: Net, y: torch.Tensor) -> torch.Tensor:
    values, places = Sorted.apply(y)
    return values * places


def written_after(net: Net, y: torch.Tensor) -> torch.Tensor:
    z = Rounded.apply(3 * y)
    z[0].mul_(2.0)
    return z


def looped(net: Net, y: torch.Tensor) -> torch.Tensor:
    for bound in (0.3, 0.2):
        y = Clipped.apply(y, net.scale, bound)
    return y


BODIES: dict[str, Callable[..., torch.Tensor]] = {
    "straight through": lambda net, y: Rounded.apply(3 * y),
    "reversed": lambda net, y: Reversed.apply(y, 0.3),
    "clipped": lambda net, y: Clipped.apply(y, net.scale),
    "no gradient of one": lambda net, y: Clipped.apply(y, net.scale.detach(), 0.4),
    "several calls": looped,
    "asking tensors": lambda net, y: Asking.apply(y, net.scale),
    "asking tensors without": lambda net, y: Asking.apply(y, net.scale.detach()),
    "another within": lambda net, y: Within.apply(y, net.scale),
    "another within, without": lambda net, y: Within.apply(y, net.scale.detach()),
    "two outputs": sort,
    "written to later": written_after,
    "under no_grad": lambda net, y: y + torch.no_grad()(Rounded.apply)(y),
    "one after the other": lambda net, y: Clipped.apply(Rounded.apply(2 * y), net.scale, 0.3),
}


LAID_OUT = {"laid out otherwise": flattened}
"""Apart: written out as text, its Function is computed only by a stage."""


@pytest.mark.parametrize("name", [*BODIES, *LAID_OUT])
def test_the_gradients_are_those_of_the_authors_backward_in_every_cut(name: str) -> None:
    model = Net((BODIES | LAID_OUT)[name]).double()
    loss = model(X)
    loss.backward()
    expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    traced = trace(model, (X,))
    assert any(op.target.startswith(HERE) for op in traced.graph.operators)
    cuts = [range(len(traced.graph.operators)), *random_cuts(traced.graph, 5, seed=1)]
    for assignment in cuts:
        pieces = cut(traced, assignment, seed=0)
        for _ in range(2):  # as a microbatch that is computed again
            got = gradients(pieces, {"x": X}, Microbatch(0, 0))
            assert got.loss == loss.detach()
            assert got.parameters.keys() == expected.keys()
            for key, gradient in expected.items():
                torch.testing.assert_close(got.parameters[key], gradient, rtol=1e-15, atol=1e-15)


def test_the_authors_backward_is_another_than_the_derivative_of_the_forward() -> None:
    # So that the test above compares something: a derivative of rounding would be zero.
    model = Net(BODIES["straight through"]).double()
    (piece,) = cut(traced := trace(model, (X,)), [0] * len(traced.graph.operators), seed=0)
    assert gradients([piece], {"x": X}, Microbatch(0, 0)).parameters["first.weight"].abs().min() > 0


def digest(body: Callable[..., torch.Tensor]) -> str:
    return _graph_digest(trace(Net(body).double(), (X,)))


def test_peers_compare_what_a_function_computes() -> None:
    one, same, other = (digest(lambda net, y, by=by: Reversed.apply(y, by)) for by in (0.3, 0.3, 0.4))
    assert one == same != other


def test_peers_compare_every_bit_of_the_numbers_in_a_function() -> None:
    def scaled(by: float) -> str:
        odd = function(lambda ctx, x: x * torch.tensor([0.25, 0.5, 0.75, by]))
        return digest(lambda net, y: odd.apply(y))

    assert scaled(0.3) == scaled(0.3) != scaled(0.3000001)


def test_the_time_of_a_function_is_reckoned_from_both_of_its_graphs() -> None:
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grads[0] @ x.T + x.T @ grads[0]

    x = torch.randn(4, 4).double()
    traced = trace(Net(lambda net, y: Squared.apply(y)).double(), (x,))
    (index,) = (op.index for op in traced.graph.operators if "Squared" in op.target)
    assert operations(traced)[index] == 3 * 2 * 4**3
    assert reckoned_s(traced)[index] > 4 * 5e-6  # an addition too


# --- transformers -------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 41, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
MODELS = {
    "bloom": (
        {"hidden_size": 24, "n_layer": 2, "n_head": 3, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "GeLUFunction",
    ),
    "recurrent_gemma": (
        {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 48}
        | {"lru_width": 24, "attention_window_size": 8, "head_dim": 8, "attention_dropout": 0.0},
        "SqrtBoundDerivative",
    ),
    "phimoe": (
        {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3}
        | {"intermediate_size": 32, "num_local_experts": 4, "experts_implementation": "batched_mm"}
        | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
        "PhimoeMultiplier",
    ),
}


@pytest.mark.parametrize("kind", some(list(MODELS), quick=["bloom"]))
def test_models_of_transformers_with_functions_of_their_own(kind: str) -> None:
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    config, function = MODELS[kind]
    torch.manual_seed(0)
    model = from_hf({"model_type": kind, **config, **SMALL}, rows=3, length=10)
    module = model.module.double().train()
    tokens = torch.randint(3, 41, (3, 10), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    traced = trace(module, kwargs=inputs)
    assert function in {op.target.rpartition(".")[2] for op in traced.graph.operators}
    module.zero_grad()
    loss = module(**inputs).loss
    loss.backward()
    for assignment in random_cuts(traced.graph, 3, seed=1):
        got = gradients(cut(traced, assignment, seed=0), inputs, Microbatch(0, 0))
        torch.testing.assert_close(got.loss, loss.detach(), rtol=1e-15, atol=1e-15)
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(got.parameters[name], parameter.grad, rtol=1e-13, atol=1e-15)


# --- what is refused ----------------------------------------------------------------------------------------


def function(forward: Callable[..., Any], backward: Callable[..., Any] = lambda ctx, grad: grad) -> Any:
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": "mine"}
    return type("Odd", (torch.autograd.Function,), members)


def saves(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.save_for_backward(x)
    return 2 * x


def marks_dirty(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


def marks_no_gradient(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.mark_non_differentiable(made := 2 * x)
    return made


def wants_none(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.set_materialize_grads(False)
    return 2 * x


def writes_to_saved(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return x.mul_(grad)


def differentiates(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.pow(2), x, grad)[0]


def calls_c(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    ctypes.memmove(made.data_ptr(), x.data_ptr(), x.nbytes)
    return made


ELSEWHERE = torch.ones(4)

ODD: dict[str, tuple[Any, str]] = {
    "marks dirty": (function(marks_dirty), r"it writes to its arguments \(mark_dirty\)"),
    "writes unseen": (
        function(lambda ctx, x: x.mul_(2)),
        r"operator aten\.mul_\.Tensor in its forward writes to its arguments",
    ),
    "writes to data": (
        function(lambda ctx, x: x.data[0].zero_() + x),
        "in its forward writes to its arguments; make a new tensor",
    ),
    "writes backward": (
        function(saves, writes_to_saved),
        r"operator aten\.mul_\.Tensor in its backward writes to what it is given",
    ),
    "marks no gradient": (function(marks_no_gradient), r"without a gradient \(mark_non_differentiable\)"),
    "wants None": (function(wants_none), r"gradients that may be None \(set_materialize_grads\)"),
    "looks at a number": (
        function(lambda ctx, x: x * x.max().item()),
        r"test_own_functions.py:\d+: .*depends on the numbers in a tensor",
    ),
    "looks backward": (
        function(saves, lambda ctx, grad: grad if grad.max().item() > 1 else 2 * grad),
        r"test_own_functions.py:\d+: .*depends on the numbers in a tensor",
    ),
    "branches backward": (
        function(saves, lambda ctx, grad: grad if grad.max() > 1 else 2 * grad),
        r"test_own_functions.py:\d+: .*depends on the numbers in a tensor",
    ),
    "numpy": (
        function(lambda ctx, x: torch.from_numpy(np.tanh(x.numpy()))),
        r"its forward reads a tensor's memory \(numpy\), as numpy and C do",
    ),
    "numpy backward": (
        function(saves, lambda ctx, grad: torch.from_numpy(grad.numpy())),
        r"its backward reads a tensor's memory \(numpy\)",
    ),
    "C": (function(calls_c), r"its forward reads a tensor's memory \(data_ptr\)"),
    "draws": (
        function(lambda ctx, x: x + torch.rand_like(x)),
        r"operator aten\.rand_like\.default in its forward draws random numbers",
    ),
    "drops": (
        function(lambda ctx, x: torch.dropout(x, 0.5, True)),
        r"operator aten\.dropout\.default in its forward draws random numbers",
    ),
    "draws in place": (
        function(saves, lambda ctx, grad: torch.zeros_like(grad).normal_() * grad),
        r"operator aten\.normal_\.default in its backward draws random numbers",
    ),
    "permutes": (
        function(lambda ctx, x: x[torch.randperm(3)]),
        r"operator aten\.randperm\.default of mine\.Odd\.forward draws random numbers",
    ),
    "strided": (
        function(lambda ctx, x: x.as_strided((2, 2), (1, 2))),
        r"as_strided\.default of mine\.Odd\.forward depends on how memory is laid out",
    ),
    "reads another": (
        function(lambda ctx, x: x * ELSEWHERE),
        r"its forward reads a tensor \[4\] that is not among its arguments; give it as one",
    ),
    "differentiates": (function(saves, differentiates), "its backward switches gradients on"),
    "autocast": (
        function(torch.amp.custom_fwd(saves, device_type="cpu")),
        r"it looks at whether autocast is on \(custom_fwd\)",
    ),
    "gives a list": (
        function(lambda ctx, x: [x]),
        "its forward has to return a tensor, or a tuple of tensors",
    ),
    "too few gradients": (
        function(lambda ctx, x, *rest: 2 * x, lambda ctx, grad: ()),
        "its backward gives 0 gradients, but it has 1 arguments",
    ),
    "another shape": (
        function(saves, lambda ctx, grad: grad[:2]),
        "its backward gives as gradient of argument 0 what has not its shape",
    ),
    "no backward": (
        type("Odd", (torch.autograd.Function,), {"forward": staticmethod(saves), "__module__": "mine"}),
        "You must implement either the backward or vjp method",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_a_function_that_no_stage_can_compute_is_refused_by_its_name(name: str) -> None:
    odd, words = ODD[name]
    said = f"the model uses mine.Odd, an autograd.Function that cannot be traced: .*{words}"
    with pytest.raises(SetupError, match=said):
        trace(Net(lambda net, y: odd.apply(y)).double(), (X,))


def test_a_function_is_given_its_tensors_one_by_one() -> None:
    odd = function(lambda ctx, x: x[0] + x[1])
    with pytest.raises(SetupError, match=r"mine\.Odd, .* given tensors, each as an argument of its own"):
        trace(Net(lambda net, y: odd.apply([y, y])).double(), (X,))


def test_a_module_that_a_function_hides_is_refused() -> None:
    odd = function(lambda ctx, x, layer: layer(x), lambda ctx, grad: (grad, None))
    with pytest.raises(
        SetupError, match=r"mine\.Odd, .* its forward reads a tensor \[.*\] that is not among"
    ):
        trace(Net(lambda net, y: odd.apply(y, net.last)).double(), (X,))


@pytest.mark.parametrize("number", [0, 1])
def test_nothing_is_written_to_what_a_function_may_have_handed_on(number: int) -> None:
    def body(net: Net, y: torch.Tensor) -> torch.Tensor:
        both = (y, Reversed.apply(y, 0.5))
        both[number].mul_(2.0)
        return both[0] + both[1]

    with pytest.raises(
        SetupError, match=r"aten\.mul_\.Tensor writes to a tensor that an autograd\.Function has"
    ):
        trace(Net(body).double(), (X,))


def test_a_checkpoint_that_differentiates_again_is_refused() -> None:
    with pytest.raises(SetupError, match=r"CheckpointFunction, an autograd\.Function that cannot be traced"):
        trace(Net(lambda net, y: checkpoint(net.last, y, use_reentrant=True)).double(), (X,))


def test_nothing_is_left_of_a_trace() -> None:
    with pytest.raises(SetupError, match=r"mine\.Odd"):
        trace(Net(lambda net, y: ODD["marks dirty"][0].apply(y)).double(), (X,))
    x = torch.ones(2, requires_grad=True)
    Rounded.apply(x).sum().backward()
    assert x.grad is not None and OPERATOR.name() == "swarm::function"
