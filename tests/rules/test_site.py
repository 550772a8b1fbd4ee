# SPDX-License-Identifier: Apache-2.0
"""The documentation site: built of the pages as they are, by the command of CONTRIBUTING."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.stem for path in (ROOT / 'docs').glob('*.md'))


def built(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """By the command that CONTRIBUTING names, with these folders."""
    command = re.search(
        r'`\.venv/bin/(sphinx-build [^`]*)`', (ROOT / 'CONTRIBUTING.md').read_text()
    )
    assert command is not None
    program, *flags, _, _ = command[1].split()
    return subprocess.run(
        [Path(sys.executable).parent / program, *flags, docs, site],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_site_of_all_pages_builds_without_broken_links(tmp_path: Path) -> None:
    done = built(ROOT / 'docs', tmp_path)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / 'index.html').read_text('utf-8')
    navigation = index[: index.index('<article')]
    assert len(PAGES) > 10
    for page in set(PAGES) - {'index'}:
        assert (tmp_path / f'{page}.html').is_file()
        assert f'href="{page}.html"' in navigation, f'index.md does not name {page}'


@pytest.mark.thorough
@pytest.mark.parametrize(
    ('link', 'said'),
    [
        ('nowhere.md', 'nowhere'),
        ('start.md#nowhere', 'nowhere'),
        ('../deploy/nowhere.yml', 'nowhere.yml'),
    ],
)
def test_broken_link_is_an_error(link: str, said: str, tmp_path: Path) -> None:
    docs = tmp_path / 'docs'
    shutil.copytree(ROOT / 'docs', docs)
    for name in ('Dockerfile', 'deploy', 'findings'):
        (tmp_path / name).symlink_to(ROOT / name)
    with (docs / 'tutorial.md').open('a') as page:
        page.write(f'\n[There]({link})\n')
    done = built(docs, tmp_path / 'site')
    assert done.returncode != 0
    (warning,) = re.findall(r'^.*WARNING.*$', done.stderr, re.M)
    assert 'tutorial.md' in warning and said in warning
