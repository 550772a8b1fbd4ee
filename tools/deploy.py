# SPDX-License-Identifier: Apache-2.0
"""Writes files for operators and readers, as this release has them.

    moevement deploy grafana -o dashboards    # moevement.json, to import
    moevement deploy alerts -o rules          # alerts.yml for Prometheus, and its tests
    moevement deploy jobset -o k8s            # jobset.yaml and podmonitor.yaml for Kubernetes
    moevement deploy examples                 # training loops of your own, in examples/

Exit status: 0 done, 2 a file exists already, or cannot be written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from moevement_ext.command import data

from .lab.programs import Parser

_FOLDERS = {
    'grafana': 'deploy/grafana',
    'alerts': 'deploy/prometheus',
    'jobset': 'deploy/k8s',
    'examples': 'examples',
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='moevement deploy', description=__doc__)
    parser.add_argument('what', choices=_FOLDERS)
    parser.add_argument('-o', '--output', type=Path, metavar='DIR', help='default: WHAT')
    args = parser.parse_args(argv)
    folder = args.output or Path(args.what)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted(data(_FOLDERS[args.what]).iterdir()):
            if source.is_file():
                text = source.read_text('utf-8').replace('from examples import', 'import')
                (folder / source.name).open('x', encoding='utf-8').write(text)
                print(folder / source.name)
    except OSError as error:
        parser.error(f'{error.filename}: {error.strerror}; give another --output')
    return 0


if __name__ == '__main__':
    sys.exit(main())
