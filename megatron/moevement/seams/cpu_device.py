# SPDX-License-Identifier: Apache-2.0
"""Lets upstream's trainer run on a machine without a GPU, over gloo.

Megatron-Core asks for CUDA devices by name. `install()` redirects those requests to the CPU and
repairs the few places with further assumptions. It changes nothing on a machine that has a GPU.

Transformer Engine computes on a GPU only. Upstream uses parts of it (the router's product, Adam) in
any job as soon as it can be imported, so it is hidden.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from megatron.moevement.seams import patches, quiet, without_gpu

CPU = torch.device('cpu')

# Factories that take `device=`; everything Megatron allocates goes through one of these.
_FACTORIES = (
    'arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like '
    'rand rand_like randint randn randn_like randperm tensor zeros zeros_like'
).split()

_COUNTS_OF_MEMORY = (
    'memory_allocated max_memory_allocated memory_reserved max_memory_reserved device_memory_used'
).split()


def needed() -> bool:
    """True on a machine without a usable GPU."""
    return not torch.cuda.is_available()


@contextlib.contextmanager
def capable() -> Iterator[None]:
    """Make upstream's rules accept GPU kernels on a machine without a GPU, such as a login node."""
    cuda: Any = torch.cuda
    original = cuda.get_device_capability
    cuda.get_device_capability = lambda *_: (8, 0)
    try:
        yield
    finally:
        cuda.get_device_capability = original


@functools.cache
def install() -> None:
    """Redirect CUDA requests to the CPU. Call before the first megatron import."""
    for name, value in without_gpu.VARIABLES.items():
        os.environ.setdefault(name, value)
    quiet.on_a_cpu()
    hide_transformer_engine()
    _redirect_devices()
    _redirect_cuda_module()
    _redirect_streams()


def hide_transformer_engine() -> None:
    """Make imports of Transformer Engine fail, unless this process has imported it already."""
    if 'transformer_engine' not in sys.modules and find_spec('transformer_engine') is not None:
        sys.modules['transformer_engine'] = None  # type: ignore[assignment]


@functools.cache
def patch_upstream() -> None:
    """Repair upstream's GPU-only assumptions. Call after megatron imports."""
    wrappers: dict[str, patches.Wrapper] = {
        'megatron.training.training:initialize_megatron': _allowing_no_cuda,
        'megatron.training.training:build_train_valid_test_data_iterators': _keeping_rng,
        'megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu': _keep_on_cpu,
        'megatron.core.tensor_parallel.random:_get_cuda_rng_state': _instead(_get_rng_state),
        'megatron.core.tensor_parallel.random:_set_cuda_rng_state': _instead(_set_rng_state),
        'megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__': _marked_norm,
    }
    for part, wrapper in wrappers.items():
        patches.wrap(part, wrapper)


def _nothing() -> Callable[..., None]:
    """Return a new no-op; torch's tracing tables refuse the same function under two names."""
    return lambda *args, **kwargs: None


def _returns(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def _instead(function: Callable[..., object]) -> patches.Wrapper:
    return lambda original, *args, **kwargs: function(*args, **kwargs)


def _allowing_no_cuda(initialize: Callable[..., object], *args: object, **kwargs: object) -> object:
    return initialize(*args, **{'allow_no_cuda': True} | kwargs)


def _keep_on_cpu(
    _: object, tensor: object, as_numpy: bool = False, record_stream: bool = False
) -> object:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == 'cuda'
    if isinstance(device, str):
        return device.startswith('cuda')
    return isinstance(device, int)


def _redirected(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def on_cpu(*args: object, **kwargs: object) -> object:
        if _is_cuda(kwargs.get('device')):
            kwargs['device'] = CPU
        if kwargs.get('pin_memory'):
            kwargs['pin_memory'] = False
        return function(*args, **kwargs)

    return on_cpu


def _redirect_devices() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))
    for name in ('new_empty', 'new_full', 'new_ones', 'new_tensor', 'new_zeros'):
        setattr(torch.Tensor, name, _redirected(getattr(torch.Tensor, name)))

    plain_to, plain_type = torch.Tensor.to, torch.Tensor.type
    module_to = torch.nn.Module.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], torch.dtype) and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get('device')):
            kwargs['device'] = CPU
        return plain_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> object:
        if args or kwargs:
            return plain_type(self, *args, **kwargs)
        # The optimizers sort parameters by names such as 'torch.cuda.BFloat16Tensor'.
        return plain_type(self).replace('torch.', 'torch.cuda.')

    def module_to_cpu(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get('device')):
            kwargs['device'] = CPU
        return module_to(self, *args, **kwargs)

    def stay(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = stay  # type: ignore[method-assign]
    torch.nn.Module.to = module_to_cpu  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = stay  # type: ignore[method-assign]


def _get_rng_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: object, **kwargs: object) -> None:
    torch.set_rng_state(new_state)


def _redirect_cuda_module() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.get_rng_state = cuda.random.get_rng_state = _get_rng_state
    cuda.set_rng_state = cuda.random.set_rng_state = _set_rng_state
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.memory_stats = lambda *args, **kwargs: {}
    for name in _COUNTS_OF_MEMORY:
        setattr(cuda, name, _returns(0))
    for name in ('set_device', 'synchronize', 'empty_cache', 'reset_peak_memory_stats'):
        setattr(cuda, name, _nothing())
    cuda.get_device_capability = lambda *args: (0, 0)
    cuda.get_device_properties = lambda *args: _NoDevice
    for name in ('range_push', 'range_pop'):
        setattr(cuda.nvtx, name, _nothing())
    cuda.FloatTensor = torch.FloatTensor
    cuda.HalfTensor = torch.HalfTensor
    cuda.BFloat16Tensor = torch.BFloat16Tensor
    cuda.LongTensor = torch.LongTensor
    cuda.IntTensor = torch.IntTensor


class _NoDevice:
    """Result of `get_device_properties` on a machine without a GPU."""

    major, minor, multi_processor_count, total_memory, name = 0, 0, 1, 0, 'cpu'


class _InOrder:
    """A stream or event on the CPU, where all operations run in order anyway."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _nothing()

    def record_event(self, event: '_InOrder | None' = None) -> '_InOrder':
        return event or _InOrder()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


def _redirect_streams() -> None:
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = _InOrder, type('Event', (_InOrder,), {})
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = _returns(_InOrder())
    cuda.default_stream = _returns(_InOrder())
    cuda.set_stream = _nothing()
    cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.record_stream = _nothing()  # type: ignore[method-assign]


def _keeping_rng(build: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Keep the CPU's generator, which is the model's here, unchanged by the seed of a loader."""
    state = torch.get_rng_state()
    try:
        return build(*args, **kwargs)
    finally:
        torch.set_rng_state(state)


def _marked_norm(
    build: Callable[..., Any],
    cls: type,
    config: Any,
    *args: object,
    **kwargs: object,
) -> object:
    """Build upstream's torch norm, which refuses sequence parallelism, and mark its weights."""
    parallel, config.sequence_parallel = config.sequence_parallel, False
    try:
        norm = build(cls, config, *args, **kwargs)
    finally:
        config.sequence_parallel = parallel
    for parameter in norm.parameters():
        parameter.sequence_parallel = parallel
    return norm
