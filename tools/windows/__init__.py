# SPDX-License-Identifier: Apache-2.0
"""Windows as an operator sees them: what lies where, whether it is sound, and what may go."""
