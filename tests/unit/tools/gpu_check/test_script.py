# SPDX-License-Identifier: Apache-2.0
"""The command around the check: what it looks for before anything is measured."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = ROOT / 'scripts' / 'gpu_check.sh'


def test_everything_that_is_required_is_looked_for() -> None:
    (call,) = (
        node
        for node in ast.walk(ast.parse((ROOT / 'setup.py').read_text('utf-8')))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == 'setup'
    )
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    required = [
        re.split('[<>=]', text)[0] for text in ast.literal_eval(keywords['install_requires'])
    ]
    assert len(required) > 4
    looked_for = re.findall(
        r"'([\w.]+)'", re.findall(r'for name in \((.*?)\):', SCRIPT.read_text('utf-8'), re.S)[0]
    )
    assert {name.replace('-', '.') for name in required} <= set(looked_for)


def test_a_folder_without_wheels_is_named(tmp_path: Path) -> None:
    command = [SCRIPT, '--cpu', '--wheels', tmp_path]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr == f'gpu_check: --wheels {tmp_path}: there is no wheel in it\n'
