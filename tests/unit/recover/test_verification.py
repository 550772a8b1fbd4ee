# SPDX-License-Identifier: Apache-2.0
"""What was captured before a failure tells whether a replay computed the same bits again."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from moevement_ext.capture.layout import OperatorSlices, SlotLayout, TensorSlice
from moevement_ext.config import REPORT, STOP
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.tensors import copy_all
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.slot import SlotContext, SlotHeader
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.recover.verification import Verification
from tests.unit.memory.samples import make_header, named

SLOTS = (('expert.0',), ('expert.1',))


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        f'{name}.{part}': torch.randn(33, generator=generator).to(dtype)
        for name in ('expert.0', 'expert.1')
        for part, dtype in (('master', torch.float32), ('weight', torch.bfloat16))
    }


def slices_of(state: dict[str, torch.Tensor]) -> dict[str, OperatorSlices]:
    def part(name: str, kind: str) -> TensorSlice:
        return TensorSlice(name, f'{name}.weight', kind, 7, 40, state[f'{name}.{kind}'])

    return {
        name: OperatorSlices((part(name, 'master'),), (part(name, 'weight'),))
        for name in ('expert.0', 'expert.1')
    }


def captured(path: Path, slices: dict[str, OperatorSlices], slot: int) -> SlotHeader:
    """A slot as the capture of the state leaves it, sealed in a real window file."""
    plan = WindowPlan(SLOTS)
    layout = SlotLayout(plan, slot, slices)
    file = WindowFile.create(path / f'{slot}.window', 1 << 18)
    file.begin(named(6))
    payload = file.reserve_slot(slot, layout.payload_bytes)
    for piece in (*layout.copies(payload, volatile=True), *layout.copies(payload, volatile=False)):
        copy_all(piece.targets, piece.sources)
    header = msgspec.structs.replace(
        make_header(slot, start=6, window=2),
        payload_bytes=layout.payload_bytes,
        records=layout.records,
        context=b'',
    )
    return file.seal_slot(header)


def test_the_same_bits_verify(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    headers = [captured(tmp_path, slices_of(state), slot) for slot in (0, 1)]
    verification = Verification(headers, slices_of(state))
    for iteration in (5, 6, 7, 8):
        verification.check(iteration)
    result = verification.result()
    assert (result.verified, result.verified_at, result.differing) == (2, 7, ())
    assert str(result) == 'verified: 2 operators at iteration 7, differing: 0'


@pytest.mark.parametrize(
    ('slot', 'tensor', 'differs'),
    [
        (0, 'expert.0.master', True),
        (0, 'expert.1.weight', True),
        (1, 'expert.0.master', False),  # which that slot has nothing of
    ],
)
def test_one_wrong_bit_is_reported_by_name(
    slot: int, tensor: str, differs: bool, tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    headers = [captured(tmp_path, slices_of(state), slot)]
    state[tensor].view(torch.uint8)[5] ^= 1
    verification = Verification(headers, slices_of(state))
    verification.check(6 + slot)
    result = verification.result()
    assert result[:2] == (2 - slot, 6 + slot)
    named = f'{tensor.rpartition(".")[0]} from iteration 6'
    assert result.differing == ((named,) if differs else ())
    assert not differs or f'differing: 1 ({named})' in str(result)


def test_evaluation_makes_no_difference(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    scale = torch.full((4,), 2.0)

    def slices() -> dict[str, OperatorSlices]:
        always = TensorSlice('expert.0', 'experts.scale', 'scaling', 0, 4, scale, volatile=True)
        held = slices_of(state)
        return {**held, 'expert.0': held['expert.0']._replace(always=(always,))}

    headers = [captured(tmp_path, slices(), 0)]
    scale.fill_(1.0)
    verification = Verification(headers, slices())
    verification.check(6)
    assert verification.result()[:2] == (2, 6) and verification.result().differing == ()


NOTHING: dict[str, OperatorSlices] = {}


def test_scalars_of_replayed_iterations_are_compared_bit_for_bit() -> None:
    recorded = [
        LedgerEntry(7, [0.25], [], 2, 56, loss=5.25),
        LedgerEntry(8, [math.nan], [True], 2, 64, loss=math.inf),
        LedgerEntry(9, [0.5], [], 2, 72),
    ]
    verification = Verification((), NOTHING, recorded)
    verification.replayed(7, 5.25)
    verification.check(7)  # the end of a conversion
    verification.check(8, recorded[1])
    verification.check(9, msgspec.structs.replace(recorded[2], loss=5.0))
    result = verification.result()
    assert (result.verified, result.iterations, result.differing) == (0, 3, ())
    assert str(result) == 'verified: loss or gradient norm of 3 iterations, differing: 0'


@pytest.mark.parametrize(
    ('recorded', 'differing'),
    [
        ([], ('loss from iteration 7',)),
        ([LedgerEntry(7, [0.25], [], 2, 56)], ('loss from iteration 7',)),  # of another rank
        ([LedgerEntry(7, [], [], 2, 56, loss=5.0)], ()),  # it precedes the slot
    ],
)
def test_slots_provide_losses(recorded: list[LedgerEntry], differing: tuple[str, ...]) -> None:
    verification, nothing = Verification((), NOTHING, recorded), Verification.of_nothing()
    for one in (verification, nothing):
        one.replayed(6, 5.5, captured=5.5)
        one.replayed(7, 5.0, captured=5.25)
    assert (verification.result().iterations, verification.result().differing) == (2, differing)
    assert nothing.result() == Verification.of_nothing().result()


def test_newer_slot_provides_the_loss(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    header = captured(tmp_path, slices_of(state), 0)
    context = SlotContext([], [], b'', loss=5.25)
    header = msgspec.structs.replace(header, context=msgspec.msgpack.encode(context))
    at = header.iteration
    verification = Verification([header], slices_of(state))
    verification.check(at, LedgerEntry(at, [0.5], [], 2, 8, loss=5.0))
    result = verification.result()
    assert (result.iterations, result.differing) == (1, (f'loss from iteration {at}',))


@pytest.mark.parametrize(
    ('changed', 'name'),
    [({'loss': math.nextafter(5.25, 6.0)}, 'loss'), ({'grad_norms': [0.5]}, 'gradient norm')],
)
def test_the_first_iteration_whose_scalars_differ_is_named(
    changed: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = [LedgerEntry(t, [0.25], [], 2, 8 * t, loss=5.25) for t in (7, 8, 9)]
    verification = Verification((), NOTHING, recorded)
    verification.check(7, recorded[0])
    for entry in recorded[1:]:
        verification.check(entry.iteration, msgspec.structs.replace(entry, **changed))
    assert verification.result().differing == (f'{name} from iteration 8',)
    assert verification.forbids(STOP) and not verification.forbids(REPORT)
    assert len([text for text in caplog.messages if f'the {name} of iteration 8' in text]) == 1
