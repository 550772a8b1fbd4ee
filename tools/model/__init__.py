# SPDX-License-Identifier: Apache-2.0
"""Models, layouts and clusters, for the planner and the simulator."""
