"""Tensor files are compatible with the safetensors package, for reading and writing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import pipepart
from pipepart.checkpoint.writing import write_tensors
from pipepart.tensor_file import TensorFile

FLOATS = ["float16", "bfloat16", "float32", "float64"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {name: torch.randn(3, 5).to(getattr(torch, name)) for name in (*FLOATS, *FLOAT8)}
    found |= {name: torch.randint(0, 100, (7,)).to(getattr(torch, name)) for name in INTEGERS}
    return found | {
        "bool": torch.rand(3) > 0.5,
        "complex64": torch.randn(2, 2, dtype=torch.complex64),
        "conjugated": torch.randn(2, 3, dtype=torch.complex64).conj(),
        "transposed": torch.randn(4, 3).t(),
        "strided": torch.randn(10)[::3],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        'a name of any kind: é " \\': torch.ones(1),
    }


def test_the_package_reads_what_is_written_and_the_same_is_read_here(tmp_path: Path) -> None:
    path, wanted = tmp_path / "t.safetensors", tensors()
    record = write_tensors(path, wanted)
    assert record.bytes == path.stat().st_size
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    theirs, ours = safetensors.torch.load_file(path), TensorFile(path)
    assert theirs.keys() == set(ours.names) == wanted.keys()
    for name, tensor in wanted.items():
        for found in (theirs[name], ours.window(name)):
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape == ours.shape(name)
            # float8 has no comparison of its own
            assert torch.equal(found.contiguous().flatten().view(torch.uint8), bits(tensor)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().flatten().view(torch.uint8)


def test_a_file_whose_tensors_are_not_aligned(tmp_path: Path) -> None:
    header = json.dumps({"one": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (3 - len(header) % 4)
    content = len(header).to_bytes(8, "little") + header + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "odd").write_bytes(content)
    assert torch.equal(TensorFile(tmp_path / "odd").window("one"), torch.tensor([1.5, -2.0]))


def test_files_that_are_cut_off_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "whole", tensors())
    content = (tmp_path / "whole").read_bytes()
    for part in (content[:-1], content[:40], b"", b"PK\x03\x04" + content, content[:8] + b"[" + content[9:]):
        (tmp_path / "part").write_bytes(part)
        with pytest.raises(ValueError, match="part' is not a"):
            TensorFile(tmp_path / "part")


def test_files_are_never_overwritten(tmp_path: Path) -> None:
    write_tensors(tmp_path / "one", {})
    assert TensorFile(tmp_path / "one").names == []
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "one", {})


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, dtype=torch.complex128), "view_as_real"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta device"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path: Path, tensor: Tensor, words: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    module[1].register_buffer("odd", tensor)
    with pytest.raises(TypeError, match=rf"1\.odd.*{words}"):
        pipepart.save(tmp_path / "run", module, step=0)
    assert not (tmp_path / "run").exists()
