# SPDX-License-Identifier: Apache-2.0
"""`pretrain_gpt.py` on a CPU with stand-ins in the place of Transformer Engine.

For tools that are told to (`--stand-ins`): what it trains has the formats of fp8, not its speed.
"""

import sys

from megatron.moevement import pretrain_gpt
from megatron.moevement.seams import cpu_device
from tests.distributed.mutations.masters import masters

MOEVEMENT_SPARES = True


def main() -> None:
    if not cpu_device.needed():
        sys.exit('stand-ins are for a CPU: leave --stand-ins out, or set CUDA_VISIBLE_DEVICES=')
    masters()
    pretrain_gpt.main()


if __name__ == '__main__':
    main()
