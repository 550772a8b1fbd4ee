# SPDX-License-Identifier: Apache-2.0
"""One job, under upstream's trainer or a custom loop."""
