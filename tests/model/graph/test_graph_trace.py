"""Tracing: which graph a model becomes, and what is refused in which words."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.graph.trace import trace
from swarm.model.graph.untraceable import reason
from tests.model.graph.parity import check_parity, compute, cut, gradients, random_cuts, whole

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A linear layer [.., 4] -> [.., 4], and `body(self, x)`."""

    def __init__(self, body: Callable[[Net, torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.idle = nn.Parameter(torch.ones(2))
        self.body = body

    def forward(self, x: torch.Tensor) -> object:
        return self.body(self, x)


def every_operator_a_stage(model: nn.Module, x: torch.Tensor = X) -> None:
    """Parity in random cuts, and with one operator a stage."""
    model, x = model.double(), x.double()
    traced = trace(model, (x,))
    one = compute(model, traced, {"x": x})
    check_parity(one, 7)
    pieces = cut(traced, range(len(traced.graph.operators)), seed=0)
    got = gradients(pieces, {"x": x}, Microbatch(0, 0))
    assert got.loss == one.loss
    for name, expected in one.gradients.items():
        torch.testing.assert_close(got.parameters[name], expected, rtol=1e-9, atol=0)


# --- what a graph looks like --------------------------------------------------------------------------------


def test_operators_have_their_module_and_values_their_form() -> None:
    graph = whole("gpt2").traced.graph
    attention = next(op for op in graph.operators if op.target == "aten.scaled_dot_product_attention.default")
    assert attention.module == "blocks.0"
    assert graph.values[attention.outputs[0]].shape == (3, 3, 10, 8)
    first = next(op for op in graph.operators if op.target == "aten.embedding.default")
    assert (first.module, first.parameters, first.inputs) == ("tokens", ("tokens.weight",), ("tokens_BT",))
    unbound = next(op for op in graph.operators if op.target == "aten.unbind.int")
    assert len(unbound.outputs) == 3
    assert graph.inputs == ("tokens_BT", "labels_BT")
    assert not graph.values["labels_BT"].differentiable and graph.values[graph.loss].differentiable
    assert [op.index for op in graph.operators] == list(range(len(graph.operators)))


def test_the_loss_may_be_given_apart() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.linear(x)

    model = Net(body)
    target = torch.zeros(3, 4)
    traced = trace(model, (X,), loss=functional.mse_loss, loss_args=(target,))
    assert traced.graph.inputs == ("x", "target")
    (piece,) = cut(traced, [0] * len(traced.graph.operators), seed=0)
    ((loss,), _) = piece(X, target, mb=Microbatch(0, 0))
    torch.testing.assert_close(loss, functional.mse_loss(model(X), target))


class Scored(nn.Module):
    """A loss with weights of its own."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scale * functional.mse_loss(self.score(out), target)


def test_a_loss_may_have_weights_of_its_own() -> None:
    model, loss, target = Net(lambda net, x: net.linear(x)), Scored(), torch.ones(3, 2)
    expected = loss(model(X), target)
    grads = torch.autograd.grad(expected, [loss.score.weight, loss.score.bias, model.linear.weight])
    traced = trace(model, (X,), loss=loss, loss_args=(target,))
    graph = traced.graph
    assert graph.parameters == ("linear.weight", "linear.bias", "loss.score.weight", "loss.score.bias")
    assert graph.buffers == ("loss.scale",) and graph.operators[-1].module == "loss"
    stages = list(range(len(graph.operators)))
    found = gradients(cut(traced, stages, seed=0), {"x": X, "target": target}, Microbatch(0, 0))
    torch.testing.assert_close(found.loss, expected.detach())
    names = ("loss.score.weight", "loss.score.bias", "linear.weight")
    torch.testing.assert_close(tuple(found.parameters[name] for name in names), grads)


def test_weights_of_the_model_and_of_its_loss_may_share_a_tensor_but_no_name() -> None:
    model, loss, target = Net(lambda net, x: net.linear(x)), Scored(), torch.ones(3, 2)
    loss.score.weight = nn.Parameter(torch.ones(2, 4))
    model.loss = loss  # the same one: its weights have one name
    traced = trace(model, (X,), loss=loss, loss_args=(target,))
    assert traced.graph.parameters[-2:] == ("loss.score.weight", "loss.score.bias")
    model.loss = Scored()
    with pytest.raises(SetupError, match=r"the model has a loss\.score\.weight, and so has its loss, which"):
        trace(model, (X,), loss=loss, loss_args=(target,))


def test_weights_that_no_module_has_are_refused_since_nobody_would_train_them() -> None:
    """torch takes them for constants, without a word."""
    outside, target = nn.Linear(4, 2), torch.ones(3, 2)

    def scored(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(outside(out), target)

    said = r"the model or its loss reads a tensor \[2, 4\] that needs a gradient and is no parameter of"
    with pytest.raises(SetupError, match=said):
        trace(Net(lambda net, x: net.linear(x)), (X,), loss=scored, loss_args=(target,))

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.others = nn.Linear(4, 4), [outside]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.others[0](self.linear(x)).sum()

    with pytest.raises(SetupError, match=r"several modules in nn\.ModuleList"):
        trace(Listed(), (X,))

    def taught(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = outside(x)
        wide = outside.weight.shape[0]
        return functional.mse_loss(net.linear(x)[:, :wide], wanted + outside.bias.detach())

    assert trace(Net(taught), (X,)).graph.parameters == ("linear.weight", "linear.bias")


def test_parameters_that_nothing_reads_are_in_no_stage_and_frozen_ones_have_no_gradient() -> None:
    model = Net(lambda net, x: net.linear(x).square().sum())
    model.linear.bias.requires_grad_(False)
    traced = trace(model, (X,))
    assert traced.graph.parameters == ("linear.weight",)
    assert traced.graph.buffers == ("linear.bias",)
    assert not traced.graph.values["linear.bias"].differentiable
    assert set(traced.parameters) == {"linear.weight", "linear.bias", "idle"}
    every_operator_a_stage(model)


def test_a_name_of_an_input_may_be_that_of_an_operator() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add = nn.Parameter(torch.ones(4))

        def forward(self, mean: torch.Tensor) -> torch.Tensor:
            return (mean.mean(0) + self.add).mean()

    model = Clash()
    traced = trace(model, (X,))
    check_parity(compute(model, traced, {"mean": X}), 3)


class Namesakes(nn.Module):
    """Its weights and buffers are called as its inputs and operators are."""

    def __init__(self) -> None:
        super().__init__()
        self.mul, self.mul_ = nn.Parameter(2 * torch.ones(3, 4)), nn.Parameter(3 * torch.ones(3, 4))
        self.split = nn.ParameterList([torch.full((3, 2), 5.0), torch.full((3, 2), 7.0)])
        self.register_buffer("x_0", torch.full((3, 4), 11.0))

    def forward(self, x: tuple[torch.Tensor, torch.Tensor], x_0: torch.Tensor) -> torch.Tensor:
        y = (x[0] - x[1] * x_0) * self.mul * self.mul_ * self.x_0
        left, right = y.split(2, 1)
        return (left * self.split[1] + right * self.split[0]).mean()


def test_what_is_called_alike_is_not_taken_for_one_another() -> None:
    """A buffer `target` was read in place of the target, and its model trained on that without a word."""
    model, args = Namesakes().double(), (X.double(), X.double().exp(), X.double().cos())
    traced = trace(model, (args[:2], args[2]))
    assert traced.graph.inputs == ("x_0_", "x_1", "x_0__")
    loss = model(args[:2], args[2])
    loss.backward()
    for assignment in random_cuts(traced.graph, 4, seed=1):
        pieces = cut(traced, assignment, seed=0)
        got = gradients(pieces, dict(zip(traced.graph.inputs, args, strict=True)), Microbatch(0, 0))
        torch.testing.assert_close(got.loss, loss)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(got.parameters[name], parameter.grad)


# --- writes in place, views, many outputs -------------------------------------------------------------------


def through_views(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x) * 1.0
    left, right = y[:, :2], y.view(3, 2, 2).select(1, 1)
    y[:, 1] = 2.0 * x[:, 0]
    first = y[0] * 2.0 + left[0].sum()
    right += 1.0
    first = first + y[0] * 3.0
    left.mul_(3.0)
    z = y.t().reshape(-1)
    y.clamp_(-1.0)
    return (y * y).sum() + (left * right).sum() + z.square().sum() + first.sum()


def many_outputs(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    most, place = y.max(dim=1)
    a, b = y.split((1, 3), dim=1)
    best, where = y.topk(2, dim=1)
    positive = y > 0
    picked = y.gather(1, where) * positive[:, :2]
    return (most * place).sum() + a.sum() * b.prod() + best.sum() + picked.sum() + y.t()[0].exp().sum()


def without_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    with torch.no_grad():
        scale = y.abs().max()
        shift = y.mean()
        shift.mul_(0.5).neg_()
    return (y / scale + shift).square().sum() + (y * y.detach()).sum()


def turned(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    part = y[1:]
    y.t_()
    y.add_(torch.arange(4)[:, None])
    y.unsqueeze_(0).squeeze_().transpose_(0, 1).swapaxes_(0, 1).unsqueeze_(1).squeeze_(1)
    with torch.no_grad():
        new = torch.zeros_like(y)
        new.add_(net.linear(x).mean()).clamp_(min=-1.0).swapdims_(0, 1)
    return (part * part.detach().exp()).sum() + (net.linear(y.t()) * new).sum()


def constants(net: Net, x: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
    weights[1] = 5.0
    weights.split(2)[1].mul_(2.0)
    mask = torch.zeros_like(net.linear(x)) + torch.arange(4)
    return (net.linear(x) * weights * mask).sum().exp()


def in_place_of_an_input(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    part = x[1:]
    x.add_(1.0)
    y = net.linear(x)
    functional.relu_(y)
    return (y[1:] * part).sum()


@pytest.mark.parametrize(
    "body", [through_views, many_outputs, without_gradient, turned, constants, in_place_of_an_input]
)
def test_what_operators_share_survives_every_cut(body: Callable[[Net, torch.Tensor], object]) -> None:
    every_operator_a_stage(Net(body))


def test_values_that_need_no_weights_are_cheap() -> None:
    graph = trace(Net(constants), (X,)).graph
    cheap = [op.target for op in graph.operators if op.cheap]
    assert "aten.arange.default" in cheap and "aten.zeros_like.default" in cheap
    assert "aten.linear.default" not in cheap


def test_what_is_detached_sends_no_gradient_and_what_is_switched_off_draws_nothing() -> None:
    graph = trace(Net(without_gradient), (X,)).graph
    (detach,) = [op for op in graph.operators if op.target == "aten.detach.default" and op.module == ""][-1:]
    assert not graph.values[detach.outputs[0]].differentiable
    trace(Net(lambda net, x: functional.rrelu(net.linear(x), training=False).sum()), (X,))


# --- what is refused ----------------------------------------------------------------------------------------


def branch(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    return y.sum() if y.sum() > 0 else y.prod()


def ragged(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x)[x > 0].sum()


def noisy(net: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.normal(net.linear(x), 1.0).sum()


def alpha(net: Net, x: torch.Tensor) -> torch.Tensor:
    return functional.alpha_dropout(net.linear(x), 0.1, True).sum()


def shuffled(net: Net, x: torch.Tensor) -> torch.Tensor:
    return (net.linear(x)[torch.randperm(x.shape[0])] * x).sum()


def far_apart(net: Net, x: torch.Tensor) -> torch.Tensor:
    return (net.linear(x) * torch.randint(-1, 1 << 32, (4,))).sum()


def geometric(net: Net, x: torch.Tensor) -> torch.Tensor:
    return (net.linear(x) * x.new_empty((4,)).geometric_(0.5)).sum()


def hidden_draw(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    with torch.no_grad():
        y.select(0, 1).normal_()
    return y.sum()


def strided(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x).as_strided((2, 2), (1, 2)).sum()


def mapped(net: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(net.linear)(x).sum()


def autocast(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.linear(x).sum()


def hidden_write(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    with torch.no_grad():
        y.select(0, 1).mul_(0.0)
    return y.sum()


def hidden_write_of_all(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    with torch.no_grad():
        y.mul_(2.0)
    return (y.tanh() + net.linear(x)).sum()


def hidden_turn(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    with torch.no_grad():
        y.t_()
    return (y.t() + net.linear(x)).sum()


def weight_changed(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.linear.weight.mul_(0.9)
    return net.linear(x).sum()


def hooked(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    y.register_hook(lambda grad: grad * 3)
    return y.sum()


def hooked_behind(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda given, taken: tuple(one if one is None else one * 3 for one in given))
    return y.sum()


def hooked_module(net: Net, x: torch.Tensor) -> torch.Tensor:
    handle = net.linear.register_full_backward_pre_hook(lambda module, grads: (3 * grads[0],))
    try:
        return net.linear(x).sum()
    finally:
        handle.remove()


def switched(net: Net, x: torch.Tensor) -> torch.Tensor:
    """As a discriminator is frozen while its generator learns."""
    net.linear.requires_grad_(False)
    y = net.linear(x)
    net.linear.requires_grad_(True)
    return (y + net.linear(x)).sum()


def switched_by_attribute(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.linear.weight.requires_grad = False
    return net.linear(x).sum()


def inferred(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = net.linear(x)
    return (y.clone() + net.linear(x)).sum()


def data_set(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    y.data = 2.0 * y.detach()
    return y.sum()


def data_read(net: Net, x: torch.Tensor) -> torch.Tensor:
    return (net.linear(x) * net.linear(x).data).sum()


def differentiated(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    return torch.autograd.grad(y.tanh().sum(), y, create_graph=True)[0].sum()


def aligned_by_numbers(net: Net, x: torch.Tensor) -> torch.Tensor:
    lengths = torch.ones(1, dtype=torch.int64)
    return functional.ctc_loss(net.linear(x)[:, None], lengths[None], 3 * lengths, lengths)


def written_out(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    torch.mul(x, 2.0, out=y)
    return net.linear(y).sum()


def looked_up_sparsely(net: Net, x: torch.Tensor) -> torch.Tensor:
    return functional.embedding(x.abs().long(), net.linear.weight, sparse=True).sum()


LINE = r"test_graph_trace.py:\d+: "


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (branch, LINE + r"`return y.sum\(\) if y.sum\(\) > 0.*depends on the numbers in a tensor"),
        (ragged, LINE + r"operator aten.index.Tensor makes a size or number \(u0\) that depends on data"),
        (mapped, "Net cannot be traced as one graph of operators: .* which is no operator"),
        (autocast, "the model switches autocast on; leave that to the run's dtype"),
        (hidden_write, "operator aten.mul_.* writes to a tensor that needs a gradient, under no_grad"),
        (hidden_write_of_all, LINE + "operator aten.mul.Tensor writes to a tensor that needs a gradient"),
        (
            hidden_turn,
            LINE + "operator aten.t.default writes to a tensor that needs a gradient, under no_grad",
        ),
        (weight_changed, "operator aten.mul_.Tensor changes the parameter linear.weight while the model"),
        (hooked, r"hangs a hook on the gradient of a tensor \(register_hook\), which cannot be traced"),
        (hooked_behind, r"the model reads the grad_fn of a tensor, .* a hook there would be lost"),
        (hooked_module, r"the model reads the grad_fn of a tensor, as a module's backward hook does"),
        (switched, r"the model switches requires_grad of a weight \[4, 4\] while it computes"),
        (switched_by_attribute, r"the model switches requires_grad of a weight \[4, 4\]"),
        (inferred, "the model computes under inference_mode, which no trace keeps: take no_grad"),
        (data_set, r"the model sets the \.data of a tensor, which no trace keeps"),
        (data_read, r"it reads \.data, or takes gradients while it computes: take \.detach\(\)"),
        (differentiated, r"takes gradients while it computes: take \.detach\(\), or write their formula"),
        (aligned_by_numbers, r"operator aten._ctc_loss.Tensor: what the code does depends on the numbers"),
        (written_out, "operator aten.mul.out writes to an argument: take what it returns, without out="),
        (
            looked_up_sparsely,
            "operator aten.embedding.default of the model gives sparse gradients, .* sparse=False",
        ),
        (noisy, LINE + "operator aten.normal.Tensor_float of the model draws random numbers"),
        (alpha, "operator aten.alpha_dropout.default of the model draws random numbers"),
        (
            shuffled,
            "operator aten.randperm.default of .* draws .* use dropout, torch.rand, randn, randint or",
        ),
        (far_apart, "operator aten.randint.low of the model draws random numbers"),
        (geometric, "operator aten.geometric_.default of the model draws random numbers"),
        (hidden_draw, "operator aten.normal_.* writes to a tensor that needs a gradient, under no_grad"),
        (strided, "operator aten.as_strided.default of the model depends on how memory is laid out"),
        (lambda net, x: net.linear(x), "has to return a scalar loss .* not a torch.float32 of 2 dimensions"),
        (lambda net, x: {"logits": net.linear(x)}, "has to return a scalar loss .* not nothing of the kind"),
        (lambda net, x: x.sum(), "the loss depends on no parameter that is trained"),
    ],
)
def test_what_no_stage_may_do_is_refused_by_name(
    body: Callable[[Net, torch.Tensor], object], words: str
) -> None:
    with pytest.raises(SetupError, match=words):
        trace(Net(body).train(), (X,))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (
            nn.BatchNorm1d(2, momentum=None),
            "batch norm 1 has momentum None, the mean of all that it ever saw",
        ),
        (
            nn.InstanceNorm1d(2, track_running_stats=True),
            "instance_norm.default of 1 changes running statistics",
        ),
        (nn.RReLU(), "operator aten.rrelu.default of 1 draws random numbers"),
    ],
)
def test_layers_that_no_stage_may_compute_are_refused(layer: nn.Module, words: str) -> None:
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), layer, nn.Linear(2, 4))
    with pytest.raises(SetupError, match=words):
        trace(model.train(), (X,), loss=torch.sum)


class Normed(nn.Module):
    def __init__(self, seen: Callable[[Normed, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.linear, self.seen = nn.BatchNorm1d(4), nn.Linear(4, 4), seen

    def evaluated(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.linear(x)) * self.seen(self, x)).sum()


@pytest.mark.parametrize("seen", [Normed.evaluated, lambda net, x: x - net.norm.running_mean])
def test_statistics_that_a_batch_norm_changes_are_read_by_no_other_operator(
    seen: Callable[[Normed, torch.Tensor], torch.Tensor],
) -> None:
    """They are those of the start in each step, and not what a program would read."""
    with pytest.raises(SetupError, match=r"reads norm\.running_mean, which a batch norm in training changes"):
        trace(Normed(seen).train(), (X,))
    fixed = Normed(seen)
    fixed.norm.eval()
    assert "norm.running_mean" in trace(fixed, (X,)).graph.buffers


def tied_by_memory(whole: nn.Linear, part: nn.Module) -> None:
    part.weight.data = whole.weight.data  # type: ignore[union-attr, assignment]


def seen_by_a_buffer(whole: nn.Linear, part: nn.Module) -> None:
    part.register_buffer("before", whole.weight.data.t())


@pytest.mark.parametrize(
    ("shares", "words"), [(tied_by_memory, "1.weight lies in the memory of 0.weight"),
                          (seen_by_a_buffer, "1.before lies in the memory of 0.weight")],
)  # fmt: skip
def test_weights_that_lie_in_the_memory_of_others_are_refused(
    shares: Callable[[nn.Linear, nn.Module], None], words: str
) -> None:
    """Torch changes both with each step; stages would train them apart."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shares(model[0], model[1])  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=words):
        trace(model, (X,), loss=torch.sum)
    for weights in model.parameters():
        weights.requires_grad_(False)
    model.append(nn.Linear(4, 4))
    trace(model, (X,), loss=torch.sum)


def test_a_weight_without_a_shape_is_refused_by_its_name() -> None:
    with pytest.raises(
        SetupError, match=r"0\.weight has no shape yet: compute one sample with the model before"
    ):
        trace(nn.Sequential(nn.LazyLinear(4)), (X,), loss=torch.sum)


def test_what_is_sparse_is_refused_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("links", torch.eye(4).to_sparse())
    with pytest.raises(SetupError, match=r"links is sparse, which cannot be traced: hold it \.to_dense\(\)"):
        trace(model, (X,), loss=torch.sum)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_gradient_of_a_weight_is_refused_by_its_name(method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    handle = getattr(model[0].weight, method)(lambda _: None)
    with pytest.raises(SetupError, match=r"weights 0\.weight have a hook on their gradient, which no stage"):
        trace(model, (X,), loss=torch.sum)
    handle.remove()
    trace(model, (X,), loss=torch.sum)


class Running(nn.Module):
    """Keeps a mean of what it saw, as a buffer that it sets anew."""

    def __init__(self, after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.after, self.mean = nn.Linear(4, 4), after, nn.Buffer(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean = self.after(self.mean, y)
        return (y - self.mean).square().sum()


def test_a_buffer_that_is_set_anew_is_refused_by_its_name_and_one_that_is_cast_is_none() -> None:
    with pytest.raises(SetupError, match="a Running gives its buffer mean another value while it computes"):
        trace(Running(lambda mean, y: 0.9 * mean + 0.1 * y.detach().mean(0)), (X,))
    for cast in (lambda mean, y: mean.to(y), lambda mean, y: mean.bfloat16(), lambda mean, y: mean.detach()):
        model = Running(cast)
        before = model.mean
        assert trace(model, (X,)).graph.buffers == ("mean",) and model.mean is before


def in_the_dict(net: nn.Module, y: torch.Tensor) -> torch.Tensor:
    old = net._buffers["kept"]
    net._buffers["kept"] = y.detach().mean(0)
    return y - old


def registered_again(net: nn.Module, y: torch.Tensor) -> torch.Tensor:
    old = net.get_buffer("kept")
    net.register_buffer("kept", y.detach().mean(0))
    return y - old


def grown(net: nn.Module, y: torch.Tensor) -> torch.Tensor:
    net.kept = torch.cat((net.get_buffer("kept"), y.detach().mean(0)))
    return y - net.get_buffer("kept").sum()


def taken_away(net: nn.Module, y: torch.Tensor) -> torch.Tensor:
    old, net.kept = net.get_buffer("kept"), None
    return y - old


@pytest.mark.parametrize("body", [in_the_dict, registered_again, grown, taken_away])
def test_a_buffer_is_not_what_it_was_whichever_way_it_is_set(
    body: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    model = Net(lambda net, x: body(net, net.linear(x)).square().sum())
    model.register_buffer("kept", torch.ones(4))
    with pytest.raises(SetupError, match="a Net gives its buffer kept another value while it computes"):
        trace(model, (X,))
    assert torch.equal(model.get_buffer("kept"), torch.ones(4))


@pytest.mark.parametrize("found", [lambda y: torch.arange(4.0), lambda y: y.detach().mean(0)])
def test_a_buffer_whose_value_before_is_not_read_may_be_set_anew(
    found: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = Running(lambda mean, y: found(y))
    before, y = model.mean, model.linear(X)
    traced = trace(model, (X,))
    assert model.mean is before
    (piece,) = cut(traced, [0] * len(traced.graph.operators), seed=0)
    ((loss,), _) = piece(X, mb=Microbatch(0, 0))
    torch.testing.assert_close(loss, (y - found(y)).square().sum())


def test_a_gradient_by_torch_func_is_none_to_report_to_torch() -> None:
    told = reason(RuntimeError("torch.func.{grad, vjp} don't yet support saved tensor hooks."))
    assert told.startswith("it reads .data, or takes gradients while it computes: ")


def test_a_buffer_that_is_written_by_out_is_refused_by_its_name() -> None:
    model = Net(lambda net, x: net.linear(x).sum())
    nn.utils.parametrizations.spectral_norm(model.linear)
    with pytest.raises(SetupError, match=r"changes the buffer linear\.parametrizations\.weight\.0\._u while"):
        trace(model.train(), (X,))


def test_a_scripted_part_is_refused_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(SetupError, match=r"1 is compiled by torch\.jit, which cannot be traced: take the"):
        trace(model, (X,), loss=torch.sum)


def test_a_sample_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        SetupError, match=r"the sample does not fit Net\.forward: missing a required argument"
    ):
        trace(Net(branch), ())


def test_random_orders_are_topological() -> None:
    graph = whole("unet").traced.graph
    for assignment in random_cuts(graph, 7, seed=random.Random(0).randrange(100)):
        stages = {output: assignment[op.index] for op in graph.operators for output in op.outputs}
        assert all(stages.get(n, 0) <= assignment[op.index] for op in graph.operators for n in op.inputs)
