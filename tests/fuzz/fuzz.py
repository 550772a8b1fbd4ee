# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of one target by atheris, see README.md."""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=['moevement_ext.memory', 'moevement_ext.replicate']):
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import opened


def main() -> None:
    """Fuzz the target named first; the other arguments are libFuzzer's."""
    name, corpus = sys.argv[1], Path(sys.argv[2])
    corpus.mkdir(parents=True, exist_ok=True)
    with opened() as targets:
        for index, seed in enumerate(seeds(targets._window)[name]):
            (corpus / f'seed-{index}').write_bytes(seed)
        atheris.Setup([sys.argv[0], *sys.argv[2:]], targets.all[name])
        atheris.Fuzz()


main()
