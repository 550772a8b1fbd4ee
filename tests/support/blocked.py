# SPDX-License-Identifier: Apache-2.0
"""A thread that waits in the kernel with Python's lock, as in a page fault of a mapped file."""

import ctypes
import os
from pathlib import Path


def block(pipe: Path) -> None:
    """Block all threads of Python until another process opens this new pipe for writing.

    The C library waits in vfork, in state D, until its child runs the program.
    """
    os.mkfifo(pipe)
    c, actions = ctypes.PyDLL(None), ctypes.create_string_buffer(1024)
    c.posix_spawn_file_actions_init(actions)
    c.posix_spawn_file_actions_addopen(actions, 1000, os.fsencode(pipe), os.O_RDONLY, 0)
    arguments = (ctypes.c_char_p * 2)(b'true')
    c.posix_spawn(ctypes.byref(ctypes.c_int()), b'/bin/true', actions, None, arguments, arguments)
