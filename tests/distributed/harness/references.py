# SPDX-License-Identifier: Apache-2.0
"""Digests of fault-free runs of plain Megatron, shared by many tests.

Of this project (enabled by `--sparse-ckpt`) only the code that takes the digest affects these runs.
So digests are kept in `.cache/references`, under a key of everything that the runs depend on. Each
test session recomputes one randomly drawn digest of those that it needs, so that a stale one is
detected.
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
    """Values of each flag of a command line, in any order; the last value of a flag counts."""
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
    """Reference digests of one test session.

    Args:
        text: file of the tokens that all runs train on.
        directory: directory that keeps digests between sessions.
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
        """Return the result of `run`, from this session or an earlier one.

        Raises:
            AssertionError: the recomputed digest differs from the kept one.
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
    """Write a file atomically, as other sessions read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f'{file.name}.{os.getpid()}')
    partial.write_text(json.dumps(content))
    partial.rename(file)


def _processor() -> list[str]:
    """CPU model and instruction sets: libraries select kernels by them."""
    lines = Path('/proc/cpuinfo').read_text().splitlines()
    return sorted({line for line in lines if line.startswith(('model name', 'flags'))})


def _digest_of_sources() -> str:
    """Digest of all sources that take a digest, or can act in a plain run with a stand-in."""
    places = ('megatron/moevement/state', 'tests/stand_ins', 'tests/distributed/mutations')
    sources = sorted(path for place in places for path in (ROOT / place).rglob('*.py'))
    return hashlib.sha256(b'\0'.join(path.read_bytes() for path in sources)).hexdigest()
