"""Initial weights of a user's model, each drawn when it is asked for: no peer has to hold all of them.

The code that makes the model runs as it is, but what it computes of its draws is only noted, on tensors whose
memory was never written to, which costs nothing. Each draw has a seed of its own, by its number in the code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from swarm.errors import SetupError
from swarm.model.same_bits import storage_of, threads_as_before
from swarm.model.seeded_random import seed_of

aten = torch.ops.aten

LARGE_BYTES = 1 << 20
"""Tensors of one number again and again are noted from this size on; smaller ones may as well be made."""
MAX_STEPS = 1 << 18
"""A config may be a stranger's: of ten thousand layers, which take a minute and half a GB."""
_UNSET = frozenset(
    (
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    )
)
_SEEDS = 0xFFFFFFFF
"""torch's generator on the CPU looks at 32 bits: so no two draws of a model begin alike."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the numbers of a tensor lie."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def within(self, storages: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storages[self.storage], self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A call that was noted, with places for tensors."""

    function: Any
    args: Any
    kwargs: Any
    reads: tuple[int, ...]
    """Storages, those that it writes to as well."""
    makes: tuple[_Place, ...]
    draw: int
    """The number of the draw; -1: it is none."""


_NEEDS_NUMBERS = (RuntimeError, TypeError, ValueError, IndexError)
"""What an operator raises that is given shapes alone, if it cannot say what it would make."""


class LazyTensors:
    """What the code of one model did with `noted` in force."""

    def __init__(self, seed: int, most: int = MAX_STEPS) -> None:
        """`most`: calls that are noted."""
        self._seed, self._most = seed_of("draws", seed), most
        self._steps: list[_Step] = []
        self._writers: dict[int, list[int]] = {}
        """Storage -> the steps that made it or wrote to it; others have their numbers in memory."""
        self._kept: dict[int, torch.UntypedStorage] = {}
        """So that no other takes its address."""
        self._there: set[int] = set()
        """Storages with steps whose numbers are in memory nevertheless."""
        self._count = 0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, draws and what follows from them are noted."""
        with _Readings(self), _Calls(self):
            yield

    @torch.no_grad()
    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers of a tensor: in memory of their own, if they are not there anyway."""
        place = self._place(tensor)
        if not self._lacks(tensor):
            return tensor.detach()
        with _disable_current_modes():
            return place.within(self._computed(place.storage))

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor) -> None:
        """Have the numbers of a tensor where it lies."""
        if self._lacks(tensor):
            place = self._place(tensor)
            with _disable_current_modes():
                found = self._computed(place.storage)[place.storage]
                _bytes(tensor.untyped_storage()).copy_(_bytes(found))
            self._there.add(place.storage)

    def fill_all(self, modules: Iterable[nn.Module], *others: Any) -> None:
        """The same of all that modules hold, and of what is in `others`."""
        for leaf in pytree.tree_leaves([*map(vars, modules), *others]):
            if isinstance(leaf, torch.Tensor):
                self.fill(leaf)

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do what the code asks, or note it, and give tensors without numbers."""
        schema, leaves = function._schema, pytree.tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        written = list(_written(schema, args, kwargs))
        shows = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        here = all(one.type == "cpu" for one in (*devices, *(tensor.device for tensor in given)))
        if not here or (shows and not written) or "set_" in schema.name or "resize" in schema.name:
            return function(*args, **kwargs)
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        noted = any(storage_of(tensor) in self._writers for tensor in given)
        made_up = function in _UNSET or (not given and _is_large(function, args, kwargs))
        if not (noted or is_random or made_up):
            return function(*args, **kwargs)
        try:
            made = _shaped(function, args, kwargs, written)
        except _NEEDS_NUMBERS:
            for tensor in given:
                self.fill(tensor)
            made = function(*args, **kwargs)
            for tensor in written:
                if storage_of(tensor) in self._writers:
                    self._give(tensor)
            return made
        for tensor in written:
            if storage_of(tensor) not in self._writers:
                self._give(tensor)
        new = [leaf for leaf in pytree.tree_leaves(made) if not any(leaf is one for one in written)]
        if function in _UNSET:
            (empty,) = new
            function, args = aten.empty_strided.default, (empty.shape, empty.stride())
            kwargs, given = {"dtype": empty.dtype}, []
        self._note(function, args, kwargs, given, written, new, is_random=is_random)
        for tensor in (*written, *new):
            self._there.discard(storage_of(tensor))
        return made

    def _note(
        self, function: Any, args: Any, kwargs: Any, given: list[torch.Tensor], written: list[torch.Tensor],
        new: list[torch.Tensor], *, is_random: bool = False,
    ) -> None:  # fmt: skip
        if len(self._steps) == self._most:
            raise SetupError(f"its code makes tensors by more than {self._most} calls: take fewer layers")
        arguments = pytree.tree_map_only(torch.Tensor, self._remembered, (args, kwargs))
        reads = {key for key in map(storage_of, given) if key in self._writers}
        for tensor in new:
            self._kept[storage_of(tensor)] = tensor.untyped_storage()
        for key in {*map(storage_of, written), *map(storage_of, new)}:
            self._writers.setdefault(key, []).append(len(self._steps))
        self._steps.append(
            _Step(
                function=function,
                args=arguments[0],
                kwargs=arguments[1],
                reads=tuple(reads),
                makes=tuple(map(self._place, new)),
                draw=self._count if is_random else -1,
            )
        )
        self._count += is_random

    def _give(self, tensor: torch.Tensor) -> None:
        """Note what is in the memory of a tensor now."""
        key, whole = storage_of(tensor), _bytes(tensor.untyped_storage())
        self._kept[key] = tensor.untyped_storage()
        self._writers.setdefault(key, [])
        self._note(_overwrite, (whole, whole.clone()), {}, [tensor], [tensor], [])
        self._there.add(key)

    def _remembered(self, tensor: torch.Tensor) -> _Place | torch.Tensor:
        """An argument, for later: its place; or what it is now, since the code may change it."""
        return self._place(tensor) if storage_of(tensor) in self._writers else tensor.detach().clone()

    def _lacks(self, tensor: torch.Tensor) -> bool:
        key = storage_of(tensor)
        return key in self._writers and key not in self._there

    def _computed(self, storage: int) -> dict[int, torch.UntypedStorage]:
        """The storages of what one follows from, and its own."""
        wanted, todo, known = set[int](), [storage], {storage}
        while todo:
            for number in self._writers[todo.pop()]:
                if number not in wanted:
                    wanted.add(number)
                    step = self._steps[number]
                    more = {*step.reads, *(place.storage for place in step.makes)} - known
                    known |= more
                    todo += more
        storages: dict[int, torch.UntypedStorage] = {}
        with seeded(0), threads_as_before():
            torch.set_num_threads(1)  # several add up in another order, and all peers begin alike
            for number in sorted(wanted):
                self._take(self._steps[number], storages)
        return storages

    def _take(self, step: _Step, storages: dict[int, torch.UntypedStorage]) -> None:
        if step.function is _overwrite:
            place, content = step.args
            storages[place.storage] = content.clone().untyped_storage()
            return
        args, kwargs = pytree.tree_map_only(
            _Place, lambda place: place.within(storages), (step.args, step.kwargs)
        )
        if step.draw >= 0:
            torch.default_generator.manual_seed((self._seed + step.draw) & _SEEDS)
        taken = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        own = {storage_of(tensor) for tensor in taken}
        made = [leaf for leaf in pytree.tree_leaves(step.function(*args, **kwargs)) if leaf is not None]
        made = [tensor for tensor in made if not any(tensor is one for one in taken)]
        for place, tensor in zip(step.makes, made, strict=True):
            if tensor.stride() != place.stride or tensor.storage_offset() or storage_of(tensor) in own:
                tensor = torch.empty_strided(place.shape, place.stride, dtype=place.dtype).copy_(tensor)
            storages[place.storage] = tensor.untyped_storage()

    def _place(self, tensor: torch.Tensor) -> _Place:
        return _Place(
            storage_of(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(),
            int(tensor.storage_offset()),
        )  # fmt: skip


class _Calls(TorchDispatchMode):
    def __init__(self, lazy: LazyTensors) -> None:
        super().__init__()
        self._lazy = lazy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._lazy.call(func, args, dict(kwargs or {}))


class _Readings(TorchFunctionMode):
    """What looks at numbers by another way than an operator finds them there."""

    def __init__(self, lazy: LazyTensors) -> None:
        super().__init__()
        self._lazy = lazy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ:
            self._lazy.fill(args[0])
        return func(*args, **(kwargs or {}))


_READ = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is drawn inside by torch's generator is a function of the seed; it goes on as before, after."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _overwrite(whole: torch.Tensor, content: torch.Tensor) -> None:
    """The step in which the code put numbers of its own into a tensor. Never called."""


def _written(schema: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _shaped(function: Any, args: Any, kwargs: Mapping[str, Any], written: list[torch.Tensor]) -> Any:
    """What a call gives: what it changes, or new tensors without numbers.

    Raises one of `_NEEDS_NUMBERS`: that depends on numbers, or it is no tensor.
    """
    if kwargs.get("generator") is not None:
        raise ValueError  # of the code's own, which goes on with each draw
    returns = function._schema.returns
    if written and all(one.alias_info is not None for one in returns):
        return written[0] if len(returns) == 1 else tuple(written) if returns else None
    made = _on_meta(function, args, kwargs)
    if not all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(made)):
        raise TypeError
    return pytree.tree_map(lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype), made)


def _on_meta(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a call gives without numbers."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    args, more = pytree.tree_map_only(torch.Tensor, empty, (args, dict(kwargs)))
    if any(argument.name == "device" for argument in function._schema.arguments):
        more["device"] = torch.device("meta")
    return function(*args, **more)


def _is_large(function: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call that takes no tensor makes large ones."""
    try:
        made = _on_meta(function, args, kwargs)
    except _NEEDS_NUMBERS:
        return False
    leaves = pytree.tree_leaves(made)
    return any(isinstance(leaf, torch.Tensor) and leaf.nbytes >= LARGE_BYTES for leaf in leaves)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
