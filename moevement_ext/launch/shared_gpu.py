# SPDX-License-Identifier: Apache-2.0
"""Several workers on one GPU, to test the behaviour of a cluster on a single GPU.

    python -m moevement_ext.launch.shared_gpu <program> [flags of the program]

NCCL refuses two ranks on one GPU if they are on the same host. So each rank poses as a separate
host (`NCCL_HOSTID`), and the ranks communicate through sockets, as nodes do. NCCL's real kernels
run, hang, abort and reconnect. The ranks share the GPU's time.

Run as a program, this module turns into such a worker under another launcher, such as torchrun.
"""

import os
import sys
from collections.abc import MutableMapping

DEFAULTS = {
    'NCCL_SOCKET_IFNAME': 'lo',
    'NCCL_IB_DISABLE': '1',
    'NCCL_MNNVL_ENABLE': '0',
    'NCCL_NVLS_ENABLE': '0',
    'NCCL_MAX_CTAS': '2',  # waiting kernels must leave room for the other ranks' kernels
    'GLOO_SOCKET_IFNAME': 'lo',
}
"""Environment variables of all ranks that the user may override."""


def of_rank(rank: int) -> dict[str, str]:
    """Environment variables that place a rank on the first GPU, as a separate host."""
    return {'LOCAL_RANK': '0', 'NCCL_HOSTID': f'rank{rank}'}


def share(environment: MutableMapping[str, str]) -> None:
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
    environment.update(of_rank(int(environment['RANK'])))


if __name__ == '__main__':
    share(os.environ)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
