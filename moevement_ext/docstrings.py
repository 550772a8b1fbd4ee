# SPDX-License-Identifier: Apache-2.0
"""Docstrings below the fields of a class, which Python itself does not keep."""

import ast
import inspect
import sys


def of_fields(kind: type) -> dict[str, str]:
    """Docstring of each field of a top-level class, in one line; empty without a source file."""
    try:
        # Of the module, as line numbers of the class may be outdated, and have a syntax error.
        source = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    except (OSError, TypeError, SyntaxError):  # frozen, or changed: only help texts are missing
        return {}
    classes = (one for one in source.body if isinstance(one, ast.ClassDef))
    body = next((one.body for one in classes if one.name == kind.__name__), [])
    return {
        field.target.id: ' '.join(text.value.value.split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }
