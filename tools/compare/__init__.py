# SPDX-License-Identifier: Apache-2.0
"""Ways to survive failures side by side: the same job, the same failures."""
