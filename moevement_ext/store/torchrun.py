# SPDX-License-Identifier: Apache-2.0
"""`python -m moevement_ext.store.torchrun`: runs `launch/torchrun.py`."""

import runpy

if __name__ == '__main__':
    runpy.run_module('moevement_ext.launch.torchrun', run_name='__main__')
