"""Tests in forks of one process that has imported and collected them: `pytest -p scripts.forks --forks 3`.

Each worker of pytest-xdist would import and collect all of them, and have a second file wait behind a long
one. A fork has imported all, and takes one file after the other of what is left; the parent prints what their
tests report.
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from peers.system import die_with_parent

PLACE = struct.Struct("=I")
"""A file's place among all, as the forks read it from the queue."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="run the tests in so many forks of this process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """What forks report is reported here, as if the tests had run in this process."""
    number = session.config.getoption("forks")
    if not number or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop lists them, or says what could not be collected
    files = [tuple(tests) for _, tests in itertools.groupby(session.items, lambda item: item.path)]
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    queue, writing = os.pipe()
    os.write(writing, b"".join(map(PLACE.pack, range(len(files)))))
    os.close(writing)
    forks = dict(forked(session, files, queue, name) for name in range(number))
    os.close(queue)
    try:
        report_all(session, forks)
    finally:
        for reader, process in forks.items():
            os.kill(process, signal.SIGINT)
            reader.close()
        for process in forks.values():
            os.waitpid(process, 0)
    return True


def report_all(session: pytest.Session, forks: dict[Connection, int]) -> None:
    """Report what the forks say until all of them have ended, or one test failed that shall be the last."""
    hook = session.config.hook
    left = {item.nodeid: item.location for item in session.items}
    running = dict.fromkeys(forks.values(), "")
    while forks:
        for reader in wait(list(forks)):
            assert isinstance(reader, Connection)
            process = forks[reader]
            try:
                running[process], said = reader.recv()
            except EOFError:
                del forks[reader]
                reader.close()
                _, status = os.waitpid(process, 0)
                if lost := running.pop(process):
                    how = f"the process that ran it ended with {os.waitstatus_to_exitcode(status)}"
                    report_lost(session, lost, left.pop(lost), how)
                continue
            for data in said:
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                left.pop(report.nodeid, None)
                hook.pytest_runtest_logreport(report=report)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    for name, location in left.items():
        report_lost(session, name, location, "the process that was to run it has ended")


def report_lost(session: pytest.Session, name: str, location: Any, how: str) -> None:
    report = pytest.TestReport(name, location, {}, "failed", how, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def forked(
    session: pytest.Session, files: Sequence[Sequence[pytest.Item]], queue: int, name: int
) -> tuple[Connection, int]:
    """A new fork that runs what it takes from `queue`: what it says, and its process."""
    reader, writer = Pipe(duplex=False)
    parent = os.getpid()
    process = os.fork()
    if process:
        writer.close()
        return reader, process
    try:
        reader.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell began us with `&`
        die_with_parent(parent, signum=signal.SIGINT)  # the test that runs takes down what it made
        run_files(session, files, queue, name, writer)
    except KeyboardInterrupt:
        pass  # the parent says so
    except BaseException:  # noqa: BLE001  told here, or nowhere
        traceback.print_exc()
    finally:
        os._exit(0)


def run_files(
    session: pytest.Session,
    files: Sequence[Sequence[pytest.Item]],
    queue: int,
    name: int,
    writer: Connection,
) -> None:
    """In the fork: the tests of file after file; then what they share is taken down."""
    plugins, hook = session.config.pluginmanager, session.config.hook
    plugins.unregister(name="terminalreporter")
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are the parent's, and each other fork's
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folders = session.config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"fork{name}"
    folders._basetemp.mkdir(mode=0o700)
    said: list[Any] = []

    class Reports:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            said.append(hook.pytest_report_to_serializable(config=session.config, report=report))

    plugins.register(Reports())

    def tests() -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
        """Each test, and the one that follows it. After the last one of a file that is any of another file:
        who took the next one sooner would keep it from the other forks meanwhile.
        """
        while place := os.read(queue, PLACE.size):
            number = PLACE.unpack(place)[0]
            file, another = files[number], files[number - 1][0] if len(files) > 1 else None
            session._setupstate.teardown_exact(file[0])
            yield from zip(file, (*file[1:], another), strict=True)

    try:
        for item, following in tests():
            writer.send((item.nodeid, ()))
            hook.pytest_runtest_protocol(item=item, nextitem=following)
            writer.send(("", said))
            said.clear()
            if session.shouldfail or session.shouldstop:
                break
    finally:
        session._setupstate.teardown_exact(None)
