# SPDX-License-Identifier: Apache-2.0
"""Digests of fault-free runs of plain Megatron, shared by many tests.

Of this project (which `--sparse-ckpt` switches on) only what takes the digest matters to them, so
they are kept in `.cache/references` under everything that they do depend on. Each test session
computes one of those that it needs again, drawn anew, so that one that is stale shows.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.distributed.harness.cluster import ROOT

CACHE = ROOT / '.cache' / 'references'


def settings(flags: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Values of each flag of a command line, in whatever order; the last of a flag counts."""
    found: dict[str, tuple[str, ...]] = {}
    name = ''
    for word in flags:
        if word.startswith('--'):
            name, given, value = word.partition('=')
            found[name] = (value,) if given else ()
        else:
            found[name] += (word,)
    return dict(sorted(found.items()))


class References:
    """Of one test session.

    Args:
        text: file of the tokens that all runs train on.
        directory: where they are kept between sessions.
    """

    def __init__(self, text: Path, directory: Path = CACHE) -> None:
        self._directory = directory
        self._here = {
            'versions': [importlib.metadata.version(x) for x in ('torch', 'megatron-core')],
            'python': platform.python_version(),
            'processor': _processor(),
            'text': hashlib.sha256(text.read_bytes()).hexdigest(),
            'sources': _digest_of_sources(),
        }
        self._known: dict[str, dict] = {}
        kept = sorted(directory.glob('*.json'))
        self._again = random.SystemRandom().choice(kept) if kept else None

    def digest(
        self, flags: Sequence[str], ranks: int, stand_in: str | None, run: Callable[[], dict]
    ) -> dict:
        """What `run` has come to in this session, or before.

        Raises:
            AssertionError: it was computed again, and is another one.
        """
        what = {'flags': settings(flags), 'ranks': ranks, 'stand-in': stand_in, **self._here}
        key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        if key not in self._known:
            file = self._directory / f'{key}.json'
            kept = json.loads(file.read_text()) if file.exists() else None
            if kept is None or file == self._again:
                computed = run()
                _write(file, computed)
                assert kept in (None, computed), f'{file} was another one: what does it depend on?'
                kept = computed
            self._known[key] = kept
        return self._known[key]


def _write(file: Path, content: dict) -> None:
    """Whole, or not at all: other sessions read there, too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f'{file.name}.{os.getpid()}')
    partial.write_text(json.dumps(content))
    partial.rename(file)


def _processor() -> list[str]:
    """Model and instructions: libraries choose kernels by them."""
    lines = Path('/proc/cpuinfo').read_text().splitlines()
    return sorted({line for line in lines if line.startswith(('model name', 'flags'))})


def _digest_of_sources() -> str:
    """Of all that takes a digest, or can act in a plain run with a stand-in."""
    places = ('megatron/moevement/state', 'tests/stand_ins', 'tests/distributed/mutations')
    sources = sorted(path for place in places for path in (ROOT / place).rglob('*.py'))
    return hashlib.sha256(b'\0'.join(path.read_bytes() for path in sources)).hexdigest()
