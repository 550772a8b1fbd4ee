# SPDX-License-Identifier: Apache-2.0
"""How a tool says that something went wrong."""


class LabError(Exception):
    """A tool cannot go on.

    Args:
        message: what happened and what to do.
        tail: last lines of the log that tells more, if there is one.
    """

    def __init__(self, message: str, tail: str = '') -> None:
        super().__init__(message)
        self.tail = tail
