# SPDX-License-Identifier: Apache-2.0
"""The command `moevement`: every program that documents name is one of it, and says so."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from moevement_ext import __version__, command
from moevement_ext.command import PROGRAMS
from tests.support.printed_commands import ROOT, printed

OF_A_CHECKOUT = {
    'tools.compatibility': 'writes a page of the documents',
    'tools.flags': 'the same',
    'tools.simulate.paper': 'moevement simulate paper',
    'moevement_ext.launch.shared_gpu': 'a process of moevement launch',
}
"""What the command has not, and why."""


def test_every_documented_program_is_a_subcommand() -> None:
    named = set(re.findall(r'python -m ((?:tools|moevement_ext)[\w.]*)', '\n'.join(printed())))
    here = {module.removesuffix('.__main__') for module, _ in command.PROGRAMS.values()}
    assert named - here == set(OF_A_CHECKOUT) & named
    assert len(named & here) > 15


@pytest.mark.parametrize('name', command.PROGRAMS)
def test_its_help_is_of_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # torchrun's record takes it
        command.main([name, '--help'])
    text = capsys.readouterr().out
    assert text.startswith(f'usage: moevement {name} '), text[:200]
    named = re.findall(r'python -m ((?:tools|moevement_ext)[\w.]*\w)|scripts/\w+\.py', text)
    assert {*named} <= {*OF_A_CHECKOUT, 'moevement_ext.store'}


@pytest.mark.parametrize(
    ('flag', 'status', 'slow'), [('--help', 0, []), ('--nonsense', 2, ['pretrain', 'torchrun'])]
)
def test_flags_are_read_without_torch(flag: str, status: int, slow: list[str]) -> None:
    """But for flags that only upstream's parsers know."""
    code = (
        'import sys, moevement_ext.command as command\n'
        f'for name in command.PROGRAMS.keys() - {slow}:\n'
        '    try: command.main([name, sys.argv[1]])\n'
        '    except SystemExit as ended: print("ended", ended.code)\n'
        'assert not {"torch", "megatron.core"} & sys.modules.keys()'
    )
    command = [sys.executable, '-c', code, flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r'^ended (\d)$', done.stdout, re.M) == [str(status)] * len(
        PROGRAMS.keys() - slow
    )


def test_another_package_of_the_name_hides_no_program(tmp_path: Path) -> None:
    (tmp_path / 'tools').mkdir()
    (tmp_path / 'tools' / '__init__.py').touch()
    code = 'import moevement_ext.command as command; command.main(["windows", "--help"])'
    environment = {**os.environ, 'PYTHONPATH': f'{tmp_path}:{ROOT}'}
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith('usage: moevement windows '), done.stderr


def test_all_programs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(['--help']) == command.main([]) == 0
    listed = re.findall(r'^  ([\w-]+)  +\w', capsys.readouterr().out, re.M)
    assert listed == [*command.PROGRAMS] * 2
    assert command.main(['--version']) == command.main(['-V']) == 0
    assert capsys.readouterr().out == f'moevement {__version__}\n' * 2


def test_unknown_program_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(['pln', '--help']) == 2
    said = "moevement: error: 'pln' is no program; did you mean plan? (moevement --help)\n"
    assert capsys.readouterr().err == said
    with pytest.raises(SystemExit) as ended:
        command.main(['help', 'plan'])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith('usage: moevement plan ')


@pytest.mark.parametrize(
    ('line', 'offered'),
    [
        ('moevement st', ['store', 'status']),
        ('moevement status --s', ['--serve']),
        (
            'moevement launch --nodes 2 -- pretrain_gpt.py --sparse-ckpt-wi',
            ['--sparse-ckpt-window'],
        ),
        ('moevement nonsense --s', ['']),
    ],
)
def test_bash_completes_programs_and_flags(line: str, offered: list[str], tmp_path: Path) -> None:
    """By the line that `moevement --help` prints."""
    (tmp_path / 'moevement').write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m moevement_ext.command "$@"\n'
    )
    (tmp_path / 'moevement').chmod(0o755)
    complete = re.search(r"complete -C '(.+)' moevement", command._MORE)
    assert complete is not None
    word = line.split()[-1]
    given = {'PATH': f'{tmp_path}:/usr/bin:/bin', 'COMP_LINE': line, 'COMP_POINT': str(len(line))}
    done = subprocess.run(
        f'{complete[1]} moevement {word} x', shell=True, env=given, capture_output=True, text=True
    )
    assert (done.stdout.splitlines(), done.stderr) == (offered, '')


def test_error_names_the_called_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(['plan', '--modl', 'x'])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith('moevement plan: error: ')
    assert message.endswith('(moevement plan --help: all flags)\n')


def test_a_package_of_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'jinja2', None)
    monkeypatch.delitem(sys.modules, 'tools.report.__main__', raising=False)
    with pytest.raises(SystemExit) as ended:
        command.main(['report', '--help'])
    message = "moevement report needs jinja2: pip install 'megatron-moevement[tools]'"
    assert ended.value.code == message


def test_launcher_finds_the_trainer_outside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ['--nodes', '2', '--', 'pretrain_gpt.py', '--load', 'pretrain_gpt.py']
    assert command._with_trainer(given) == [*given[:3], str(ROOT / 'pretrain_gpt.py'), *given[4:]]
    (tmp_path / 'pretrain_gpt.py').touch()
    assert command._with_trainer(given) == given
