# SPDX-License-Identifier: Apache-2.0
"""Back to the queue, with programs in the place of those of Slurm."""

from pathlib import Path

import pytest

from moevement_ext.slurm import allocation

SCONTROL = """\
#!/usr/bin/env bash
if [[ $1 == requeue ]]; then echo "$2" >"$0.requeued"; else tr , '\\n' <<<"$3"; fi
"""
# The nodes that the job has are in a file with a line for each question; the last line stays.
SQUEUE = """\
#!/usr/bin/env bash
nodes=$(head -n 1 "$0.nodes")
(($(wc -l <"$0.nodes") == 1)) || sed -i 1d "$0.nodes"
if [[ $nodes == silence ]]; then echo 'Unable to contact slurm controller' >&2; exit 1; fi
echo "$nodes"
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (('scontrol', SCONTROL), ('squeue', SQUEUE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    monkeypatch.setattr(allocation, '_POLL_S', 0.01)
    return tmp_path


def test_slurm_is_given_time_to_notice_what_is_lost(programs: Path) -> None:
    (programs / 'squeue.nodes').write_text('a,b,c\na,b\na\n')
    allocation.requeue('42', {'b', 'd'})
    assert (programs / 'squeue.nodes').read_text() == 'a\n'
    assert (programs / 'scontrol.requeued').read_text() == '42\n'


def test_but_not_for_ever(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, '_TO_NOTICE_S', 0.05)
    (programs / 'squeue.nodes').write_text('a,b\n')
    allocation.requeue('42', {'b'})
    assert (programs / 'scontrol.requeued').read_text() == '42\n'


def test_a_job_that_has_no_node_any_more(programs: Path) -> None:
    (programs / 'squeue.nodes').write_text('\n')
    allocation.requeue('42', {'b'})
    assert (programs / 'scontrol.requeued').exists()


@pytest.mark.parametrize('lost', [{'b'}, set()])
def test_a_controller_that_does_not_answer_is_waited_for(programs: Path, lost: set[str]) -> None:
    """It would not hear that the job is to go back."""
    (programs / 'squeue.nodes').write_text('silence\nsilence\na\n')
    allocation.requeue('42', lost)
    assert (programs / 'squeue.nodes').read_text() == 'a\n'
    assert (programs / 'scontrol.requeued').read_text() == '42\n'
