# SPDX-License-Identifier: Apache-2.0
"""What a job of threads leaves behind does no harm."""

import contextlib
import os
import threading
import time
from typing import NoReturn

import pytest

from tests.unit.recover.threaded_job import Died, _raise_in, install


class Ended:
    def __init__(self) -> None:
        self.codes: list[int] = []

    def end(self, code: int) -> NoReturn:
        self.codes.append(code)
        raise Died


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_thread_that_outlives_its_test_ends_alone() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
    assert os._exit.__module__ != 'posix', 'the thread would end pytest'
    process = Ended()

    def late() -> None:
        child = threading.Thread(target=lambda: os._exit(76))
        child.start()
        child.join()
        os._exit(75)

    thread = threading.Thread(target=late)
    thread.process = process  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    assert process.codes == [76, 75]


def test_a_thread_does_not_end_while_it_wakes_another() -> None:
    """Else the other one may wait for ever."""
    wakes, woken = threading.Event(), threading.Event()

    def notify() -> None:
        wakes.set()
        woken.wait()

    def give() -> None:
        with contextlib.suppress(Died):
            notify()
            while True:
                time.sleep(0.001)

    giver = threading.Thread(target=give)
    giver.start()
    wakes.wait()
    raiser = threading.Thread(target=_raise_in, args=(giver, Died))
    raiser.start()
    raiser.join(0.05)
    assert raiser.is_alive()
    woken.set()
    raiser.join()
    giver.join()
