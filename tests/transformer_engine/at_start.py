# SPDX-License-Identifier: Apache-2.0
"""`pretrain_gpt.py` with Transformer Engine on a machine without a GPU, up to the first iteration.

Upstream builds its model and its optimizer, the product takes them apart and plans; then, where the
first kernel would run, what there is is written down, and the process ends.
"""

# Before `pretrain_gpt`, which would hide it.
from transformer_engine.pytorch import GroupedLinear
from transformer_engine.pytorch.optimizers import FusedAdam

from megatron.moevement import pretrain_gpt  # isort: skip
from megatron.moevement.seams import patches
from megatron.moevement.state.frozen import FrozenOperators
from megatron.moevement.state.optimizer_state import chained
from megatron.moevement.state.training_state import TrainingState
from tests.distributed.probes import inventory
from tests.distributed.probes import training as probes
from tests.transformer_engine import kernels


def _grouped(training: TrainingState) -> dict[str, list[str]]:
    """Parameters of each grouped linear layer, by its path."""
    return {
        path: [name for name, _ in module.named_parameters()]
        for chunk in inventory._chunks(training)
        for path, module in chunk.named_modules()
        if isinstance(module, GroupedLinear)
    }


def _asking(training: TrainingState, frozen: list[str]) -> list[str]:
    """Names of the parameters that ask for a gradient while some operators are frozen."""
    operators = FrozenOperators(training.operators, {}, training.model, training.optimizer)
    operators.freeze(frozen)
    asking = [
        name
        for item in training.operators.values()
        for name, parameter in item.parameters.items()
        if parameter.requires_grad
    ]
    operators.freeze(())
    return asking


def _look(session: object, training: TrainingState) -> None:
    patches.check()
    experts = [name for name, item in training.operators.items() if item.kind == 'expert']
    probes.report('inventory', inventory._look(session, training))
    probes.report(
        'found',
        {
            'grouped': _grouped(training),
            'fused': [isinstance(one.optimizer, FusedAdam) for one in chained(training.optimizer)],
            'extra': [name for name in training.model[0].state_dict() if '_extra_state' in name],
            'all but one expert frozen': _asking(training, experts[1:]),
            'all experts frozen': _asking(training, experts),
        },
    )


def main() -> None:
    kernels.claim_a_gpu()
    probes.after_set_up(_look)
    pretrain_gpt.main()


if __name__ == '__main__':
    main()
