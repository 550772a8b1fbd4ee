# SPDX-License-Identifier: Apache-2.0
"""Metrics for an operator: what protection costs, how far it lags, what recoveries were like."""
