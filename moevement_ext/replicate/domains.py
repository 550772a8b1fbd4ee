# SPDX-License-Identifier: Apache-2.0
"""Failure domains: what is lost together."""

import json
from collections.abc import Sequence
from pathlib import Path

from moevement_ext.config import ConfigurationError


def own_domain(node: str, topology: str | None) -> str:
    """Failure domain of one node; empty if the topology file does not tell."""
    try:
        return failure_domains([node], topology)[0]
    except ConfigurationError:
        return ''


def failure_domains(nodes: Sequence[str], topology: str | None) -> list[str]:
    """Failure domain of each rank: its node, unless a topology file says otherwise.

    Raises:
        ConfigurationError: the file cannot be read or does not name every node.
    """
    if topology is None:
        return list(nodes)
    try:
        mapping = json.loads(Path(topology).read_text())
        domains = {str(node): str(domain) for node, domain in mapping.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f'--sparse-ckpt-topology {topology}: expected a JSON object '
            f'{{"node name": "failure domain"}}: {error}'
        ) from error
    missing = sorted(set(nodes) - domains.keys())
    if missing:
        raise ConfigurationError(
            f'--sparse-ckpt-topology {topology} does not name the nodes {missing}; add them.'
        )
    return [domains[node] for node in nodes]
