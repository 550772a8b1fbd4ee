# SPDX-License-Identifier: Apache-2.0
"""Shortens DNS lookups, which would delay a recovery although it does not need them.

torch's store resolves the name of each address that it connects to, for its log. A recovery makes
dozens of connections over all ranks. One lost datagram to a name server costs 5 s, the default
timeout of the resolver, in a worker or in the launcher, which serves the store.
"""

import os

_VARIABLE = 'RES_OPTIONS'
# See resolv.conf(5). A dead server costs 5 s in total; by default 10 s.
_SOON = 'timeout:1 attempts:5'


def ask_again_soon() -> None:
    """Make this process retry a lookup after one second. Call this before the first lookup.

    Options in the environment stay as they are.
    """
    os.environ.setdefault(_VARIABLE, _SOON)
