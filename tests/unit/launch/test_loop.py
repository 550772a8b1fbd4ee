# SPDX-License-Identifier: Apache-2.0
import os

from moevement_ext.launch.child import FdLoop


def test_descriptor_closed_in_the_same_turn_gets_no_call() -> None:
    """The first of two callbacks closes the other's file and opens another with its number."""
    loop = FdLoop()
    ends = [os.pipe(), os.pipe()]
    calls: list[str] = []

    def call(index: int) -> None:
        calls.append('first')
        other = ends[1 - index][0]
        loop.forget(other)
        loop.watch(other, lambda: calls.append('reused'))

    for index, (reader, writer) in enumerate(ends):
        os.write(writer, b'.')
        loop.watch(reader, lambda index=index: call(index))
    loop.turn(0)
    assert calls == ['first']
    for end in sum(ends, ()):
        os.close(end)
    loop.close()


def test_watching_again_replaces_the_callback() -> None:
    loop = FdLoop()
    reader, writer = os.pipe()
    calls: list[str] = []
    loop.watch(reader, lambda: calls.append('old'))
    loop.watch(reader, lambda: calls.append('new'))
    os.write(writer, b'.')
    loop.turn(0)
    loop.forget(reader)
    loop.forget(reader)
    loop.turn(0)
    assert calls == ['new']
    os.close(reader)
    os.close(writer)
    loop.close()
