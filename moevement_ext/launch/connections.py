# SPDX-License-Identifier: Apache-2.0
"""Number of hardware queues that a process uses on its GPU.

With one queue, kernels begin in launch order, which hides the communication of tensor and context
parallelism before Blackwell; Megatron requires one queue for them there. Elsewhere one queue only
delays work: small copies to the host wait behind captures, and overlapped exchanges between experts
wait behind compute.
"""

import argparse
from collections.abc import Sequence

_ONE_QUEUE = {'CUDA_DEVICE_MAX_CONNECTIONS': '1'}
_PARALLEL = ('--tensor-model-parallel-size', '--context-parallel-size')
# With these flags Megatron does not require one queue, or refuses it.
_WANT_MORE = ('--overlap-moe-expert-parallel-comm', '--use-torch-fsdp2', '--use-megatron-fsdp')


def connections(flags: Sequence[str]) -> dict[str, str]:
    """Environment variables that Megatron requires with these flags of the program."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in _PARALLEL:
        parser.add_argument(flag, nargs='?', default='1')
    for flag in _WANT_MORE:
        parser.add_argument(flag, action='store_true', dest='more')
    found, _ = parser.parse_known_args(list(flags))
    sizes = {found.tensor_model_parallel_size, found.context_parallel_size}
    return {} if found.more or sizes <= {'1', None} else dict(_ONE_QUEUE)
