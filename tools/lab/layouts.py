# SPDX-License-Identifier: Apache-2.0
"""The parallel layouts of a run, for people: a job may go on in another one."""

from moevement_ext.events import Relaid
from tools.lab.evidence import kind_of
from tools.lab.history import History


def layouts(history: History) -> list[str]:
    """Number of ranks by kind of parallelism of the present layout; then the earlier ones.

    Empty if the events have no layout.
    """
    if history.about is None:
        return []
    sizes = ', '.join(f'{kind} {size}' for kind, size in history.about.layout.items())
    relaid = kind_of(history.events, Relaid)
    earlier = (f'{one.was} up to iteration {one.dense_at}' for one in reversed(relaid))
    return [sizes, *dict.fromkeys(earlier)]
