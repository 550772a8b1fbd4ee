# SPDX-License-Identifier: Apache-2.0
"""Strikes a training job at random, again and again, and checks that it ends in the same bits."""
