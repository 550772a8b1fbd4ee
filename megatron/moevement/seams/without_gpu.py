# SPDX-License-Identifier: Apache-2.0
"""Flags and variables for a machine without a GPU, defined only here.

Messages, exports, and the jobs of the demo, the benchmarks and the tests use them.
"""

GPU_ONLY = (
    '--distributed-backend gloo',
    '--transformer-impl local',
    '--no-gradient-accumulation-fusion',
    '--no-persist-layer-norm',
    '--no-masked-softmax-fusion',
    '--no-rope-fusion',
)
"""Flags in place of what needs a GPU: NCCL, and kernels of Transformer Engine and Apex."""
COMPILED = ('--no-bias-swiglu-fusion', '--no-bias-gelu-fusion', '--no-bias-dropout-fusion')
"""Flags against functions that upstream compiles. A CPU can run them, but a small job would spend
most of its time in the compiler; leave these flags out to compute as on a GPU."""
FLAGS = ' '.join((*GPU_ONLY, *COMPILED))
"""All of them, as a user gives them."""
VARIABLES = {'TORCHDYNAMO_DISABLE': '1'}
"""Defaults of environment variables, for the same reason; a user's own value takes precedence."""
