# SPDX-License-Identifier: Apache-2.0
"""Launchers: start the workers of a job on this machine or on nodes, and replace dead workers."""
