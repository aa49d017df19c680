"""``deferred_init``: constructs a model without memory for it, and logs how its values come about."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as registration
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .faked_device import FakedDevice
from .log import Log
from .recorder import Recorder
from .seal import seal


@contextmanager
def deferred_init() -> Iterator[None]:
    """Construct a model without memory; ``Pipeline`` computes each stage's values on its device.

    ::

        with pipepart.deferred_init():
            model = Net(config)
        pipe = pipepart.Pipeline(model, plan, loss_fn=loss_fn)

    All tensors of the block are on the meta device. Their operations are logged, and replayed when a pipeline is made:
    with the values, bit for bit, of a construction on the CPU that starts from the same random states. What belongs to
    the initial values belongs into the block: ``model.apply(init)``, ``model.to(torch.bfloat16)``, tied weights.

    Values that the constructor reads, as by ``item()``, are computed. Draws of numpy and ``random`` are made. The
    generators of torch are after the block in the states of before: seed again for what follows, if a run is to
    repeat a plain one. Tensors from outside of the block stay as they are.

    Raises:
        CaptureError: an operation cannot be deferred, as on another device than the CPU.
    """
    if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
        yield  # within another block, which logs
        return
    modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def seen(module: nn.Module, name: str, value: Any) -> None:
        modules.add(module)
        if isinstance(value, nn.Module):
            modules.add(value)

    log = Log()
    recorder = Recorder(log)
    with ExitStack() as stack:
        for register in (
            registration.register_module_parameter_registration_hook,
            registration.register_module_buffer_registration_hook,
            registration.register_module_module_registration_hook,
        ):
            stack.callback(register(seen).remove)
        stack.callback(recorder.generators.restore)
        stack.enter_context(FakedDevice(recorder))
        stack.enter_context(recorder)
        yield
    seal(modules)
