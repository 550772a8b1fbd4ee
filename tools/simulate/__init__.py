# SPDX-License-Identifier: Apache-2.0
"""Fault-tolerance systems by closed formulas and by simulation: `moevement simulate`."""
