"""Compiles the backend at its first use on a machine, and loads it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import cast

import torch
from torch.utils import cpp_extension

_SOURCES = Path(__file__).parent / "native"
_BACKEND = "vdev"
_FLAGS = ["-O1", "-g0", "-DNDEBUG"]  # as torch itself: headers have other members without


def reason_unavailable() -> str:
    """Why the devices cannot be built or loaded here; "" where they can."""
    if os.name != "posix":
        return "virtual devices are built on POSIX systems only"
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", _BACKEND):
        return f"the backend {name!r} holds torch's one place for a backend from outside already"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r}: install g++ or clang++, or set CXX"
    with _scripts_on_path():
        if not cpp_extension.is_ninja_available():
            return "there is no ninja: pip install ninja"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"there are no headers of Python ({header}): install python3-dev"
    return ""


def built() -> ModuleType:
    """The backend as a module of Python, compiled unless torch's cache of extensions has all of it."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(path.read_bytes())
    version = torch.__version__.replace(".", "_").replace("+", "_")
    name = f"pipepart_vdev_{version}_{digest.hexdigest()[:12]}"
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    with _alone(folder), _scripts_on_path():
        whole = folder / "whole"
        if whole.exists():  # ninja would compile anew for each place that torch is installed in
            return cast(ModuleType, cpp_extension._import_module_from_library(name, str(folder), True))
        # Of a copy that all clones share: a path or a date of its own would have each clone compile anew.
        sources = folder / "sources"
        if not sources.exists():
            shutil.copytree(_SOURCES, folder / "copying", dirs_exist_ok=True)
            (folder / "copying").rename(sources)
        backend = cpp_extension.load(name, [str(sources / "all.cpp")], extra_cflags=_FLAGS)
        whole.touch()
    return cast(ModuleType, backend)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time build in ``folder``.

    Torch marks a build by a file that outlives a killed process, and later ones wait for ever. This lock goes with its
    process, so a mark that is found under it is a dead one's.
    """
    import fcntl  # on POSIX systems only

    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def _scripts_on_path() -> Iterator[None]:
    """Finds the ninja of this environment, which need not be an activated one."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before
