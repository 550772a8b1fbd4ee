# SPDX-License-Identifier: Apache-2.0
"""The command `moevement`, a front end of all programs. It imports only the program that it runs.

Each program is a module with a `main`. Most are in `tools` of a checkout. A wheel has this package
as `moevement_ext.programs`, because a top-level package `tools` could collide with those of others.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout; otherwise the directory that `moevement_ext` and `megatron` are installed in."""
TRAINER = 'pretrain_gpt.py'
PROGRAM = TRAINER if (ROOT / TRAINER).exists() else f'megatron/moevement/{TRAINER}'
"""File of the trainer below `ROOT`; launchers take a file."""

PROGRAMS = {
    'pretrain': ('megatron.moevement.pretrain_gpt', 'train a GPT: one worker of a launcher'),
    'launch': ('moevement_ext.launch.command_line', 'run a job on emulated nodes of this machine'),
    'slurm': ('moevement_ext.launch.slurm', 'run a job in a batch script of Slurm'),
    'store': ('moevement_ext.store.__main__', 'serve the store of a job outside its nodes'),
    'torchrun': ('moevement_ext.launch.torchrun', 'torchrun with its rendezvous in that store'),
    'demo': ('tools.demo', 'see a lost node recovered, without a GPU'),
    'prepare-data': ('tools.prepare_data', 'make data for the trainer from text'),
    'check': ('tools.check', 'whether a job can be protected, and how it recovers'),
    'plan': ('tools.plan.__main__', 'window, memory and times of a job, before there is a cluster'),
    'simulate': ('tools.simulate.__main__', 'systems for fault tolerance compared'),
    'status': ('tools.status', 'a running job in the terminal'),
    'report': ('tools.report.__main__', 'one page about a run'),
    'windows': ('tools.windows.__main__', 'list, verify, prune, export and try windows'),
    'compare-digests': ('tools.compare_digests', 'compare two final states'),
    'drill': ('tools.drill', 'run your job for a minute with failures, compare the bits'),
    'chaos': ('tools.chaos.__main__', 'random failures, bits compared'),
    'local-slurm': ('tools.local_slurm', 'a Slurm with several nodes on this machine'),
    'compare': ('tools.compare.__main__', 'ways to survive failures side by side'),
    'bench': ('tools.bench.__main__', 'costs of protection, durations of recoveries'),
}
"""Module in a checkout, and what it does, by name."""
_ITS_LAUNCHERS = ('launch', 'slurm', 'torchrun')
_MODULES_OF_EXTRA = {'jinja2', 'matplotlib', 'rich', 'tqdm'}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named program in this process; return the exit status."""
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
    return _run(name, arguments)


def _run(name: str, arguments: Sequence[str]) -> int:
    if name in _ITS_LAUNCHERS:
        arguments = _with_trainer(arguments)
    before, sys.argv = sys.argv, [f'moevement {name}', *arguments]
    try:
        return import_module(_module(PROGRAMS[name][0])).main() or 0
    except ModuleNotFoundError as error:
        if (error.name or '').partition('.')[0] not in _MODULES_OF_EXTRA:
            raise
        sys.exit(f"moevement {name} needs {error.name}: pip install 'megatron-moevement[tools]'")
    finally:
        sys.argv = before


def _module(name: str) -> str:
    if not name.startswith('tools.'):
        return name
    installed = f'{__package__}.programs'
    if find_spec(installed):
        return f'{installed}{name.removeprefix("tools")}'
    if str(ROOT) not in sys.path[:1]:  # before another package of that name
        sys.path.insert(0, str(ROOT))
    return name


def _with_trainer(arguments: Sequence[str]) -> list[str]:
    """Replace `pretrain_gpt.py` by its path unless the current directory has it."""
    found = list(arguments)
    if TRAINER in found and not Path(TRAINER).exists():
        found[found.index(TRAINER)] = str(ROOT / PROGRAM)
    return found


def _overview() -> str:
    width = max(map(len, PROGRAMS))
    rows = (f'  {name:{width}}  {does}' for name, (_, does) in PROGRAMS.items())
    first = 'usage: moevement <program> [flags]\n'
    return '\n'.join([first, *rows, '\nmoevement <program> --help: its flags'])
