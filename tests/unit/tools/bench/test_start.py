# SPDX-License-Identifier: Apache-2.0
from argparse import Namespace
from pathlib import Path

from tests.unit.tools.samples import HARDWARE
from tools.bench.start import PLAIN, SPARE, TORCHRUN, Start, StartBench


def test_last_line_compares_the_hot_spare_with_plain_megatron() -> None:
    plain, torchrun, spare = Start(10.0, 9.0, 2000), Start(9.5, 8.0, 1500), Start(9.0, 6.3, 1000)
    bench = StartBench(Namespace(), Path(), Path())
    report = bench.summary(HARDWARE, [{PLAIN: plain, TORCHRUN: torchrun, SPARE: spare}])
    assert report.notes == ['start: seconds=0.90 cpu=0.70 memory=0.50']
