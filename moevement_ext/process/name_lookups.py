# SPDX-License-Identifier: Apache-2.0
"""Lookups of names, which no recovery asks for, must not hold one up.

torch's store looks up the name of each address that it connects to, for its log. A recovery makes
dozens of connections over all ranks, and one datagram that is lost on the way to a name server
costs the 5 s after which the resolver asks again by default: of a worker, or of its launcher, which
serves the store.
"""

import os

_VARIABLE = 'RES_OPTIONS'
# See resolv.conf(5). A server that is gone is asked for 5 s in all; by default it is 10.
_SOON = 'timeout:1 attempts:5'


def ask_again_soon() -> None:
    """Have this process repeat a lookup after a second. To be called before its first one.

    Options in the environment stay as they are.
    """
    os.environ.setdefault(_VARIABLE, _SOON)
