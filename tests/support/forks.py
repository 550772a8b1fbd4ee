# SPDX-License-Identifier: Apache-2.0
"""Processes that have torch at once: a fresh interpreter imports it for seconds."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

PROGRAM = 'pretrain_gpt'
PRELOAD = ['torch.distributed', 'torch.testing._internal.distributed.fake_pg', 'psutil', 'xxhash']


def context() -> ForkServerContext:
    """A context whose processes are forks of one that has imported what is often needed.

    There is one such process per test session; where tests want the whole program in it, it stays.
    """
    context = multiprocessing.get_context('forkserver')
    if PROGRAM not in forkserver._forkserver._preload_modules:
        context.set_forkserver_preload(PRELOAD)
    return context


class Forked:
    """Calls a function in a process of its own, and keeps what that prints.

    Args:
        function: of a module.
        arguments: of the function.
        environment: what its variables have besides those of this process.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        (out, to_out), (errors, to_errors) = (context().Pipe(duplex=False) for _ in range(2))
        self._process = context().Process(
            target=_run,
            args=(function, arguments, dict(environment or {}), to_out, to_errors),
            daemon=True,
        )
        self._process.start()
        to_out.close()
        to_errors.close()
        self.stdout, self._stderr = (os.fdopen(os.dup(one.fileno())) for one in (out, errors))
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        """What it exits with; minus its signal if that has ended it, None if nothing has yet."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def end(self, timeout_s: float) -> tuple[int, str, str]:
        """What it exits with, and what it has printed that has not been read."""
        code = self.wait(timeout_s)
        assert code is not None, 'it does not end'
        return code, self.stdout.read(), self._stderr.read()

    def kill(self) -> None:
        """Nothing of it is left."""
        self._process.kill()
        self._process.join()
        self.stdout.close()
        self._stderr.close()


def _run(
    function: Callable[..., object],
    arguments: Sequence[object],
    environment: dict[str, str],
    out: Connection,
    errors: Connection,
) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    out.close()
    errors.close()
    os.environ.update(environment)
    try:
        function(*arguments)
    except Exception:  # at once, whatever its threads wait for
        traceback.print_exc()
        os._exit(1)
