"""Loads a checkpoint into a model with any cut. All checks come first, so that an error changes nothing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..input_error import InputError
from ..tensor_file import TensorFile
from ..units import listed
from . import directories
from .arguments import check_model, checked_folder, optimizers_of
from .manifest import MANIFEST, CheckpointError, Manifest
from .model_state import Model, SavedModel, module_of
from .optimizer_state import SavedOptimizers, named_groups
from .own_state import SavedOwn
from .peers import Peers
from .sharded import copy_settings, of_this_rank


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        path: the directory of the checkpoint.
        step: its number.
        data: the data position that this rank has saved; that of rank 0 if there are more or fewer ranks now.
    """

    path: Path
    step: int
    data: Any


def load(
    folder: str | PathLike[str],
    pipe: Model,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    random: bool = True,
) -> Loaded:
    """Load the newest undamaged checkpoint of a folder, or the checkpoint in a directory ``folder/step-N``.

    The layout may be another than that which was saved: another cut, schedule or number of ranks, or no pipeline.
    Damaged checkpoints are passed over with a warning. Under ``torchrun`` every rank calls this.

    Args:
        folder: of checkpoints, or of one.
        pipe: a pipeline, or a module.
        optimizer: the optimizer over its parameters, or a list of them. None leaves optimizers as they are, with a
            warning if the model is in training mode and state of an optimizer was saved. Optimizers of stages are
            loaded without.
        scheduler: a learning-rate scheduler, or a list of them.
        scaler: a ``torch.amp.GradScaler``.
        random: set the random generators of Python, numpy and torch as they were. With another number of ranks, each
            gets those of rank 0.

    Returns:
        The step, the data position and the path of what was loaded.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: there are, and none is sound; names the files that are missing, cut off or changed.
        TypeError: an argument is of another type.
        ValueError: the checkpoint is one of another model, optimizer or scheduler. Nothing is changed.
        RuntimeError: it failed on another rank.
    """
    check_model(pipe)
    peers = Peers.of(pipe, f"load({str(folder)!r}, {random=})")
    path, manifest = _chosen(peers, checked_folder(folder))
    request = peers.agree(lambda: _Request(path, manifest, peers, pipe, optimizer, scheduler, scaler))
    optimized = {name for names in peers.gather(request.optimized) for name in names}
    peers.agree(lambda: request.check(optimized))
    if request.leaves_optimizer(optimized):
        warnings.warn(
            f"{str(path)!r} has the state of an optimizer, which is not loaded: to go on with the training, pass load "
            "the optimizer. To load the model alone, call eval() before",
            stacklevel=2,
        )
    peers.agree(lambda: request.load(random))
    return Loaded(path, manifest.step, request.own.data)


class _Request:
    """The arguments of one rank's :func:`load`, and the files of the checkpoint.

    Attributes:
        own: what belongs to the process.
        optimized: the names of the parameters whose optimizer state this rank loads.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        peers: Peers,
        pipe: Model,
        optimizer: Any,
        scheduler: Any,
        scaler: Any,
    ) -> None:
        self._pipe = pipe
        self._given = optimizers_of(pipe, optimizer)
        self._optimizers = [of_this_rank(pipe, each) for each in self._given]
        self._names = {parameter: name for name, parameter in pipe.named_parameters()}
        every = [_json(path, f"rank-{rank}.json") for rank in range(manifest.ranks)]
        self.own = SavedOwn(
            [every[peers.rank if peers.size == manifest.ranks else 0], *every], scheduler, scaler
        )
        self._model = SavedModel(
            [TensorFile(path / name) for name in manifest.files if _is_shard(name)], manifest.tied
        )
        self._saved = SavedOptimizers(
            [
                (_json(path, name), TensorFile(path / name.replace(".json", ".safetensors")))
                for name in manifest.files
                if name.startswith("optimizer-") and name.endswith(".json")
            ]
        )
        groups = [group for each in self._optimizers for group in named_groups(each, self._names)]
        self.optimized = [name for group in groups for name in group]

    def check(self, optimized: Collection[str]) -> None:
        """Check that everything fits, without changes. ``optimized``: of all ranks."""
        self._model.check(self._pipe)
        self._saved.check(self._optimizers, self._names)
        if left := [name for name in self._saved.names if optimized and name not in optimized]:
            raise InputError(f"the optimizer lacks parameters whose state was saved: {listed(left)}")
        self.own.check()

    def leaves_optimizer(self, optimized: Collection[str]) -> bool:
        """Return True if no rank loads the saved optimizer state although the model is in training mode."""
        return module_of(self._pipe).training and bool(self._saved.names) and not optimized

    def load(self, random: bool) -> None:
        """Load everything, after :meth:`check`."""
        self._model.load(self._pipe)
        for theirs, optimizer in zip(self._given, self._optimizers, strict=True):
            self._saved.load(optimizer, self._names)
            copy_settings(optimizer, theirs)
        self.own.load(random)


def _chosen(peers: Peers, folder: Path) -> tuple[Path, Manifest]:
    """Return the checkpoint to load. Every rank verifies a part of the files."""
    passed: list[str] = []
    for name in peers.gather([str(path) for path in _candidates(folder)])[0]:
        path = Path(name)
        manifest, damage = peers.agree(lambda path=path: _verified(peers, path))
        damages = [each for each in peers.gather(damage) if each is not None]
        if manifest is not None and not damages:
            if passed:
                warnings.warn(
                    f"{name!r} is loaded, as what is newer is damaged: {'; '.join(passed)}", stacklevel=3
                )
            return path, manifest
        passed.append(damages[0])
    if passed:
        raise CheckpointError("; ".join(passed))
    raise FileNotFoundError(f"there is no checkpoint in {str(folder)!r}")


def _candidates(folder: Path) -> list[Path]:
    """Return the checkpoints that may be loaded, the newest first."""
    if folder.is_symlink():  # such as latest
        folder = folder.resolve()
    if (folder / MANIFEST).exists() or (directories.step_of(folder) is not None and folder.is_dir()):
        return [folder]
    return [path for _, path in directories.steps_in(folder)]


def _verified(peers: Peers, path: Path) -> tuple[Manifest | None, str | None]:
    """Return the manifest, and what is wrong with it or with this rank's part of the files."""
    try:
        manifest = Manifest.read(path)
        manifest.check(path, list(manifest.files)[peers.rank :: peers.size])
    except CheckpointError as error:
        return None, str(error)
    return manifest, None


def _is_shard(name: str) -> bool:
    return name.startswith("model-") and name.endswith(".safetensors")


def _json(path: Path, name: str) -> Any:
    return json.loads((path / name).read_bytes())
