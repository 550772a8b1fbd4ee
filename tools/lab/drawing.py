# SPDX-License-Identifier: Apache-2.0
"""The common style of all pictures of this project."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .figures import replacing

OWN, OTHER, MUTED, FAILURE = '#0b6e99', '#7a869a', '#5e6c84', '#c8102e'
PALETTE = (OTHER, '#7a5cc0', '#e89b00', '#3f8f8a', '#b7791f', '#c4cad3')
"""Colours of lines that are compared with `OWN`."""
_STYLE = {
    'font.size': 10,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.color': '#e6e8eb',
    'axes.axisbelow': True,
    'axes.edgecolor': MUTED,
    'xtick.color': MUTED,
    'ytick.color': MUTED,
    'axes.titlelocation': 'left',
    'axes.titleweight': 'bold',
    'legend.frameon': False,
}


@contextmanager
def picture(target: Path, **subplots: Any) -> Iterator[Any]:
    """Yield axes, as from `pyplot.subplots`, and write them as an image at the end.

    Args:
        target: file to write; its folder is created.
        subplots: arguments of `pyplot.subplots`.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix of its name is not an image format.
    """
    # Imported here, as it takes a second: reading logs and refusing flags should be fast.
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):  # type: ignore[arg-type]
        figure, axes = pyplot.subplots(layout='constrained', **subplots)
        try:
            yield axes
            with replacing(target) as partial:
                figure.savefig(partial, dpi=150)
        finally:
            pyplot.close(figure)


def subtitle(axes: Any, text: str) -> None:
    """Add a line between the axes and the title, which moves up."""
    axes.set_title(axes.get_title(loc='left'), loc='left', pad=22)
    axes.annotate(text, (0, 1), (0, 6), 'axes fraction', textcoords='offset points', color=MUTED)
