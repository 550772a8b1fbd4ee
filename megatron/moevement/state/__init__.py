# SPDX-License-Identifier: Apache-2.0
"""The training state of Megatron: reading, loading and freezing by operator."""
