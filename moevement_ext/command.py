# SPDX-License-Identifier: Apache-2.0
"""The command `moevement`, a front end of all programs. It imports only the program that it runs.

Each program is a module with a `main`. Most are in `tools` of a checkout. A wheel has this package
as `moevement_ext.programs`, because a top-level package `tools` could collide with those of others.
"""

import os
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout; otherwise the directory that `moevement_ext` and `megatron` are installed in."""
TRAINER = 'pretrain_gpt.py'
PROGRAM = TRAINER if (ROOT / TRAINER).exists() else f'megatron/moevement/{TRAINER}'
"""File of the trainer below `ROOT`; launchers take a file."""

_GROUPS: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_suffix('.toml').read_text('utf-8')
)
PROGRAMS = {name: program for group in _GROUPS.values() for name, program in group.items()}
"""Module in a checkout, and what it does, by name."""
_MORE = """
moevement help <program>: its flags
complete -C 'moevement --complete' moevement: tab completion in bash"""
_ITS_LAUNCHERS = ('launch', 'slurm', 'torchrun')
_MODULES_OF_EXTRA = {'jinja2', 'matplotlib', 'rich', 'tqdm'}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named program in this process; return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] in (['--version'], ['-V']):
        from moevement_ext import __version__

        print(f'moevement {__version__}')
        return 0
    if not given or given[0] in ('-h', '--help'):
        print(_overview())
        return 0
    name, *arguments = given
    if name == '--complete':
        _complete(arguments[1])
        return 0
    if name == 'help' and arguments:
        name, arguments = arguments[0], ['--help']
    if name not in PROGRAMS:
        near = ''.join(f'; did you mean {one}?' for one in get_close_matches(name, PROGRAMS, 1))
        print(f'moevement: error: {name!r} is no program{near} (moevement --help)', file=sys.stderr)
        return 2
    return _run(name, arguments)


def data(name: str) -> Path:
    """Path of a file or folder of `deploy`, `examples` or `scripts`; a wheel has them beside us."""
    installed = Path(__file__).with_name(name.partition('/')[0])
    return (installed.parent if installed.exists() else ROOT) / name


def _complete(word: str) -> None:
    """Print what may replace `word`, the last one of the line that bash completes."""
    from moevement_ext.config import flag_of, flagged

    words = os.environ['COMP_LINE'][: int(os.environ['COMP_POINT'])].split()
    known: Iterable[str] = PROGRAMS
    if words[1:2] == ['pretrain'] or '--' in words:
        known = ['--sparse-ckpt', *(flag_of(one.name) for one in flagged())]
    elif len(words) > 1 + bool(word) and words[1] in PROGRAMS:
        with redirect_stdout(StringIO()) as text, suppress(SystemExit):
            main([words[1], '--help'])
        known = dict.fromkeys(re.findall(r'^  (?:-\w.*, )?(--[a-z][\w-]*)', text.getvalue(), re.M))
    print(*(one for one in known if one.startswith(word)), sep='\n')


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
    lines = ['usage: moevement <program> [flags]']
    for title, group in _GROUPS.items():
        lines += [
            f'\n{title}:',
            *(f'  {name:{width}}  {does}' for name, (_, does) in group.items()),
        ]
    return '\n'.join([*lines, _MORE])


if __name__ == '__main__':
    sys.exit(main())
