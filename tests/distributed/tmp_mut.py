# SPDX-License-Identifier: Apache-2.0
from megatron.moevement import optimizer_state, operators, slices
from tests.distributed import inventory_probe
def gap():
    optimizer_state.share = lambda n, r, s: (n * r // s, n * (r + 1) // s - (r == 0))
    inventory_probe.write_inventory()
def nomoment():
    f = slices._full
    slices._full = lambda o, s: [p for p in f(o, s) if p.part != 'exp_avg_sq']
    inventory_probe.write_inventory()
def expertname():
    f = operators._operator_in_layer
    def g(name, layer):
        o = f(name, layer)
        if o.kind == 'expert': o.name = o.name[:-1] + str((int(o.name[-1]) + 1) % 4)
        return o
    operators._operator_in_layer = g
    inventory_probe.write_inventory()
