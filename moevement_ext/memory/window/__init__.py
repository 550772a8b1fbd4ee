# SPDX-License-Identifier: Apache-2.0
"""Windows in files: names, slots, format, and which may be overwritten."""
