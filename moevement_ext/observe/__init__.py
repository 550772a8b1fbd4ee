# SPDX-License-Identifier: Apache-2.0
"""Events, metrics and digests of a run."""
