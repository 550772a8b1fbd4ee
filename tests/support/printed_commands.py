# SPDX-License-Identifier: Apache-2.0
"""The commands that documents and `--help` print, and whether their programs take their flags."""

import argparse
import ast
import functools
import importlib
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from torch.distributed.run import get_args_parser

from moevement_ext.command import PROGRAMS
from tools.lab.trainer_flags import trainer_parser

ROOT = Path(__file__).resolve().parents[2]
_DOCUMENTS = ('docs', 'tests', 'examples', 'deploy')
_SOURCES = ('tools', 'moevement_ext', 'megatron', 'examples', 'scripts')
_PROGRAM = re.compile(
    r'(?:[A-Z_]+=(?:"[^"]*"|\S+) )*'
    r'(?:(?:\.venv/bin/)?(?:python|torchrun|pytest) |scripts/\S+\.(?:sh|py)(?=\s)|sbatch |srun '
    r'|moevement |docker |kubectl |pip |promtool |apt-get )'
)
_TRAINERS = ('pretrain_gpt.py', 'megatron.moevement.pretrain_gpt')
_END = '--'
_MODULES = {
    'scripts/demo.sh': 'tools.demo',
    'scripts/pack_libraries.py': 'scripts.pack_libraries',
    'examples/data_parallel_loop.py': 'examples.data_parallel_loop',
    'examples/own_loop.py': 'examples.own_loop',
    'examples/pipeline_loop.py': 'examples.pipeline_loop',
}
"""What scripts run."""
_LAUNCHERS = {
    'tools.windows', 'moevement_ext.launch.slurm', 'moevement_ext.launch.command_line',
}  # fmt: skip
"""After their `--` comes a command."""
_WRITTEN_BY_READERS = {'loop.py'}
_WITHOUT_PARSER = ('.sh', '.sbatch')
_BY_NAME = re.compile(rf'\bmoevement ({"|".join(sorted(PROGRAMS, reverse=True))})(?![\w-])')


def printed() -> dict[str, set[str]]:
    """Where each command is printed, by the command on one line, with the modules of programs."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, text in _texts():
        for line in _one_line_each(text):
            command = _BY_NAME.sub(_module, ' '.join(re.sub(r'\s+# .*$', '', line).split()))
            if _PROGRAM.match(f'{command} '):
                found[command].add(str(path.relative_to(ROOT)))
    return dict(found)


def _module(found: re.Match[str]) -> str:
    return f'python -m {PROGRAMS[found[1]][0].removesuffix(".__main__")}'


def _texts() -> Iterator[tuple[Path, str]]:
    """Lines of documents and of help that may be commands."""
    pages = [*ROOT.glob('*.md'), *(p for f in _DOCUMENTS for p in (ROOT / f).rglob('*.md'))]
    for page in pages:
        yield page, '\n'.join(_of_page(page.read_text('utf-8')))
    for source in [*ROOT.glob('*.py'), *(p for f in _SOURCES for p in (ROOT / f).rglob('*.py'))]:
        yield source, '\n'.join(_of_source(source.read_text('utf-8')))
    for script in (ROOT / 'scripts').iterdir():
        if script.suffix in _WITHOUT_PARSER:
            head = (line for line in script.read_text('utf-8').splitlines() if line[:2] == '# ')
            yield script, '\n'.join(line[2:] for line in head)


def _of_page(text: str) -> Iterator[str]:
    yield from re.findall(r'^```bash\n(.*?)^```', text, re.M | re.S)
    prose = re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)
    for block in re.findall(r'^(?:    .*\n)+', prose, re.M):
        yield re.sub(r'^    (?:\$ )?(?:for .*; do )?|; done$', '', block, flags=re.M)
    # Of words alone, such as the name of a tool in a sentence, nothing can be wrong.
    codes = (' '.join(code.split()) for code in re.findall(r'`([^`]+)`', prose))
    yield from (code for code in codes if len(code.split()) > 1 and not _is_name(code))


def _is_name(code: str) -> bool:
    return re.fullmatch(r'(\.venv/bin/)?python -m [\w.]+|moevement [\w-]+', code) is not None


def _of_source(text: str) -> Iterator[str]:
    """Indented lines of the text that is shown as help."""
    tree = ast.parse(text)
    yield re.sub(r'^(?!    ).*$', '', ast.get_docstring(tree) or '', flags=re.M)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '_DESCRIPTION':
            yield ast.literal_eval(node.value)


def _one_line_each(text: str) -> list[str]:
    return re.sub(r' *\\\n\s*', ' ', text).splitlines()


# ---- are the flags of a command those of its program?


class _Accepted(BaseException):
    """A parser has taken what it was given; the program goes no further."""


def parse(command: str) -> None:
    """Have the program take its flags, and do nothing.

    Raises:
        SystemExit: it does not.
        AssertionError: the program is none of this project.
    """
    text = re.sub(r'<as above>|<program>.*|<[^>]*flags[^>]*>|\$\([^)]*\)|\$windows', '', command)
    text = re.sub(r'\$\{?\w+\}?', '1', re.sub(r'[\[\]]| 2?>.*', '', text))
    words = [{'R': '0'}.get(word, word) for word in shlex.split(text)]
    while re.match(r'[A-Z_]+=', words[0]):
        words.pop(0)
    _parse_words([word for word in words if word != '...'], elided='...' in words)


def _parse_words(words: Sequence[str], elided: bool) -> None:
    program, rest = words[0].removeprefix('.venv/bin/'), list(words[1:])
    if program == 'moevement':
        assert rest in (['--help'], ['-V'], ['--version'], ['help', rest[-1]]), rest
        return
    if program in _MODULES:
        program, rest = 'python', ['-m', _MODULES[program], *rest]
    if program == 'python' and rest[0] == '-m' and rest[1] in _TRAINERS:
        program, *rest = rest[1:]
    if program == 'python' and rest[0] == '-m':
        _parse_tool(rest[1], rest[2:], elided)
    elif program == 'python':
        _parse_words(rest, elided)
    elif program == 'torchrun' or program.endswith('torchrun'):
        given = get_args_parser().parse_args(rest)
        inner = [given.training_script, *given.training_script_args]
        _parse_words(['python', '-m', *inner] if given.module else inner, elided)
    elif program == 'sbatch':
        (at,) = (n for n, word in enumerate(rest) if word.endswith('.sbatch'))
        _parse_words(rest[at:], elided)
    elif program in _TRAINERS:
        _parser_of_trainer().parse_args(rest)
    elif program.startswith('scripts/') and program.endswith(_WITHOUT_PARSER):
        _parse_script(program, rest, elided)
    else:
        assert program in _WRITTEN_BY_READERS and not rest, program


def _parse_script(program: str, rest: list[str], elided: bool) -> None:
    assert (ROOT / program).is_file(), program
    if 'slurm' in program:
        _parser_of_trainer().parse_args(rest[rest.index(_END) + 1 :] if _END in rest else rest)


def _parse_tool(module: str, rest: list[str], elided: bool) -> None:
    own = rest[: rest.index(_END)] if _END in rest else rest
    after = rest[len(own) + 1 :]
    if own == ['--help'] or own[:1] == ['--write-script']:  # done while flags are parsed
        return
    _stopped(_entry(module).main, rest, elided)
    if module == 'moevement_ext.launch.torchrun':
        _parse_words(['torchrun', *rest], elided)
    elif after and module in _LAUNCHERS:
        _parse_words(after, elided)
    elif after:
        _parser_of_trainer().parse_args(after)


def _entry(module: str) -> ModuleType:
    found = importlib.import_module(module)
    if hasattr(found, '__path__'):
        found = importlib.import_module(f'{module}.__main__')
    return found


@functools.cache
def _parser_of_trainer() -> argparse.ArgumentParser:
    return trainer_parser()


def _stopped(main: Any, arguments: Sequence[str], elided: bool) -> None:
    """Call a program, and stop it once its outermost parser has taken its flags."""
    depth = 0

    def stopping(original: Any) -> Any:
        def call(self: argparse.ArgumentParser, *given: Any, **more: Any) -> Any:
            nonlocal depth
            for action in self._actions:
                action.required &= not elided  # `...` may stand for what is required
            depth += 1
            try:
                result = original(self, *given, **more)
            finally:
                depth -= 1
            if depth == 0:
                raise _Accepted
            return result

        return call

    parser, names = argparse.ArgumentParser, ('parse_args', 'parse_known_args')
    instead = {name: stopping(getattr(parser, name)) for name in names}
    with (
        patch.multiple(parser, **instead),
        patch.object(sys, 'argv', ['program', *arguments]),
        suppress(_Accepted),
    ):
        main()
        raise AssertionError('it ended, and has parsed nothing')
