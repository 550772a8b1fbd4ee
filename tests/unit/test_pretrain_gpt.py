# SPDX-License-Identifier: Apache-2.0
"""The program at the top level, by what names processes import it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = """
import gc, runpy, sys
runpy.run_path('pretrain_gpt.py', run_name=sys.argv[1])
print(*{'torch', 'megatron.core', 'megatron.training'} & sys.modules.keys())
assert gc.isenabled() and gc.get_freeze_count() > 100_000
"""


def imported_by(name: str) -> set[str]:
    command = [sys.executable, '-W', 'ignore', '-c', IMPORTED, name]
    return set(subprocess.check_output(command, cwd=ROOT, text=True).split())


@pytest.mark.parametrize(
    ('name', 'imported'),
    [
        ('__mp_main__', {'torch'}),  # a process of multiprocessing: every dense save starts one
        ('pretrain_gpt', {'torch', 'megatron.core', 'megatron.training'}),
    ],
)
def test_only_training_processes_import_megatron(name: str, imported: set[str]) -> None:
    assert imported_by(name) == imported
