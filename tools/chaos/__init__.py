# SPDX-License-Identifier: Apache-2.0
"""Injects random faults into training jobs and checks that they end in the same bits."""
