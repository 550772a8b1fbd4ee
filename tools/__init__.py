# SPDX-License-Identifier: Apache-2.0
"""Programs around training, each started as `moevement <name>`."""

import sys
from importlib.util import find_spec
from pathlib import Path

_NEEDED = ('msgspec', 'numpy', 'rich')

if sys.version_info < (3, 12) or any(find_spec(name) is None for name in _NEEDED):
    remedy = "pip install 'megatron-moevement[tools]'"
    if (Path(__file__).resolve().parents[1] / 'scripts' / 'setup_env.sh').exists():
        remedy = 'run scripts/setup_env.sh and start the tool by .venv/bin/python'
    sys.exit(f'tools: {sys.executable} is too old or lacks packages; {remedy}')
