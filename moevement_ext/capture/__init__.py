# SPDX-License-Identifier: Apache-2.0
"""Copies slices of the training state to host memory, hidden behind compute."""
