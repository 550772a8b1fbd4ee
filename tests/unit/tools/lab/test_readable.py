# SPDX-License-Identifier: Apache-2.0
from tools.lab.text import readable


def test_messages_of_gloo_are_shortened() -> None:
    found = readable(
        'RuntimeError: [/__w/pytorch/gloo/transport/tcp/pair.cc:545] Read error [127.0.1.1]:9: '
        'Connection reset by peer. GLHF! \U000f0000'
    )
    assert found == 'RuntimeError: Read error [127.0.1.1]:9: Connection reset by peer.'
    assert readable('rank 1 (pid 5) was killed by SIGKILL') == (
        'rank 1 (pid 5) was killed by SIGKILL'
    )
