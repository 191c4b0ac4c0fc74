"""What a program is kept out of: an event loop in a thread of its own, since that of a notebook runs already,
and how peers compute."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers.events import Emit, Event
from swarm.errors import SetupError
from swarm.model.same_bits import threads_as_before

T = TypeVar("T")

INTERRUPTED_S = 0.5
"""An interrupt is noticed within this time."""


class Background:
    """The loop; what runs in it is not held up by what the caller computes.

    The thread lives as long as this: the kernel ends child processes with the thread that started them.
    """

    def __init__(self) -> None:
        here: Future[None] = Future()

        async def main() -> None:
            torch.set_flush_denormal(False)  # a thread, and so those of a peer, has this of what starts it
            self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
            here.set_result(None)
            await self._ending.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(main()), name="swarm", daemon=True)
        self._thread.start()
        here.result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result; if the caller is interrupted, the work is cancelled.

        An interrupt comes between any two lines of Python, also where those of a `Future` have just taken its
        lock: it would be held for ever, and the loop stand still. So the result comes by a queue in C.
        """
        told: SimpleQueue[Future[T]] = SimpleQueue()

        async def run() -> None:
            found: Future[T] = Future()
            try:
                found.set_result(await work)
            except BaseException as error:
                found.set_exception(error)
                raise
            finally:
                told.put(found)

        future = self.start(run())
        try:
            while True:
                # An interrupt that comes just before a wait in C does not end that: so each is short.
                with contextlib.suppress(Empty):
                    found = told.get(timeout=INTERRUPTED_S)
                    break
            return found.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()


def heard(on_event: Emit) -> Emit:
    """A user's function, without its errors, which are logged: they would end the task of a peer, before it
    saves a step, or the reading of a process, which waits then. Raises SetupError: it is no function."""
    if not callable(on_event):
        raise SetupError(f"on_event is {on_event!r}: give a function, which is called with each event")

    def hear(event: Event) -> None:
        try:
            with contextlib.suppress(BrokenPipeError):  # it is not read on
                on_event(event)
        except Exception:
            logging.getLogger(__name__).exception("on_event failed at %r", event)

    return hear


@contextlib.contextmanager
def as_in_peers() -> Iterator[None]:
    """Compute in this thread as a process of a peer does, whatever this program has told torch; it has all
    that back afterwards."""
    default = torch.get_default_device().type == "cpu"
    with (
        all_as_in_peers(), torch.inference_mode(False), torch.enable_grad(),
        torch.autocast("cpu", enabled=False), contextlib.nullcontext() if default else torch.device("cpu"),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        contextlib.ExitStack() as told,
    ):  # fmt: skip
        told.callback(torch.set_flush_denormal, not sys.float_info.min / 2)
        torch.set_flush_denormal(False)
        yield


_told, _lock = contextlib.ExitStack(), threading.Lock()
_inside = 0
"""How many compute as peers do: the last one gives the program back what it told torch."""


@contextlib.contextmanager
def all_as_in_peers() -> Iterator[None]:
    """What torch does alike in all threads, as in a process of a peer: such as products in less than float32,
    or attention without its fused kernel."""
    global _inside
    with _lock:
        if not _inside:
            _tell_all(_told)
        _inside += 1
    try:
        with threads_as_before():
            yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _told.close()


def _tell_all(told: contextlib.ExitStack) -> None:
    """Tell torch what a peer does, until `told` is closed."""
    of: Any = torch.backends
    kinds = (of, of.cuda.matmul, of.mkldnn.matmul, of.mkldnn.conv, of.mkldnn.rnn)

    def tell(dtype: torch.dtype, products: str, precisions: Sequence[str]) -> None:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(products)
        for kind, precision in zip(kinds, precisions, strict=True):
            kind.fp32_precision = precision

    told.callback(torch.set_num_threads, torch.get_num_threads())  # of threads that will start
    told.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
    room: Any = torch.utils.deterministic
    told.callback(setattr, room, "fill_uninitialized_memory", room.fill_uninitialized_memory)
    dtype, products, before = torch.get_default_dtype(), "highest", [kind.fp32_precision for kind in kinds]
    with contextlib.suppress(RuntimeError):  # torch has two ways to set it, and one does not read the other's
        products = torch.get_float32_matmul_precision()
    told.callback(tell, dtype, products, before)
    tell(torch.float32, "highest", ["none"] * len(kinds))
    told.enter_context(torch.autograd.set_detect_anomaly(False))
    told.enter_context(of.mkldnn.flags(enabled=True, allow_tf32=None))
    told.enter_context(sdpa_kernel([*SDPBackend.__members__.values()]))
