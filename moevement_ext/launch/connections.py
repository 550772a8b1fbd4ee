# SPDX-License-Identifier: Apache-2.0
"""How many hardware queues the work of a process has on its GPU.

With one, kernels begin in the order of their launches, which hides the communication of tensor and
context parallelism before Blackwell; Megatron requires it for them there. Everywhere else it only
holds things up: small copies to the host wait behind captures, and overlapped exchanges between
experts behind compute.
"""

import argparse
from collections.abc import Sequence

_ONE_QUEUE = {'CUDA_DEVICE_MAX_CONNECTIONS': '1'}
_PARALLEL = ('--tensor-model-parallel-size', '--context-parallel-size')
_WANT_MORE = ('--overlap-moe-expert-parallel-comm', '--use-torch-fsdp2', '--use-megatron-fsdp')
"""For these Megatron does not require one queue, or refuses it."""


def connections(flags: Sequence[str]) -> dict[str, str]:
    """What Megatron needs of the environment, where the user has not set it.

    Args:
        flags: of the program, as on its command line.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in _PARALLEL:
        parser.add_argument(flag, nargs='?', default='1')
    for flag in _WANT_MORE:
        parser.add_argument(flag, action='store_true', dest='more')
    found, _ = parser.parse_known_args(list(flags))
    sizes = {found.tensor_model_parallel_size, found.context_parallel_size}
    return {} if found.more or sizes <= {'1', None} else dict(_ONE_QUEUE)
