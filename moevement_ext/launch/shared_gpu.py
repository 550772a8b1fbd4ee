# SPDX-License-Identifier: Apache-2.0
"""Several workers on one GPU, to try what a cluster does where there is only one.

    python -m moevement_ext.launch.shared_gpu <program> [flags of the program]

NCCL refuses two ranks on one GPU if they are on the same host. So each rank is a host of its own
(`NCCL_HOSTID`), and they talk through sockets as nodes do: with NCCL's own kernels, which really
hang, are aborted and connected anew. The GPU divides its time among them.

As a program, this becomes one of those workers under another launcher, such as torchrun.
"""

import os
import sys
from collections.abc import MutableMapping

DEFAULTS = {
    'NCCL_SOCKET_IFNAME': 'lo',
    'NCCL_IB_DISABLE': '1',
    'NCCL_MNNVL_ENABLE': '0',
    'NCCL_NVLS_ENABLE': '0',
    'NCCL_MAX_CTAS': '2',  # kernels that wait for another rank leave it room to run
    'GLOO_SOCKET_IFNAME': 'lo',
}
"""What all ranks are started with, unless the user has set it."""


def of_rank(rank: int) -> dict[str, str]:
    """What places a rank on the first GPU, as a host of its own."""
    return {'LOCAL_RANK': '0', 'NCCL_HOSTID': f'rank{rank}'}


def share(environment: MutableMapping[str, str]) -> None:
    """Complete the environment of a worker whose `RANK` is known."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
    environment.update(of_rank(int(environment['RANK'])))


if __name__ == '__main__':
    share(os.environ)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
