# SPDX-License-Identifier: Apache-2.0
"""Pre-trains a (Mixture-of-Experts) GPT: `megatron.moevement.pretrain_gpt`, from a checkout.

    torchrun ... pretrain_gpt.py <any Megatron flags> [--sparse-ckpt ...]

Without `--sparse-ckpt` this is plain Megatron.
"""

import gc
import sys

gc.disable()  # collections take a fifth of the time of these imports, and free hardly anything

from megatron.moevement.seams import starting

MOEVEMENT_SPARES = True

starting.prepare(sys.argv[1:] if __name__ == '__main__' else None)
if __name__ != '__mp_main__':  # a subprocess, e.g. one that writes a checkpoint, is not a worker
    from megatron.moevement.pretrain_gpt import main, warm_up  # noqa: F401 - for a hot spare
gc.freeze()  # later collections skip the imported objects
gc.enable()

if __name__ == '__main__':
    main()
