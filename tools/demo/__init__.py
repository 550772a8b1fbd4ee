# SPDX-License-Identifier: Apache-2.0
"""Shows recovery on one machine: two emulated nodes, one killed job, one lost node's memory."""
