# SPDX-License-Identifier: Apache-2.0
"""Launchers of several jobs, forked from one process that has imported the program and torch.

A launcher with `--fork` imports torch, and has another process import the program: a dozen seconds
on a CPU, for each job. Here both are forks. This file is also the program of the process that
imports; see `moevement_ext/launch/spare.py`.
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, NoReturn

from moevement_ext.launch import command_line, spare
from moevement_ext.launch.child import Child, ForkedChild
from moevement_ext.launch.template import Template

# Prefix of environment variables that no import reads.
_OF_A_JOB = 'MOEVEMENT_'
# Importing processes, by program and environment.
_importers: dict[tuple[str, tuple[tuple[str, str], ...]], Template] = {}
_imported: list[Callable[[], None]] = []

MOEVEMENT_SPARES = True


def start(
    program: str, command: Sequence[str], environment: Mapping[str, str], log: BinaryIO
) -> Child:
    """Fork `moevement launch --fork`.

    Args:
        program: path of the workers' program.
        command: command line of the launcher, beginning with the name of the module; its import
            gets the flags of the first job's program.
        environment: complete environment of the launcher.
        log: file for the launcher's output.

    Raises:
        LaunchError: the program cannot be imported.
    """
    imports = {k: v for k, v in environment.items() if not k.startswith(_OF_A_JOB)}
    flags = command[command.index(program) + 1 :]
    return _importer(program, flags, imports).start(command, environment, log)


def close() -> None:
    while _importers:
        _importers.popitem()[1].close()


def _importer(program: str, flags: Sequence[str], environment: Mapping[str, str]) -> Template:
    """The process that imports; it ends with the thread that started it, or by `close`."""
    key = program, tuple(sorted(environment.items()))
    if key not in _importers:
        _importers[key] = Template.spawn(__file__, [program, *flags], environment)
    return _importers[key]


# In the process that imports, and in its forks


def warm_up(flags: list[str]) -> None:
    from moevement_ext.launch import supervisor  # noqa: F401

    program, *flags = flags
    _imported.append(spare.import_program(program, flags))


def main() -> NoReturn:
    """Run the launcher in a fork; its template is a fork of this fork."""
    template = _fork_template(_imported[0])
    Template.spawn = lambda *_: template  # type: ignore[method-assign]
    sys.exit(command_line.main())


def _fork_template(start: Callable[[], None]) -> Template:
    own, other = socket.socketpair()
    launcher, pid = os.getpid(), os.fork()
    if pid == 0:
        own.close()
        spare.bind(launcher)
        spare.report(other)
        spare.serve(other, start)
        os._exit(0)
    other.close()
    return Template(ForkedChild(pid), own)


if __name__ == '__main__':
    main()
