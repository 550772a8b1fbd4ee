# SPDX-License-Identifier: Apache-2.0
"""The documentation site: built of the pages as they are, by the command of CONTRIBUTING."""

import re
import subprocess
import sys
from pathlib import Path

import moevement_ext

_TOLD_IN_API = 'moevement_ext.SparseCheckpointConfig'
ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.stem for path in (ROOT / 'docs').glob('*.md'))


def test_site_of_all_pages_builds_without_broken_links(tmp_path: Path) -> None:
    command = re.search(
        r'`\.venv/bin/(sphinx-build [^`]*)`', (ROOT / 'CONTRIBUTING.md').read_text()
    )
    assert command is not None
    program, *flags, _, _ = command[1].split()
    done = subprocess.run(
        [Path(sys.executable).parent / program, *flags, ROOT / 'docs', tmp_path],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    index = (tmp_path / 'index.html').read_text('utf-8')
    navigation = index[: index.index('<article')]
    assert f'MoEvement on Megatron-Core {moevement_ext.__version__}' in navigation
    assert 'Copyright' not in index
    assert len(PAGES) > 10
    for page in set(PAGES) - {'index'}:
        assert (tmp_path / f'{page}.html').is_file()
        assert f'href="{page}.html"' in navigation, f'index.md does not name {page}'
    reference = (tmp_path / 'reference.html').read_text('utf-8')
    of_engine = [f'moevement_ext.{one}' for one in moevement_ext.__all__ if one[0].isupper()]
    shown = {*re.findall(r'<dt [^>]*id="([\w.]+)"', reference)}
    missing = {'megatron.moevement.attach', *of_engine} - shown - {_TOLD_IN_API}
    assert not {one for one in missing if 'EXIT_' not in one}, 'they have no docstring'
