# SPDX-License-Identifier: Apache-2.0
"""Decides if an exception is this rank's own fault, or the result of another rank's loss."""

import re

from torch.distributed import DistError

from moevement_ext.membership.rendezvous import RoundEnded
from moevement_ext.regroup.process_groups import RegroupError
from moevement_ext.replicate.log_reader import ReaderClosed

_PLACE_IN_GLOO = re.compile(r'^\[[^\]]*\.(?:cc|h):\d+\]\s*')
_ADVICE_OF_GLOO = re.compile(
    r'\s*This (?:is probably due|may be|could be)\b.*|\s*GLHF!.*', re.DOTALL
)
# The line of NCCL's last error that torch quotes: CUDA's words, or NCCL's own after them.
_NO_MEMORY = re.compile('.*(?:out of memory|Failed to CUDA [cm]alloc).*')
_LONGEST = 300


def in_words(error: BaseException) -> str:
    """Format an exception for the log; a lost connection is no defect of the program.

    Gloo's source locations and advice are removed, and all that NCCL adds to a lack of memory.
    """
    lines = str(error).splitlines() or ['no reason given']
    if full := no_gpu_memory(error):
        lines = [f'no GPU memory for a communicator: {full}']
    text = _ADVICE_OF_GLOO.sub('', _PLACE_IN_GLOO.sub('', lines[0]))
    text = ''.join(letter for letter in text if letter.isprintable() and ord(letter) < 0xE000)
    text = text.strip()[:_LONGEST]
    if isinstance(error, RuntimeError) and 'gloo' in str(error).lower():
        return f'the connection to another rank is lost (gloo: {text})'
    return f'{type(error).__name__}: {text}'


def lost_peer(error: BaseException) -> bool:
    """Return True if an exception results from the loss of another rank, not from an own fault.

    gloo names its transport in every message. NCCL, the stores, and the clients that fetch
    windows and logs raise exceptions of specific types.
    """
    known = RoundEnded | RegroupError | DistError | ConnectionError | ReaderClosed
    if isinstance(error, known):
        return True
    return isinstance(error, RuntimeError) and 'gloo' in str(error).lower()


def no_gpu_memory(error: BaseException) -> str:
    """NCCL's words if it had no memory for a communicator, in `renew` or an operation; else ''."""
    found = isinstance(error, RegroupError | DistError) and _NO_MEMORY.search(str(error))
    return found[0] if found else ''
