# SPDX-License-Identifier: Apache-2.0
"""Puts faults on training jobs at random and checks that they end in the same bits."""
