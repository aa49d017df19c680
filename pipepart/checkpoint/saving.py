"""Saves a checkpoint: writes the state into a new directory, and makes it current by a rename.

::

    collect and check ─▶ agree on names ─▶ write files ─▶ agree on hashes ─▶ manifest ─▶ rename
    nothing is written if a rank cannot    every rank its own                rank 0

Every rank writes the tensors of its stages that no lower rank has, the state of their optimizers, and what belongs to
the process.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..dtensors import is_dtensor, whole
from ..input_error import InputError
from ..units import is_count
from . import directories
from .arguments import check_model, checked_folder, optimizers_of
from .manifest import MANIFEST, CheckpointError, FileRecord, Manifest
from .model_state import Model, model_state, module_of
from .optimizer_state import OptimizerState, optimizer_state, stored_name
from .own_state import own_state
from .peers import Peers
from .sharded import of_this_rank
from .writing import write_file, write_tensors

INDEX = "model.safetensors.index.json"


def save(
    folder: str | PathLike[str],
    pipe: Model,
    optimizer: Any = None,
    *,
    step: int,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    keep: int | None = None,
) -> Path:
    """Save a checkpoint as ``folder/step-N``, atomically and without overwriting any file.

    Under ``torchrun`` every rank calls this, with a folder that all of them see.

    Args:
        folder: holds the checkpoints of one training; made if need be.
        pipe: a pipeline, or a module.
        optimizer: the optimizer over its parameters, or a list of them. Optimizers of stages are saved without.
        step: the number of this checkpoint, above those in the folder.
        scheduler: a learning-rate scheduler, or a list of them.
        scaler: a ``torch.amp.GradScaler``.
        data: how far the data were read: numbers, text, small tensors, and lists, tuples and dicts of them.
            ``load`` returns it.
        keep: remove all but so many of the newest checkpoints; None to keep all.

    Returns:
        The directory of the checkpoint.

    Raises:
        TypeError: safetensors cannot hold a tensor, or JSON another value, which the message names.
        ValueError: an argument is wrong, an optimizer has parameters that are not the model's, or one is missing on
            some ranks.
        FileExistsError: the folder has a checkpoint of this step or a later one.
        OSError: a file cannot be written.
        RuntimeError: it failed on another rank.
    """
    check_model(pipe)
    peers = Peers.of(pipe, f"save({str(folder)!r}, {step=}, {keep=})")
    absolute = checked_folder(folder)
    if not is_count(step, 0):
        raise InputError(f"step must be a whole number from 0 on, got {step!r}")
    if keep is not None and not is_count(keep):
        raise InputError(f"keep must be at least 1 checkpoint, or None for all, got {keep!r}")
    contents = peers.agree(lambda: _contents(pipe, optimizer, scheduler, scaler, data))
    trains = any(parameter.requires_grad for _, parameter in pipe.named_parameters())
    contents = _share_out(peers, contents, trains)
    directory = peers.agree(lambda: str(_begin(absolute, step)) if peers.rank == 0 else "")
    _Writing(peers, Path(peers.gather(directory)[0]), step, keep, contents).run()
    return absolute / f"step-{step}"


class _Contents(NamedTuple):
    """The state that one process saves.

    Attributes:
        tensors: of the stages that this process has, by name.
        tied: further names of tensors, each with the name in ``tensors``.
        optimizer: the state of their optimizers; None if there are none.
        own: what belongs to the process: random states, schedulers, scaler, data position. Plain JSON.
        config: the configuration of a model of ``transformers``, plain JSON; None for another.
    """

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str]
    optimizer: OptimizerState | None
    own: Mapping[str, Any]
    config: Mapping[str, Any] | None

    def sharded(self) -> list[str]:
        """Return the names of the tensors of which this process has a shard, in the order of :meth:`whole`."""
        states = self.optimizer.tensors if self.optimizer else {}
        return [
            *(name for name, tensor in self.tensors.items() if is_dtensor(tensor)),
            *(
                stored_name(key, name)
                for name, tensors in states.items()
                for key, tensor in tensors.items()
                if is_dtensor(tensor)
            ),
        ]

    def whole(self, written: Collection[str], optimized: Collection[str]) -> _Contents:
        """Return the contents without shards: all processes with shards of a tensor put it together.

        Args:
            written: names of tensors that are left out.
            optimized: names of parameters whose state is left out.
        """
        tensors, optimizer = _whole(self.tensors, written), self.optimizer
        if optimizer is not None:
            states = {
                name: _whole(state, state if name in optimized else ())
                for name, state in optimizer.tensors.items()
            }
            optimizer = optimizer._replace(tensors=states).without(optimized)
        return self._replace(tensors=tensors, optimizer=optimizer)


def _whole(tensors: Mapping[str, Tensor], left_out: Collection[str] = ()) -> dict[str, Tensor]:
    gathered = {}
    for name, tensor in tensors.items():
        value = whole(tensor.detach()).cpu() if is_dtensor(tensor) else tensor
        if name not in left_out:
            gathered[name] = value
    return gathered


def _contents(pipe: Model, optimizer: Any, scheduler: Any, scaler: Any, data: Any) -> _Contents:
    """Collect and check the state, for arguments of :func:`save`."""
    names = {parameter: name for name, parameter in pipe.named_parameters()}
    optimizers = [of_this_rank(pipe, each) for each in optimizers_of(pipe, optimizer)]
    tensors, tied = model_state(pipe)
    module = module_of(pipe)
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    return _Contents(
        tensors,
        tied,
        optimizer_state(optimizers, names) if optimizers else None,
        own_state(scheduler, scaler, data),
        None if to_json is None else {**json.loads(to_json()), "architectures": [type(module).__name__]},
    )


def _share_out(peers: Peers, contents: _Contents, trains: bool) -> _Contents:
    """Return the part of the contents that no lower rank has: replicas of a stage have the same.

    Args:
        trains: whether this rank has a parameter to train.

    Raises:
        ValueError: the optimizers of some ranks would be missing from the checkpoint, which no rank could load.
    """
    optimizer = contents.optimizer
    shards = contents.sharded()
    everyone = peers.gather((list(contents.tensors), optimizer and optimizer.names, trains, shards))
    ranks = [rank for rank, (_, optimized, *_) in enumerate(everyone) if optimized is not None]
    missing = [
        rank for rank, (_, optimized, trained, _) in enumerate(everyone) if trained and optimized is None
    ]
    if ranks and missing:
        raise InputError(
            f"rank {missing[0]} has no optimizer to save, and rank {ranks[0]} has one: pass save the optimizer of "
            "each rank; a rank whose parameters are all frozen needs none"
        )
    for rank, (_, _, _, others) in enumerate(everyone):
        if others != shards and not set(others).isdisjoint(shards):
            raise InputError(
                f"rank {rank} has shards of the same parameters as rank {peers.rank}, and not the same of "
                "the optimizer's state: make the optimizers of ranks of one stage of the same parameters"
            )
    lower = everyone[: peers.rank]
    written = {name for tensors, *_ in lower for name in tensors}
    optimized = {name for _, names, *_ in lower for name in names or ()}
    return peers.agree(lambda: contents.whole(written, optimized))


class _Writing(NamedTuple):
    """What one rank has to write.

    Attributes:
        made: the temporary directory.
        step, keep: as for :func:`save`.
        contents: those that this rank writes.
    """

    peers: Peers
    made: Path
    step: int
    keep: int | None
    contents: _Contents

    def run(self) -> None:
        """Write the files, and make the checkpoint current once every rank has. After a failure nothing is left."""
        try:
            files = self.peers.agree(self._write)
            told = self.peers.gather(
                {
                    "files": {name: (record.bytes, record.sha256) for name, record in files.items()},
                    "weights": dict.fromkeys(self.contents.tensors, self._model_file),
                    "bytes": sum(tensor.nbytes for tensor in self.contents.tensors.values()),
                    "tied": self.contents.tied,
                }
            )
            self.peers.agree(lambda: self._publish(told) if self.peers.rank == 0 else None)
        except BaseException as error:
            if self.peers.rank == 0:
                if isinstance(error, FileNotFoundError) and not self.made.is_dir():
                    error.add_note(f"{str(self.made)!r} was removed by another program")
                directories.remove(self.made)
            raise

    @property
    def _model_file(self) -> str:
        return f"model-{self.peers.rank + 1:05d}-of-{self.peers.size:05d}.safetensors"

    def _write(self) -> dict[str, FileRecord]:
        """Write the files of this rank; return their sizes and hashes by name."""
        optimizer, rank = self.contents.optimizer, self.peers.rank
        if not self.made.is_dir():
            raise FileNotFoundError(
                f"rank {rank} does not see {str(self.made)!r}, which rank 0 has made: all ranks need one folder, and "
                "nothing else may save into it"
            )
        written = {self._model_file: write_tensors(self.made / self._model_file, self.contents.tensors)}
        if optimizer is not None:
            document = {"groups": optimizer.groups, "state": optimizer.values}
            written[f"optimizer-{rank}.json"] = self._write_json(f"optimizer-{rank}.json", document)
            name = f"optimizer-{rank}.safetensors"
            states = {
                stored_name(key, parameter): tensor
                for parameter, tensors in optimizer.tensors.items()
                for key, tensor in tensors.items()
            }
            written[name] = write_tensors(self.made / name, states)
        written[f"rank-{rank}.json"] = self._write_json(f"rank-{rank}.json", self.contents.own)
        return written

    def _publish(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Write what lists the files of all ranks, and make the checkpoint current."""
        files = {
            name: FileRecord(bytes=size, sha256=sha256)
            for part in told
            for name, (size, sha256) in part["files"].items()
        }
        index = {
            "metadata": {"total_size": sum(part["bytes"] for part in told)},
            "weight_map": {tensor: name for part in told for tensor, name in part["weights"].items()},
        }
        files[INDEX] = self._write_json(INDEX, index)
        if self.contents.config is not None:
            files["config.json"] = self._write_json("config.json", self.contents.config)
        tied = {name: first for part in told for name, first in part["tied"].items()}
        manifest = Manifest(step=self.step, ranks=self.peers.size, tied=tied, files=files).sealed()
        write_file(self.made / MANIFEST, [manifest.content()])
        directories.publish(self.made, self.keep)

    def _write_json(self, name: str, value: Any) -> FileRecord:
        return write_file(self.made / name, [json.dumps(value, indent=1).encode()])


def _begin(folder: Path, step: int) -> Path:
    """Return a new temporary directory. Damaged checkpoints of this step or a later one are put aside."""
    latest = folder / directories.LATEST
    if latest.is_dir() and not latest.is_symlink():
        raise InputError(
            f"{str(latest)!r} is a directory, where a link to the newest checkpoint is made: remove it"
        )
    if (folder / MANIFEST).exists():
        raise InputError(f"{str(folder)!r} is a checkpoint: pass the folder that checkpoints are saved in")
    for other, path in directories.steps_in(folder):
        if other < step:
            break
        try:
            Manifest.read(path).check(path)
        except CheckpointError as error:
            aside = directories.put_aside(path)
            warnings.warn(f"a damaged checkpoint is put aside as {aside.name!r}: {error}", stacklevel=5)
            continue
        raise FileExistsError(
            f"{str(folder)!r} has {path.name!r}, and step={step} is not above it: steps go up within a folder. "
            "To go back, save into another folder, or remove the later checkpoints"
        )
    return directories.begin(folder, step)
