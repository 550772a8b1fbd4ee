# SPDX-License-Identifier: Apache-2.0
"""Tensors that a stage has sent, kept for neighbour stages that replay (paper section 3.4)."""
