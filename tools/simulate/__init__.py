# SPDX-License-Identifier: Apache-2.0
"""Fault-tolerance systems in closed form and simulated: `python -m tools.simulate`."""
