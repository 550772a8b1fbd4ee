# SPDX-License-Identifier: Apache-2.0
"""Every command that documents and `--help` print is one that its program takes."""

import re

import pytest

from tests.support.each import each
from tests.support.printed_commands import parse, printed

FOREIGN = r'docker |kubectl |pip |promtool |apt-get |srun |pytest |.*-m pytest '
"""Programs of others, whose flags are not known here."""
INTERNAL = (
    r'python -m (tests\.fuzz|moevement_ext\.store\.branch'
    r'|moevement_ext\.launch\.shared_gpu)'
)
"""Started by another program of this project; those of fuzzing need a package."""
COMMANDS = sorted(printed())


def test_many_commands_are_found() -> None:
    assert len(COMMANDS) > 150


@each('command', [one for one in COMMANDS if not re.match(f'{FOREIGN}|{INTERNAL}', one)])
def test_the_program_takes_the_flags(command: str) -> None:
    try:
        parse(command)
    except SystemExit as refused:
        raise AssertionError(f'{command}: refused with status {refused.code}') from refused


@pytest.mark.parametrize(
    'command',
    [
        'python -m tools.plan --modl deepseek-v3 --mfu 0.35',
        'python -m tools.report runs/events',
        'python -m tools.drill --nodes 2 -- --nonsense',
        '.venv/bin/torchrun --nprocs 8 pretrain_gpt.py <flags> --sparse-ckpt',
        'scripts/demo.sh --iteration-count 3',
        'sbatch scripts/slurm_pretrain.sbatch --sparse-ckpt-windw 3',
    ],
)
def test_unknown_flag_is_detected(command: str) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(command)
    assert refused.value.code == 2
