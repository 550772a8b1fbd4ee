# SPDX-License-Identifier: Apache-2.0
"""`moevement launch --when-no-spare guests` that takes nodes away, and back, at any moment.

Its staged failures strike after a given iteration; the orders of a tool strike when they come.
"""

import sys
from pathlib import Path

from moevement_ext.config_file import value_of
from moevement_ext.launch import command_line
from moevement_ext.launch.launch_config import StagedAction
from moevement_ext.launch.local import LocalStarter
from moevement_ext.launch.supervisor import Supervisor
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.system.leaving import stop_at_signals

from .local_cluster import ORDERS


class _Starter(LocalStarter):
    """Carries out the orders that a `LocalCluster` appends. The supervisor's thread uses this."""

    _carried_out = 0

    def poll(self) -> None:
        assert self._config.log_dir is not None
        file = self._config.log_dir / ORDERS
        orders = file.read_text().splitlines() if file.exists() else []
        for order in orders[self._carried_out :]:
            action, node = order.split()
            if action == StagedAction.LOSE_NODE:
                self.lose_node(int(node), self._memory_of, for_good=True)
            else:
                self.return_node(int(node))
        self._carried_out = len(orders)
        super().poll()

    def _memory_of(self, name: str) -> NodeStore:
        root, run = (
            value_of(self._config.flags, f'--sparse-ckpt-{of}') for of in ('dir', 'run-id')
        )
        assert root is not None and run is not None
        return NodeStore(Path(root), run, name)


def main() -> int:
    config = command_line.parse(sys.argv[1:])
    supervisor = Supervisor(config, starter=_Starter)
    stop_at_signals(supervisor.stop, config.flags)
    return supervisor.run()


if __name__ == '__main__':
    sys.exit(main())
