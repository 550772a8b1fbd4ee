# SPDX-License-Identifier: Apache-2.0
"""The training state of a module and its optimizer, operator by operator."""

from collections.abc import Callable, Collection, Iterator

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import Optimizer

from moevement_ext.capture.layout import OperatorSlices, TensorSlice, check_fits
from moevement_ext.capture.trainer_state import broadcast_packed
from moevement_ext.config import ConfigurationError
from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.tensors import copy_all, dtype_name, dtype_of
from moevement_ext.memory.window.slot import SlotContext, SlotHeader


class ModuleOperators:
    """Parameters, buffers and optimizer state of this rank. Training thread only.

    The compute weights of an operator are its parameters. `requires_grad` freezes an operator.
    Raises `ConfigurationError`, which names the parameter, if a rule is broken.

    Args:
        model: the module, without a wrapper for data parallelism.
        optimizer: of all its parameters.
        operator_of: maps the name of a parameter or buffer to name and kind of its operator.

    Attributes:
        buffers: buffers of the module, which an iteration may change before its update.
        group: group of the ranks with the same state; set before training.
    """

    tied: tuple[str, ...] = ()

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, operator_of: Callable[[str], tuple[str, str]]
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigurationError(
                'The model is wrapped in DistributedDataParallel, which cannot be cut off within '
                'an iteration: give the module itself, and reduce its gradients in `compute`.'
            )
        self._model = model
        self._optimizer = optimizer
        self._operator_of = operator_of
        self._modes: list[bool] = []
        self.device = next(model.parameters()).device
        self.group: dist.ProcessGroup | None = None
        self.renew()

    def renew(self) -> None:
        """Look up all tensors again, after a load that replaces tensors, as an optimizer's does."""
        create_state(self._optimizer)
        self._index()

    def _index(self) -> None:
        model, optimizer = self._model, self._optimizer
        self._members: dict[str, list[nn.Parameter]] = {}
        self.kinds: dict[str, str] = {}
        self.slices: dict[str, OperatorSlices] = {}
        trained = _trained(model, optimizer)
        for name, parameter in model.named_parameters():
            operator = self._enter(*self._operator_of(name))
            _check_parameter(name, parameter, trained)
            self._members[operator].append(parameter)
            weight = _slice(operator, name, 'weight', parameter)
            self._add(operator, (weight, *_state_of(operator, name, parameter, optimizer)), weight)
        self.buffers = [buffer for _, buffer in model.named_buffers()]
        for name, buffer in model.named_buffers():
            operator = self._enter(*self._operator_of(name))
            part = _slice(operator, name, 'buffer', buffer, volatile=True)
            self._add(operator, (part,), part)
        self._saved = [buffer.clone() for buffer in self.buffers]
        self._modules = list(model.modules())
        self._captured = self._present()

    def _enter(self, operator: str, kind: str) -> str:
        self.kinds.setdefault(operator, kind)
        self._members.setdefault(operator, [])
        self.slices.setdefault(operator, OperatorSlices((), ()))
        return operator

    def _add(self, operator: str, full: tuple[TensorSlice, ...], weights: TensorSlice) -> None:
        known = self.slices[operator]
        self.slices[operator] = OperatorSlices((*known.full, *full), (*known.weights, weights))

    def check(self, header: SlotHeader) -> None:
        """Check that a slot has all records that this model needs.

        Raises `RefusedWindow`, which names a parameter, if the slot belongs to another
        model.
        """
        check_fits(header, self.slices)

    @torch.no_grad()
    def load(self, header: SlotHeader, payload: Bytes, context: SlotContext) -> None:
        """Copy the tensors of a slot back to where they were captured."""
        self.check(header)
        targets = {(item.tensor, item.part): item.source for item in self._all()}
        for record in header.records:
            content = torch.from_numpy(payload[record.offset : record.offset + record.nbytes])
            dtype = dtype_of(record.dtype)
            assert dtype is not None  # `check` has compared the slot with the model
            targets[record.tensor, record.part].copy_(content.view(dtype))

    def freeze(self, names: Collection[str]) -> None:
        """Freeze exactly these operators: their parameters get neither gradient nor update."""
        for operator, parameters in self._members.items():
            for parameter in parameters:
                parameter.requires_grad_(operator not in names)

    def begins(self) -> None:
        """Before an iteration, save the buffers and modes, which it may change besides the update.

        Raises `ConfigurationError`, which names the tensor, if a captured tensor was replaced.
        """
        if self._present() != self._captured:
            self._refuse_replaced()
        copy_all(self._saved, self.buffers)
        self._modes = [module.training for module in self._modules]

    def undo(self, began: bool) -> None:
        """Undo a broken iteration; unless it `began`, only effects of code between iterations.

        An interrupted evaluation, for example, leaves modules in evaluation mode.
        """
        for module, training in zip(self._modules, self._modes, strict=False):
            module.training = training
        self.freeze(())
        if began:
            copy_all(self.buffers, self._saved)

    def copy(self, source: int) -> None:
        assert self.group is not None
        broadcast_packed((item.source for item in self._all()), source, self.group, self.device)

    def _present(self) -> list[object]:
        """Address and `requires_grad` of all tensors; less than a microsecond for each."""
        owners = (
            *(module._parameters for module in self._modules),
            *(module._buffers for module in self._modules),
            *self._optimizer.state.values(),
        )
        return [
            *(len(group['params']) for group in self._optimizer.param_groups),
            *(
                (tensor.data_ptr(), tensor.requires_grad)
                for owner in owners
                for tensor in owner.values()
                if torch.is_tensor(tensor)
            ),
        ]

    def _refuse_replaced(self) -> None:
        before = self._places()
        self._index()
        if changed := before ^ self._places():
            name, part, _ = min(changed)
            raise ConfigurationError(
                f'{name} ({part}) is another tensor than windows were set up for: change tensors '
                'in place (copy_, add_), and load checkpoints in `build` or `load_dense`.'
            )

    def _places(self) -> set[tuple[str, str, int]]:
        return {(item.tensor, item.part, item.source.data_ptr()) for item in self._all()}

    def _all(self) -> Iterator[TensorSlice]:
        for operator in self.slices.values():
            yield from operator.full


def _state_of(
    operator: str, name: str, parameter: nn.Parameter, optimizer: Optimizer
) -> Iterator[TensorSlice]:
    for part, value in sorted(optimizer.state.get(parameter, {}).items()):
        if value is None:
            continue
        if not torch.is_tensor(value):
            raise ConfigurationError(
                f'optimizer.state has {part} of {name} as {type(value).__name__}, which windows '
                'cannot hold: keep it as a tensor, or take another optimizer.'
            )
        if value.device != parameter.device:
            raise ConfigurationError(
                f'{part} of {name} is on {value.device}, not on {parameter.device}: give the '
                'optimizer fused=True or capturable=True.'
            )
        yield _slice(operator, name, part, value)


def _slice(
    operator: str, name: str, part: str, tensor: torch.Tensor, volatile: bool = False
) -> TensorSlice:
    if not tensor.is_contiguous():
        raise ConfigurationError(f'{name} ({part}) is not contiguous; make it so before training.')
    if dtype_of(dtype_name(tensor.dtype)) is None:
        raise ConfigurationError(
            f'{name} ({part}) is of {tensor.dtype}, which windows cannot hold: keep it as another '
            'type, such as torch.uint8, and take a view of it.'
        )
    flat = tensor.detach().view(-1)
    return TensorSlice(operator, name, part, 0, flat.numel(), flat, volatile)


def _trained(model: nn.Module, optimizer: Optimizer) -> set[int]:
    """Identities of the optimizer's parameters; refuse state that no parameter has."""
    trained = [one for group in optimizer.param_groups for one in group['params']]
    known = set(map(id, model.parameters()))
    for one in (*trained, *optimizer.state):
        if id(one) not in known:
            what = f'a tensor of shape {list(one.shape)}' if torch.is_tensor(one) else repr(one)
            raise ConfigurationError(
                f'The optimizer has {what}, which is no parameter of the model, so a recovery '
                'would lose it: give the trainer one module with all parameters.'
            )
    return set(map(id, trained))


def _check_parameter(name: str, parameter: nn.Parameter, trained: Collection[int]) -> None:
    """Refuse frozen parameters, as a replay freezes and thaws by `requires_grad`."""
    if not parameter.requires_grad:
        raise ConfigurationError(
            f'{name} has requires_grad=False; sparse checkpointing does not support untrained '
            'parameters: train it, or make it a buffer.'
        )
    if id(parameter) not in trained:
        raise ConfigurationError(f'The optimizer does not have {name}; give it all parameters.')


# Optimizers whose state is all zeros before the first step.
_BEGIN_AT_ZERO = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW),
    *(optim.RMSprop, optim.SGD),
)


def create_state(optimizer: optim.Optimizer) -> None:
    """Create the state that the first step would create, with its initial values.

    Existing state and parameters do not change; gradients are dropped. Raises
    `ConfigurationError` if the initial state of this optimizer is not known to be zero.
    """
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        for parameter in group['params']:
            if not optimizer.state.get(parameter):
                _check(optimizer, group.get('dampening', 0))
                _step_once(optimizer, parameter)


def _check(optimizer: optim.Optimizer, dampening: float) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, _BEGIN_AT_ZERO) or dampening:
        with_it = ' with dampening' if dampening else ''
        raise ConfigurationError(
            f'{name}{with_it} has no state for some parameters yet, and what it begins with is not '
            'known: fill optimizer.state before the trainer is built, or take one of '
            f'{", ".join(kind.__name__ for kind in _BEGIN_AT_ZERO)} (SGD without dampening).'
        )


@torch.no_grad()
def _step_once(optimizer: optim.Optimizer, parameter: torch.Tensor) -> None:
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    parameter.grad = None
    parameter.copy_(before)
    for value in optimizer.state.get(parameter, {}).values():
        if torch.is_tensor(value):
            value.zero_()
