# SPDX-License-Identifier: Apache-2.0
"""Failure domains: sets of nodes that fail together, and their distances.

A topology file gives each node its failure domain, with or without the levels above it: `"rack7"`,
`["rack7", "pod2"]` or, as a path, `"pod2/rack7"`. Nodes with the same whole path fail together.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from moevement_ext.config import ConfigurationError

LEVELS = '/'
"""Separator between the levels of a failure domain, the outermost first."""


def own_domain(node: str, topology: str | None) -> str:
    """Failure domain of one node; empty if the topology file does not name it."""
    try:
        return failure_domains([node], topology)[0]
    except ConfigurationError:
        return ''


def failure_domains(nodes: Sequence[str], topology: str | None) -> list[str]:
    """Failure domain of each rank: its node, unless a topology file says otherwise.

    Raises `ConfigurationError` if the file is unreadable, does not name every node, or has
    different numbers of levels.
    """
    if topology is None:
        return list(nodes)
    try:
        mapping = json.loads(Path(topology).read_text())
        domains = {str(node): _path(str(node), levels) for node, levels in mapping.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f'--sparse-ckpt-topology {topology}: expected a JSON object '
            f'{{"node name": "failure domain"}}, or ["failure domain", "level above", ...]: {error}'
        ) from error
    depths = {domain.count(LEVELS) + 1: node for node, domain in domains.items()}
    if len(depths) > 1:
        (few, one), *_, (many, other) = sorted(depths.items())
        raise ConfigurationError(
            f'--sparse-ckpt-topology {topology}: {one!r} has {few} levels and {other!r} {many}; '
            'give all nodes the same number.'
        )
    missing = sorted(set(nodes) - domains.keys())
    if missing:
        raise ConfigurationError(
            f'--sparse-ckpt-topology {topology} does not name the nodes {missing}; add them.'
        )
    return [domains[node] for node in nodes]


def _path(node: str, levels: object) -> str:
    """Format a failure domain as a path, the outermost level first."""
    levels = str(levels) if isinstance(levels, int) else levels
    names = levels.split(LEVELS) if isinstance(levels, str) else levels
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise ValueError(f'{node!r} has {json.dumps(levels)}; give names that are not empty')
    if any(LEVELS in name for name in names):
        raise ValueError(f'{node!r}: a name in a list has a {LEVELS!r}; leave it out')
    return LEVELS.join(names if isinstance(levels, str) else reversed(names))
