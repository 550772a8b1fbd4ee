# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of all nodes on one machine, and again those that die."""
