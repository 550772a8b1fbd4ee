# SPDX-License-Identifier: Apache-2.0
"""Engine of native sparse checkpointing for Mixture-of-Experts training; never imports Megatron."""

__version__ = "0.1.0"
