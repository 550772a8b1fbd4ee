# SPDX-License-Identifier: Apache-2.0
"""All contact with private parts of upstream: wrappers, replacements, version checks."""
