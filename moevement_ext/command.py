# SPDX-License-Identifier: Apache-2.0
"""The command `moevement`, a front end of all programs. It imports only the program that it runs.

Each program is a module; `moevement NAME` is equivalent to `python -m MODULE`. Most programs are in
`tools` of a checkout. A wheel has these folders in `moevement_ext/programs`, because top-level
packages named `tools` and `scripts` could collide with those of other distributions.
"""

import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / 'programs'
ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent
"""Directory that contains `tools`, `scripts` and `pretrain_gpt.py`."""


class _Subcommand(NamedTuple):
    """One program of the command."""

    module: str
    does: str
    script: str = ''
    """Path of the script that runs the program in a checkout, if it has one."""


PROGRAMS = {
    'pretrain': _Subcommand(
        'megatron.moevement.pretrain_gpt', 'train a GPT: one worker, as a launcher starts it'
    ),
    'launch': _Subcommand(
        'moevement_ext.launch.command_line',
        'run a job on emulated nodes of this machine',
        'scripts/local_cluster.py',
    ),
    'slurm': _Subcommand('moevement_ext.slurm', 'run a job in a batch script of Slurm'),
    'store': _Subcommand('moevement_ext.store', 'serve the store of a job outside its nodes'),
    'torchrun': _Subcommand(
        'moevement_ext.store.torchrun', 'torchrun with its rendezvous in that store'
    ),
    'demo': _Subcommand(
        'tools.demo', 'see a lost node recovered, without a GPU', 'scripts/demo.sh'
    ),
    'prepare-data': _Subcommand('tools.prepare_data', 'make data for the trainer from text'),
    'check': _Subcommand('tools.check', 'whether a job can be protected, and how it recovers'),
    'plan': _Subcommand(
        'tools.plan', 'window, memory and times of a job, before there is a cluster'
    ),
    'placement': _Subcommand('tools.placement', 'where replicas and experts go'),
    'simulate': _Subcommand('tools.simulate', 'systems for fault tolerance compared'),
    'status': _Subcommand('tools.status', 'a running job in the terminal'),
    'report': _Subcommand('tools.report', 'one page about a run'),
    'windows': _Subcommand('tools.windows', 'list, verify, prune, export and try windows'),
    'compare-digests': _Subcommand('tools.compare_digests', 'compare two final states'),
    'plot-run': _Subcommand('tools.plot_run', 'plot losses and times of two logs'),
    'drill': _Subcommand(
        'tools.drill', 'run your job for a minute with failures, compare the bits'
    ),
    'chaos': _Subcommand('tools.chaos', 'random failures, bits compared'),
    'local-slurm': _Subcommand('tools.local_slurm', 'a Slurm with several nodes on this machine'),
    'compare': _Subcommand('tools.compare', 'ways to survive failures side by side'),
    'bench-overhead': _Subcommand(
        'tools.bench.overhead', 'cost of protection per iteration, or of narrow formats'
    ),
    'bench-recovery': _Subcommand('tools.bench.recovery', 'duration of a recovery'),
    'bench-spare-node': _Subcommand(
        'tools.bench.spare_node', 'time until a job trains again after a lost node'
    ),
    'bench-regroup': _Subcommand('tools.bench.regroup', 'time to reconnect process groups'),
}
_TRAINER = 'pretrain_gpt.py'
_ITS_LAUNCHERS = ('launch', 'slurm', 'torchrun')
_MODULES_OF_EXTRA = {'jinja2', 'matplotlib', 'rich', 'tqdm'}
_NAMES = {
    **{program.module: name for name, program in PROGRAMS.items()},
    **{program.script: name for name, program in PROGRAMS.items() if program.script},
}
_PRINTED = re.compile(
    r'(?:(?:\.venv/bin/)?python(?: -m)?(\s+))?\b('
    + '|'.join(map(re.escape, sorted(_NAMES, key=len, reverse=True)))
    + r')(?!\.?\w)'
)
# Name of the running program; empty unless the command started this process.
_running: list[str] = []


def called() -> str | None:
    """Return the command that started this process, such as `moevement plan`, or None."""
    return f'moevement {_running[0]}' if _running else None


def shown(text: str) -> str:
    """Return the text with programs named as `moevement NAME`, if the command started the process.

    Help and messages then repeat the form of the command line that the user typed.
    """
    return _PRINTED.sub(_renamed, text) if _running else text


def _renamed(found: re.Match[str]) -> str:
    space, name = found.groups()
    if space is None and not name.startswith('scripts/'):
        return found[0]  # a module in a sentence
    return f'moevement{space or " "}{_NAMES[name]}'


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named program in this process; return the exit status if no program runs."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ['--version']:
        from moevement_ext import __version__

        print(f'moevement {__version__}')
        return 0
    if not given or given[0] in ('-h', '--help'):
        print(_overview())
        return 0
    name, *arguments = given
    if name not in PROGRAMS:
        print(f'moevement: error: {name!r} is no program (moevement --help)', file=sys.stderr)
        return 2
    _become(name, arguments)
    return 0


def _become(name: str, arguments: Sequence[str]) -> None:
    _running[:] = [name]
    if str(ROOT) not in sys.path[:1]:
        sys.path.insert(0, str(ROOT))
    if name in _ITS_LAUNCHERS:
        arguments = _with_trainer(arguments)
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        runpy.run_module(PROGRAMS[name].module, run_name='__main__', alter_sys=True)
    except ModuleNotFoundError as error:
        if (error.name or '').partition('.')[0] not in _MODULES_OF_EXTRA:
            raise
        sys.exit(f"{called()} needs {error.name}: pip install 'megatron-moevement[tools]'")
    finally:
        sys.argv = before


def _with_trainer(arguments: Sequence[str]) -> list[str]:
    """Replace `pretrain_gpt.py` by its path under `ROOT` unless the current directory has it.

    Launchers take the program as a file.
    """
    found = list(arguments)
    if _TRAINER in found and not Path(_TRAINER).exists():
        found[found.index(_TRAINER)] = str(ROOT / _TRAINER)
    return found


def _overview() -> str:
    width = max(map(len, PROGRAMS))
    rows = (f'  {name:{width}}  {program.does}' for name, program in PROGRAMS.items())
    first = 'usage: moevement <program> [flags]\n'
    return '\n'.join([first, *rows, '\nmoevement <program> --help: its flags'])
