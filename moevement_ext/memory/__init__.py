# SPDX-License-Identifier: Apache-2.0
"""Host memory that outlives the process: window files, their store, the ledger and the budget."""
