# SPDX-License-Identifier: Apache-2.0
"""Shows localized recovery on one machine: two emulated nodes, of which one is lost."""
