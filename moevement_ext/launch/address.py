# SPDX-License-Identifier: Apache-2.0
"""Where agents find their supervisor, and the secret by which they recognise each other."""

from typing import NamedTuple

ADDRESS_VARIABLE = 'MOEVEMENT_SUPERVISOR'
"""In the environment of an agent, which does not hand it on."""


class Address(NamedTuple):
    """Where the supervisor listens, with the secret of the job: what it hands to its agents."""

    host: str
    port: int
    secret: bytes

    @classmethod
    def parse(cls, text: str) -> 'Address':
        """The address of a string that `str` made."""
        host, port, secret = text.rsplit(' ', 2)
        return cls(host, int(port), bytes.fromhex(secret))

    def __str__(self) -> str:
        return f'{self.host} {self.port} {self.secret.hex()}'
