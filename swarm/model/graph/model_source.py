"""Sources of custom models: an installed function by its name, or a config of Hugging Face's transformers.

Nothing is fetched. A function is code that runs with the rights of the peer's user, who has to install it.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swarm.errors import SetupError
from swarm.installed import call, first_line
from swarm.model.graph.trace import Traced, trace

FORMS = "(module, inputs), or (module, inputs, loss, targets)"
FETCHED = ("auto_map", "attribute_map", "backbone", "use_pretrained_backbone")
"""Keys of a config by which transformers fetches code, configs or weights; by the second any key is one."""
_WITH_MODES = (
    *(nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase),
    *(nn.RNNBase, nn.RReLU, nn.MultiheadAttention),
)
MAX_NUMBER, MAX_LABELS = 1 << 24, 1 << 20
"""Whole numbers in a config, of which transformers makes lists; each label becomes a text, twice."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CustomModel:
    """A model with a sample microbatch."""

    module: nn.Module
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[..., torch.Tensor] | None = None
    """`loss(output, *targets)`, which may be a module with weights; None: the model returns its loss."""
    targets: Sequence[Any] = ()

    def trace(self) -> Traced:
        """The model in training as a graph; raises as `train` and `swarm.model.graph.trace`."""
        self.train()
        return trace(self.module, self.args, self.kwargs, loss=self.loss, loss_args=self.targets)

    def train(self) -> None:
        """Put it in training mode, and its loss. Raises SetupError: that changes what a part computes that
        alone is in another."""
        for whole in [one for one in (self.module, self.loss) if isinstance(one, nn.Module)]:
            apart = {p for p in whole.modules() if whole.training and not p.training and _has_modes(p)}
            for name, part in whole.train().named_modules():
                if part.training and part in apart:
                    raise SetupError(
                        f"{name} of {type(whole).__name__} is in evaluation mode, and would be trained in "
                        "training mode: call .train() of the whole before, or have its train() leave that "
                        "part as it is"
                    )


def _has_modes(part: nn.Module) -> bool:
    """Whether a part may compute something else in training: of torch's own few do."""
    return isinstance(part, _WITH_MODES) or not type(part).__module__.startswith("torch.nn.")


def from_code(spec: str) -> CustomModel:
    """Call `package.module:function`, without arguments.

    It returns (module, inputs), where the module gives its loss, or (module, inputs, loss, targets) for
    `loss(module(*inputs), *targets)`. Inputs are a tensor, a tuple, or a dict of arguments by name; targets a
    tensor or a tuple.

    Raises:
        SetupError: there is no such function here, or it returns something else.
    """
    made = call(spec, "model")
    if not isinstance(made, tuple) or len(made) not in (2, 4) or not isinstance(made[0], nn.Module):
        raise SetupError(f"{spec} has to return {FORMS}; it returned a {type(made).__name__}")
    inputs = made[1]
    loss, targets = made[2:] if len(made) == 4 else (None, ())
    return CustomModel(
        module=made[0], args=() if isinstance(inputs, Mapping) else as_tuple(inputs),
        kwargs=inputs if isinstance(inputs, Mapping) else {}, loss=loss, targets=as_tuple(targets),
    )  # fmt: skip


def transformers() -> Any:
    """Hugging Face's package. Raises SetupError: it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise SetupError(
            "a model of Hugging Face needs transformers: pip install 'swarm-train[hf]'"
        ) from None


def from_hf(config: Mapping[str, Any], *, rows: int, length: int, inputs: Sequence[str] = ()) -> CustomModel:
    """The model of a transformers config (a `config.json`), with weights as its own code initialises them.

    A language model gets `rows` × `length` tokens, a classifier of images `rows` images of the config's size;
    any model `rows` samples of `inputs`, if a manifest names them.

    Raises:
        SetupError: the extra [hf] is not installed, no such model is known, or it takes other inputs.
    """
    library = transformers()
    library.utils.logging.set_verbosity_error()  # it tells of defaults that do not concern us
    for key, value in _entries(config):
        if (key in FETCHED and value) or ("attn_implementation" in key and "/" in str(value)):
            raise SetupError(f"{key} in the model's config asks for something to be fetched: leave it out")
        most = math.inf if "theta" in key else MAX_LABELS if key == "num_labels" else MAX_NUMBER
        if type(value) is int and value > most:
            raise SetupError(f"{key} in the model's config is {value}: at most {most} are taken")
    settings = dict(config)
    try:
        known = library.AutoConfig.for_model(settings.pop("model_type", ""), **settings)
        names = known.architectures or [""]
        auto = library.AutoModelForCausalLM
        module = getattr(library, names[0], auto)._from_config(known) if names[0] else auto.from_config(known)
    except Exception as error:
        raise SetupError(f"transformers makes no model of this config: {first_line(error)}") from error
    if hasattr(known, "use_cache"):
        known.use_cache = False  # for generation; it is no tensor
    tokens, size = torch.zeros((rows, length), dtype=torch.int64), getattr(known, "image_size", 224)
    given: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone()}
    if inputs:
        given = dict(_input(text, rows) for text in inputs)
    elif module.main_input_name == "pixel_values":
        sizes = (size, size) if isinstance(size, int) else size.values() if isinstance(size, dict) else size
        images = torch.zeros(rows, getattr(known, "num_channels", 3), *sizes)
        given = {"pixel_values": images, "labels": torch.zeros(rows, dtype=torch.int64)}
    try:
        inspect.signature(module.forward).bind(**given)
    except TypeError as error:
        raise SetupError(
            f"{type(module).__name__}.forward: {error}; say what it is given, such as "
            'model.inputs = ["input_values float 16000", "labels int 40"]'
        ) from None
    return CustomModel(module=module, kwargs=given)


def _entries(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All keys with their values, also of tables and lists inside; a list's parts have its key."""
    for name, value in config.items() if isinstance(config, Mapping) else ((key, part) for part in config):
        yield str(name), value
        if isinstance(value, Mapping | list):
            yield from _entries(value, str(name))


def _input(text: str, rows: int) -> tuple[str, Any]:
    """The name and the sample of an input, as a manifest has it."""
    name, kind, *sizes = text.split(" ")
    if kind == "true":
        return name, True
    shape = (rows, *(int(size) for size in sizes[0].split("x"))) if sizes else (rows,)
    dtype = {"int": torch.int64, "float": torch.get_default_dtype(), "bool": torch.bool}[kind]
    return name, torch.zeros(shape, dtype=dtype)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
