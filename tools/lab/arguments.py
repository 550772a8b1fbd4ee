# SPDX-License-Identifier: Apache-2.0
"""Command line parser of the tools."""

import argparse
from typing import Any, NoReturn

from moevement_ext.command import shown
from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.system.user_errors import usage_error


class Parser(argparse.ArgumentParser):
    """Prints help without reformatting, and errors without the usage text.

    Args:
        prog: program name as typed by a user.
        others: arguments of `ArgumentParser`.
    """

    def __init__(self, prog: str, **others: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=shown(prog), **{'formatter_class': formatter, **others})

    def format_help(self) -> str:
        """All of it, with the commands as this one was given."""
        return shown(super().format_help())

    def require_at_least_1(self, args: argparse.Namespace, *names: str) -> None:
        """Exit with a message if a flag, by its attribute, is below 1."""
        for name in names:
            if (value := getattr(args, name)) < 1:
                self.error(f'--{name.replace("_", "-")} {value}: must be at least 1')

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, shown(usage_error(self, message)))
