"""``torch.vdev``: what torch looks for in the module of an accelerator."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

_Device = torch.device | str | int | None


_shown = True  # whether torch finds the devices when it asks what accelerator there is


def install(backend: ModuleType) -> None:
    """Names the backend ``vdev`` and gives torch its module."""
    backend_registration.rename_privateuse1_backend("vdev")
    torch._register_device_module("vdev", _module(backend))
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)


def show(shown: bool) -> None:
    """Sets whether ``torch.accelerator`` and ``torch.vdev`` say that the devices are there."""
    global _shown
    _shown = shown


def _index(device: _Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _OnDevice:
    """Makes a device the current one, as ``with torch.cuda.device(...)`` does."""

    def __init__(self, device: _Device) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _module(backend: ModuleType) -> ModuleType:
    module: Any = ModuleType("torch.vdev", "Virtual devices in the memory of the CPU.")
    generators = tuple(backend.default_generator(index) for index in range(backend.device_count()))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
        generators[_index(device)].set_state(state)

    module.default_generators = generators
    module.is_available = lambda: _shown
    module.is_initialized = lambda: True
    module._initialized = True  # so that torch.utils.checkpoint keeps the state of the generators
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: len(generators) if _shown else 0
    module.current_device = backend.current_device
    module.set_device = lambda device: backend.set_device(_index(device))
    module.device = _OnDevice
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.set_stream = torch.accelerator.set_stream
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    module.manual_seed = lambda seed: generators[backend.current_device()].manual_seed(int(seed))
    module.manual_seed_all = manual_seed_all
    module.initial_seed = lambda: generators[backend.current_device()].initial_seed()
    module.get_rng_state = lambda device=None: generators[_index(device)].get_state()
    module.set_rng_state = set_rng_state
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
