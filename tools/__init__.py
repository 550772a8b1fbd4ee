# SPDX-License-Identifier: Apache-2.0
"""Programs around training, each started as `python -m tools.<name>`."""

import sys
from importlib.util import find_spec

_NEEDED = ('msgspec', 'numpy', 'rich')

if sys.version_info < (3, 12) or any(find_spec(name) is None for name in _NEEDED):
    sys.exit(
        f'tools: {sys.executable} is too old or lacks packages; run scripts/setup_env.sh and start '
        'the tool by .venv/bin/python'
    )
