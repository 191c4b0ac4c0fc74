"""A module as text: the same operators, the same numbers, in training and after it; and what is refused."""

from __future__ import annotations

import io
import logging
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from peers.api.module_text import module_text
from peers.storage import written
from swarm import installed
from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.model.graph.capture import find_loss
from swarm.model.graph.model_source import CustomModel, from_code
from swarm.model.graph.trace import Traced
from tests.api.nets import net, samples
from tests.model.graph import zoo
from tests.model.graph.parity import cut, gradients
from tests.model.graph.test_own_functions import BODIES, Net, X
from tests.seeds import some


def again(sample: CustomModel, folder: Path, name: str) -> CustomModel:
    """Written, and read again, as a peer does."""
    lines, tensors = module_text(sample)
    text = "import torch\nfrom peers.storage.written import WrittenModule\n" + "\n".join(lines) + "\n"
    written.write(folder / name, text, tensors, None)
    installed.import_file(folder / name)
    return from_code(f"{name}:build")


def told(traced: Traced) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(op.target, op.parameters, op.outputs) for op in traced.graph.operators]


@pytest.mark.parametrize("name", some(sorted(set(zoo.MODELS) - {"resnet101"}), quick=["unet"]))
def test_a_written_model_has_the_operators_and_the_numbers_of_the_one_it_was(
    name: str, tmp_path: Path
) -> None:
    model, args = zoo.MODELS[name]()
    sample = CustomModel(module=model, args=args)
    read = again(sample, tmp_path, f"written_{name}")
    traced, first = read.trace(), sample.trace()
    assert told(traced) == told(first)
    assert traced.graph.inputs == first.graph.inputs
    state = {key: value.clone() for key, value in model.state_dict().items()}  # a batch norm's changes
    loss = find_loss(model(*args))
    loss.backward()
    model.load_state_dict(state)
    other = read.module.train()(*args)
    other.backward()
    torch.testing.assert_close(other, loss)
    gradients = {key: weights.grad for key, weights in model.named_parameters()}
    for key, weights in read.module.named_parameters():
        # A convolution is computed otherwise where its operands lie otherwise.
        torch.testing.assert_close(weights.grad, gradients[key], rtol=1e-4, atol=1e-4)


def test_dropout_and_batch_norm_are_off_outside_of_training(tmp_path: Path) -> None:
    tokens, classes = samples(8)
    model = net()
    sample = CustomModel(module=model, args=(tokens,), loss=functional.cross_entropy, targets=(classes,))
    read = again(sample, tmp_path, "written_net").module
    expected = functional.cross_entropy(model.eval()(tokens), classes)
    assert torch.equal(read.eval()(tokens, classes), expected)
    assert not torch.equal(read.train()(tokens, classes), expected)
    assert not hasattr(read, "idle")


@pytest.mark.parametrize("name", some(list(BODIES), quick=["reversed", "another within"]))
def test_a_models_own_functions_are_written_with_the_authors_backward(name: str, tmp_path: Path) -> None:
    model = Net(BODIES[name]).double()
    sample = CustomModel(module=model, args=(X,))
    read = again(sample, tmp_path, f"written_{name.replace(' ', '_')}")
    loss = model(X)
    loss.backward()
    read.module.double()
    other = read.module.train()(X)
    other.backward()
    assert torch.equal(other, loss)
    for key, weights in read.module.named_parameters():
        torch.testing.assert_close(weights.grad, model.get_parameter(key).grad, rtol=0, atol=0)
    traced, first = read.trace(), sample.trace()
    assert len(traced.graph.operators) == len(first.graph.operators)
    (piece,) = cut(traced, [0] * len(traced.graph.operators), seed=0)
    got = gradients([piece], {"x": X}, Microbatch(0, 0))
    for key, gradient in got.parameters.items():
        torch.testing.assert_close(gradient, model.get_parameter(key).grad, rtol=1e-15, atol=1e-15)


@torch.library.custom_op("swarmtests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


thrice.register_fake(torch.empty_like)
thrice.register_autograd(lambda ctx, grad: 3 * grad)


def test_an_operator_of_a_library_is_traced_but_not_written() -> None:
    model = Net(lambda net, y: thrice(y)).double()
    sample = CustomModel(module=model, args=(X,))
    model(X).backward()
    (piece,) = cut(traced := sample.trace(), [0] * len(traced.graph.operators), seed=0)
    for key, gradient in gradients([piece], {"x": X}, Microbatch(0, 0)).parameters.items():
        torch.testing.assert_close(gradient, model.get_parameter(key).grad, rtol=1e-15, atol=1e-15)
    with pytest.raises(SetupError, match=r"calls swarmtests\.thrice\.default, .* that peers may not have"):
        module_text(sample)


class Tied(nn.Module):
    """Reads one tensor as what enters and as what is to come of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.words.weight.data.normal_(generator=torch.Generator().manual_seed(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x))


def test_a_tied_weight_is_one_and_a_tensor_given_twice_is_two_inputs(tmp_path: Path) -> None:
    x = torch.arange(5)
    sample = CustomModel(module=Tied(), args=(x,), loss=functional.cross_entropy, targets=(x,))
    read = again(sample, tmp_path, "written_tied")
    assert [name for name, _ in read.module.named_parameters()] == ["words.weight"]
    for traced in (read.trace(), sample.trace()):
        readers = {name: op.target for op in traced.graph.operators for name in op.inputs}
        assert readers["x"].startswith("aten.embedding")
        assert readers["target"].startswith("aten.cross_entropy_loss")


class Called(nn.Module):
    """Its input is called as what the text of a forward says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, torch: torch.Tensor, float: torch.Tensor) -> torch.Tensor:
        return self.linear(torch).masked_fill(float > 9, math.inf).sum()


def test_an_input_may_be_called_as_what_the_text_says(tmp_path: Path) -> None:
    traced = again(CustomModel(module=Called(), args=(X, X[:, :1])), tmp_path, "written_called").trace()
    assert traced.graph.inputs == ("torch_", "float_")


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


def test_a_sample_that_does_not_fit_is_refused_with_the_line_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [told])
    with pytest.raises(
        SetupError, match=r"test_module_text.py:\d+: `return self.linear\(x\).sum\(\)`: .*2, 5"
    ):
        module_text(CustomModel(module=Wrong(), args=(torch.zeros(2, 5),)))
    assert told.stream.getvalue() == "", "torch logs pages of it"
