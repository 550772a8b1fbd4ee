# SPDX-License-Identifier: Apache-2.0
"""A hot spare: imports a program, then waits to be told which worker it is.

    spare.py <program>

Imports of torch and Megatron take many seconds, which a replacement that has done them need not.
The spare says on stdout that it is ready (one byte) and waits for a line of JSON on stdin:

    {"argv": [...], "env": {...}, "log": "file to append to, or null to print on stdout"}

It then calls `main()` of the program. If stdin ends instead, so does the spare. It runs as a file,
without the package, so that `sys.path` and what is imported are those of the program.
"""

import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import Any

_STDIN, _STDOUT, _STDERR = range(3)


def main() -> None:
    """Body of the process."""
    program = sys.argv[1]
    launcher = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)  # what imports print is not the sign of being ready
    module = _import_program(program)
    if not callable(getattr(module, 'main', None)):
        sys.exit(f'{program} has no function main(), which --spares needs; leave out --spares')
    os.write(launcher, b'.')
    line = sys.stdin.readline()
    if line:
        _become_worker(json.loads(line), launcher)
        module.main()


def _import_program(program: str) -> ModuleType:
    """Run everything at the top level, as `import` does, with the paths of `python <program>`."""
    path = os.path.realpath(program)
    name = os.path.splitext(os.path.basename(path))[0]
    sys.path[0] = os.path.dirname(path)
    sys.argv = [program]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        sys.exit(f'{program} is not a Python program; leave out --spares')
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _become_worker(order: dict[str, Any], launcher: int) -> None:
    """Take over environment, arguments and output."""
    sys.stdout.flush()
    output = launcher
    if order['log'] is not None:
        output = os.open(order['log'], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, _STDOUT)
    os.dup2(output, _STDERR)
    os.close(launcher)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, _STDIN)
    os.environ.update(order['env'])
    sys.argv = order['argv']


if __name__ == '__main__':
    main()
