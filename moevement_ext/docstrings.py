# SPDX-License-Identifier: Apache-2.0
"""Docstrings below the fields of a class, which Python itself does not keep."""

import ast
import inspect


def of_fields(kind: type) -> dict[str, str]:
    """Docstring of each field of a top-level class, in one line; empty without a source file."""
    try:
        source = inspect.getsource(kind)
    except OSError:  # installed without sources: only the help texts are missing
        return {}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: ' '.join(text.value.value.split())
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }
