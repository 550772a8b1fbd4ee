# SPDX-License-Identifier: Apache-2.0
"""The documentation site, of the pages in `docs` as they are.

    .venv/bin/sphinx-build -W --keep-going docs runs/site

A link that leads nowhere, to a page, a heading or a file, is an error.
"""

import re

from moevement_ext import __version__

project = 'MoEvement on Megatron-Core'
release = __version__
html_show_copyright = False
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']
default_role = 'code'
"""Docstrings have their names in single backquotes."""
autodoc_typehints = 'description'
html_theme = 'furo'
root_doc = 'index'
exclude_patterns = ['measurements']
suppress_warnings = [
    'toc.not_included'
]  # pages in folders; tests/rules/test_site.py has all others
myst_heading_anchors = 4
"""Headings can be linked to as forges name them."""


def setup(app):
    """Build the navigation from the table of index.md, whose order it has."""
    app.connect('source-read', add_navigation)


def add_navigation(app, page, source):
    """Append to index.md a hidden tree of the pages that it links to."""
    if page == root_doc:
        pages = '\n'.join(re.findall(r'\]\(([\w-]+)\.md\)', source[0]))
        source[0] += f'\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages}\n```\n'
