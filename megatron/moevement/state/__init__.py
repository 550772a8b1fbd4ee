# SPDX-License-Identifier: Apache-2.0
"""The training state of Megatron: how it is read, loaded and frozen, by operator."""
