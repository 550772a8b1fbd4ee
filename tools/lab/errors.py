# SPDX-License-Identifier: Apache-2.0
"""The error class of the tools."""


class LabError(Exception):
    """A tool cannot continue; `main` prints why. Any function of a tool may raise it.

    Args:
        message: the problem and its remedy.
        tail: last lines of the log with the most detail, if any.
    """

    def __init__(self, message: str, tail: str = '') -> None:
        super().__init__(message)
        self.tail = tail
