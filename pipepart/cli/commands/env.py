"""``pipepart env``: print the versions and devices that a bug report needs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import typer

_PACKAGES = (
    "pipepart",
    "torch",
    "networkx",
    "numpy",
    "scipy",
    "pydantic",
    "transformers",
    "accelerate",
    "peft",
)


def env_command() -> None:
    """Print versions, cores and accelerators of this machine, for a bug report."""
    for name, value in _environment():
        typer.echo(f"{name:13}{value}")


def _environment() -> Iterator[tuple[str, str]]:
    import torch

    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    yield "CUDA", torch.version.cuda or torch.version.hip or "none in this build of torch"
    yield "CPU cores", f"{os.cpu_count()}, {torch.get_num_threads()} threads for an operation"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator else 0
    yield "accelerators", f"{count} × {accelerator.type}" if accelerator else "none"
    if accelerator and accelerator.type == "cuda":
        for index in range(count):
            properties = torch.cuda.get_device_properties(index)
            yield f"  cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
