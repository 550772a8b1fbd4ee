# SPDX-License-Identifier: Apache-2.0
"""The only place that replaces parts of upstream.

Modules that wrap, override or call a part that upstream does not promise list its parameters in
`patches.toml`; those that read or set such an attribute list its name there. `check` compares them
at start: if upstream has changed, the program ends with the names instead of training wrongly.
Upstream calls functions through its modules and methods through their classes, so a wrapper set
there takes effect everywhere.

The whole package was checked against megatron-core 0.19.2 and torch 2.11 to 2.15; modules that
depend on Transformer Engine name its versions.
"""

import functools
import importlib
import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moevement_ext.errors import UserError

CHECKED_VERSION = 'megatron-core 0.19.2'

_TABLES = tomllib.loads(Path(__file__).with_suffix('.toml').read_text('utf-8'))


def _table(name: str) -> dict[str, tuple[str, ...]]:
    """Names by part, as `module:function` or `module:Class.method`, or by module."""
    return {
        f'{module}:{path}'.rstrip(':'): tuple(names.split())
        for module, parts in _TABLES[name].items()
        for path, names in parts.items()
    }


UPSTREAM = _table('upstream')
"""Parameters by part."""
ATTRIBUTES = _table('attributes')
"""Attributes by their module or class, or by the function of upstream that uses or sets them."""
TORCH = _table('torch')
"""First parameters of public functions of torch."""
TAKING = _table('taking')
"""Parts that some installations lack, with some of their parameters; checked when wrapped."""
OBJECTS = frozenset(_TABLES['objects'].split())
"""Functions that `wrap_object` replaces."""

Wrapper = Callable[..., object]
"""Called as `wrapper(original, ...)` with the arguments of the original."""


def check() -> None:
    """Compare all parts with the tables. Call before the adapter uses any of them.

    Raises:
        UserError: a part differs; the message names the first one.
    """
    for part in (*UPSTREAM, *TORCH):
        _find(part)
    for holder in ATTRIBUTES:
        _check_attributes(holder)


def wrap(part: str, wrapper: Wrapper, by_name: bool = False) -> None:
    """Replace a part by `wrapper(original, ...)`, for the lifetime of the process.

    `by_name`: it gets all arguments as keywords, also those that upstream passes by position.

    Raises:
        UserError: the part differs from the table.
    """
    owner, name, original = _find(part)
    signature = inspect.signature(original)

    def named(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        return wrapper(original, **signature.bind(*args, **kwargs).arguments)

    setattr(owner, name, _wrapping(original, named if by_name else wrapper))


def shared(call: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Arguments of a call that a part takes, too, by the same names."""
    return {name: call[name] for name in UPSTREAM[part] if name in call}


def wrap_object(owner: object, name: str, wrapper: Wrapper) -> Callable[[], None]:
    """Replace a function of one object, listed in `OBJECTS`; returns a function that undoes it."""
    assert name in OBJECTS, name
    own, original = name in vars(owner), getattr(owner, name)
    setattr(owner, name, _wrapping(original, wrapper))
    if own:
        return functools.partial(setattr, owner, name, original)
    return functools.partial(delattr, owner, name)


@contextmanager
def wrapped(part: str, wrapper: Wrapper) -> Iterator[None]:
    """Replace a part as `wrap` does, within the context only."""
    owner, name, original = _find(part)
    setattr(owner, name, _wrapping(original, wrapper))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _wrapping(original: Callable[..., object], wrapper: Wrapper) -> Callable[..., object]:
    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> object:
        return wrapper(original, *args, **kwargs)

    return call


def _find(part: str) -> tuple[Any, str, Callable[..., object]]:
    """Module or class that holds a part, the name of the part there, and its present value."""
    module, _, path = part.partition(':')
    *outer, name = path.split('.')
    owner = _value(part, module, *outer)
    original = _value(part, module, *outer, name)
    found = tuple(inspect.signature(original).parameters)
    expected = TORCH.get(part) or TAKING.get(part) or UPSTREAM[part]
    if part in TORCH:
        compared = found[: len(expected)]
    elif part in TAKING:
        compared = tuple(one for one in expected if one in found)
    else:
        compared = found
    if compared != expected:
        raise _changed(part, f'has the parameters {found}, expected {expected}')
    return owner, name, original


def _check_attributes(holder: str) -> None:
    module, _, path = holder.partition(':')
    found = inspect.unwrap(_value(holder, module, *filter(None, path.split('.'))))
    names = found.__code__.co_names if inspect.isfunction(found) else dir(found)
    for name in ATTRIBUTES[holder]:
        if name not in names:
            raise _changed(holder, f'has no {name}')


def _value(part: str, module: str, *path: str) -> Any:
    try:
        return functools.reduce(getattr, path, importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise _changed(part, f'is not there ({error})') from error


def _changed(part: str, how: str) -> UserError:
    return UserError(
        f'{part} {how}: this is not the version that sparse checkpointing was checked against. '
        f'Install {CHECKED_VERSION}.'
    )
