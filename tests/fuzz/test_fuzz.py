# SPDX-License-Identifier: Apache-2.0
"""No input crashes a reader, makes it exceed its memory bound, or raises an undocumented error."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.seeds import seeds
from tests.fuzz.targets import Targets, opened

CORPUS = Path(__file__).parent / 'corpus'
NAMES = ('window', 'directory', 'frame', 'ledger', 'server', 'client', 'packed')
MAX_GROWTH_MIB = 96
FOUND = sorted(path for path in CORPUS.rglob('*') if path.is_file())


@pytest.fixture(scope='module')
def targets() -> Iterator[Targets]:
    with opened() as targets:
        yield targets


@pytest.fixture(autouse=True)
def bounded(targets: Targets) -> Iterator[None]:
    before = psutil.Process().memory_info().rss
    yield
    grown = (psutil.Process().memory_info().rss - before) / 2**20
    assert grown < MAX_GROWTH_MIB, f'{grown:.0f} MiB more'


@st.composite
def mutated(draw: st.DrawFn, samples: list[bytes]) -> bytes:
    """A sample that is cut, flipped, repeated and spliced."""
    data = bytearray(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 16))
        new = draw(
            st.binary(max_size=9) | st.sampled_from([b'\xff' * 8, b'\xdd\xff\xff\xff\xff', b'\xcf'])
        )
        data[at : at + length] = new
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))]
    return bytes(data)


@pytest.mark.parametrize('name', NAMES)
def test_corpus_raises_only_documented_errors(targets: Targets, name: str) -> None:
    found = [path for path in FOUND if path.parent.name == name]
    assert found
    broken = {}
    for path in found:
        try:
            targets.all[name](path.read_bytes())
        except Exception as error:
            broken[path.name] = error
    assert broken == {}


@pytest.mark.parametrize('name', NAMES)
def test_valid_input_passes(targets: Targets, name: str) -> None:
    for seed in seeds(targets._window)[name]:
        targets.all[name](seed)


@pytest.mark.parametrize('name', NAMES)
@given(data=st.data())
def test_mutated_input_raises_only_documented_errors(
    targets: Targets, name: str, data: st.DataObject
) -> None:
    samples = seeds(targets._window)[name]
    targets.all[name](data.draw(st.binary(max_size=300) | mutated(samples)))


def test_corpus_is_smaller_than_one_mebibyte() -> None:
    assert FOUND
    assert sum(path.stat().st_size for path in FOUND) < 2**20
