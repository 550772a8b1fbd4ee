# SPDX-License-Identifier: Apache-2.0
"""How a tool reads its command line."""

import argparse
from typing import Any, NoReturn

from moevement_ext.command import shown
from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.process.user_errors import usage_error


class Parser(argparse.ArgumentParser):
    """Shows its help as it is written, and an error without all flags before it.

    Args:
        prog: as a user types it.
        others: of `ArgumentParser`.
    """

    def __init__(self, prog: str, **others: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=shown(prog), **{'formatter_class': formatter, **others})

    def format_help(self) -> str:
        """All of it, with the commands as this one was given."""
        return shown(super().format_help())

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line."""
        self.exit(EXIT_USER_ERROR, shown(usage_error(self, message)))
