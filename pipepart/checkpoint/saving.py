"""Saves a checkpoint: writes the state into a new directory, and makes it current by a rename.

::

    caller's thread                                     the same thread, or one in the background
    collect and check ─▶ agree on names ─▶ (copy) ────▶ write files ─▶ agree on hashes ─▶ manifest ─▶ rename
    nothing is written if a rank cannot                 every rank its own                rank 0

Every rank writes the tensors of its stages that no lower rank has, the state of their optimizers, and what belongs to
the process.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from ..input_error import InputError
from ..units import is_count
from . import directories
from .arguments import check_model, checked_folder
from .background import Saving, finish
from .contents import Contents
from .durable import write_file
from .manifest import MANIFEST, CheckpointError, FileRecord, Manifest
from .model_state import Model
from .ranks import Peers, agreed, check_alike, peers_of
from .writing import write_tensors

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
    asynchronous: bool = False,
) -> Saving:
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
        asynchronous: copy the tensors to the CPU, and write them on a thread. What goes wrong there is raised by the
            next ``save``, by ``pipe.close()`` or by ``join`` of the result.

    Returns:
        The checkpoint: its ``path``, and ``join()`` to wait until it is complete.

    Raises:
        TypeError: safetensors cannot hold a tensor, or JSON another value, which the message names.
        ValueError: an argument is wrong, an optimizer has parameters that are not the model's, or one is missing on
            some ranks.
        FileExistsError: the folder has a checkpoint of this step or a later one.
        OSError: a file cannot be written.
        RuntimeError: it failed on another rank.
    """
    check_model(pipe)
    peers = peers_of(pipe, "save")
    finish(pipe)
    contents = agreed(peers, lambda: _checked(folder, pipe, optimizer, step, scheduler, scaler, data, keep))
    folder = checked_folder(folder)
    check_alike(peers, folder=str(folder), step=step, keep=keep, asynchronous=asynchronous)
    _check_optimizers(peers, pipe, contents)
    made = agreed(peers, lambda: _begun(folder, step) if peers.rank == 0 else "")
    writing = _Writing(peers, Path(peers.gather(made)[0]), step, keep, _first_of_replicas(peers, contents))
    saving = Saving(folder / f"step-{step}", pipe)
    if asynchronous:
        saving.start(writing.copied().run)
    else:
        writing.run()
    return saving


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
    contents: Contents

    def copied(self) -> _Writing:
        """Return a copy in which all tensors are copied."""
        return self._replace(contents=agreed(self.peers, self.contents.copied))

    def run(self) -> None:
        """Write the files, and make the checkpoint current once every rank has.

        Raises:
            OSError, RuntimeError: as :func:`save` does. The directory is removed.
        """
        try:
            files = agreed(self.peers, self._write)
            told = self.peers.gather(
                {
                    "files": {name: (record.bytes, record.sha256) for name, record in files.items()},
                    "weights": dict.fromkeys(self.contents.model.tensors, self._model_file),
                    "bytes": sum(tensor.nbytes for tensor in self.contents.model.tensors.values()),
                    "tied": self.contents.model.tied,
                    "extra": self.contents.model.extra,
                }
            )
            agreed(self.peers, lambda: self._publish(told) if self.peers.rank == 0 else None)
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
        tensors, optimizer, rank = self.contents.model.tensors, self.contents.optimizer, self.peers.rank
        if not self.made.is_dir():
            raise FileNotFoundError(
                f"rank {rank} does not see {str(self.made)!r}, which rank 0 has made: all ranks need one folder, and "
                "nothing else may save into it"
            )
        found = {self._model_file: write_tensors(self.made / self._model_file, tensors)}
        if optimizer is not None:
            document = {"groups": optimizer.groups, "state": optimizer.state}
            found[f"optimizer-{rank}.json"] = self._write_json(f"optimizer-{rank}.json", document)
            name = f"optimizer-{rank}.safetensors"
            found[name] = write_tensors(self.made / name, optimizer.tensors)
        own = {**self.contents.own, "extra": self.contents.model.extra}
        found[f"rank-{rank}.json"] = self._write_json(f"rank-{rank}.json", own)
        return found

    def _publish(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Write what lists the files of all ranks, and make the checkpoint current."""
        files: dict[str, FileRecord] = {}
        for rank, one in enumerate(told):
            if one["extra"] != told[0]["extra"]:
                raise InputError(
                    f"rank {rank} has other extra state of modules than rank 0, which cannot be saved"
                )
            for name, (size, sha256) in one["files"].items():
                files[name] = FileRecord(bytes=size, sha256=sha256)
        index = {
            "metadata": {"total_size": sum(one["bytes"] for one in told)},
            "weight_map": {tensor: name for one in told for tensor, name in one["weights"].items()},
        }
        files[INDEX] = self._write_json(INDEX, index)
        if self.contents.config is not None:
            files["config.json"] = self._write_json("config.json", self.contents.config)
        tied = {name: first for one in told for name, first in one["tied"].items()}
        manifest = Manifest(step=self.step, ranks=self.peers.size, tied=tied, files=files).sealed()
        write_file(self.made / MANIFEST, [manifest.content()])
        directories.publish(self.made, self.keep)

    def _write_json(self, name: str, value: Any) -> FileRecord:
        return write_file(self.made / name, [json.dumps(value, indent=1).encode()])


def _checked(
    folder: Any, pipe: Any, optimizer: Any, step: Any, scheduler: Any, scaler: Any, data: Any, keep: Any
) -> Contents:
    """Return what this rank saves, once all arguments of :func:`save` are known to be right."""
    checked_folder(folder)
    if not is_count(step, 0):
        raise InputError(f"step must be a whole number from 0 on, got {step!r}")
    if keep is not None and not is_count(keep):
        raise InputError(f"keep must be at least 1 checkpoint, or None for all, got {keep!r}")
    return Contents.of(pipe, optimizer, scheduler, scaler, data)


def _check_optimizers(peers: Peers, pipe: Model, contents: Contents) -> None:
    """Check that all ranks that train something save an optimizer, or none does.

    Raises:
        ValueError: the optimizers of some ranks would be missing from the checkpoint, which no rank could load.
    """
    trains = any(parameter.requires_grad for _, parameter in pipe.named_parameters())
    everyone = peers.gather((contents.optimizer is not None, trains))
    given = [rank for rank, (has, _) in enumerate(everyone) if has]
    missing = [rank for rank, (has, trained) in enumerate(everyone) if trained and not has]
    if given and missing:
        raise InputError(
            f"rank {missing[0]} has no optimizer to save, and rank {given[0]} has one: pass save the optimizer of "
            "each rank; a rank whose parameters are all frozen needs none"
        )


def _first_of_replicas(peers: Peers, contents: Contents) -> Contents:
    """Return the part of the contents that no lower rank has: replicas of a stage have the same."""
    optimized = [] if contents.optimizer is None else contents.optimizer.names
    lower = peers.gather((list(contents.model.tensors), optimized))[: peers.rank]
    return contents.without(
        {name for tensors, _ in lower for name in tensors}, {name for _, names in lower for name in names}
    )


def _begun(folder: Path, step: int) -> str:
    """Return a new temporary directory.

    Raises:
        FileExistsError, ValueError: as :func:`_make_room` does.
        OSError: it cannot be made.
    """
    _make_room(folder, step)
    return str(directories.begin(folder, step))


def _make_room(folder: Path, step: int) -> None:
    """Check that no checkpoint of this step or a later one is there; put damaged ones aside.

    Raises:
        FileExistsError: one is.
        ValueError: the folder is itself a checkpoint, or its ``latest`` is a directory.
    """
    latest = folder / directories.LATEST
    if latest.is_dir() and not latest.is_symlink():
        raise InputError(
            f"{str(latest)!r} is a directory, where a link to the newest checkpoint is made: remove it"
        )
    if (folder / MANIFEST).exists():
        raise InputError(f"{str(folder)!r} is a checkpoint: pass the folder that checkpoints are saved in")
    for other, path in directories.steps_in(folder):
        if other < step:
            return
        try:
            Manifest.read(path).check(path)
        except CheckpointError as error:
            aside = directories.put_aside(path)
            warnings.warn(f"a damaged checkpoint is put aside as {aside.name!r}: {error}", stacklevel=6)
            continue
        raise FileExistsError(
            f"{str(folder)!r} has {path.name!r}, and step={step} is not above it: steps go up within a folder. "
            "To go back, save into another folder, or remove the later checkpoints"
        )
