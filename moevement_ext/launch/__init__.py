# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of a job, here or on other nodes, and others in place of those that die."""
