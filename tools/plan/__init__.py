# SPDX-License-Identifier: Apache-2.0
"""The planner for a description of model, layout and cluster: `moevement plan`."""
