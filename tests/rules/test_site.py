# SPDX-License-Identifier: Apache-2.0
"""The documentation site: built of the pages as they are, by the command of CONTRIBUTING."""

import re
import subprocess
import sys
from pathlib import Path

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
    assert len(PAGES) > 10
    for page in set(PAGES) - {'index'}:
        assert (tmp_path / f'{page}.html').is_file()
        assert f'href="{page}.html"' in navigation, f'index.md does not name {page}'
