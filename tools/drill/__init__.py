# SPDX-License-Identifier: Apache-2.0
"""Game day: a short job of one's own that loses a worker and a node on purpose."""
