# SPDX-License-Identifier: Apache-2.0
"""What a job of threads leaves behind does no harm."""

import os
import threading
from typing import NoReturn

import pytest

from tests.unit.recover.threaded_job import Died, install


class Ended:
    """A process of a job that is over."""

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
