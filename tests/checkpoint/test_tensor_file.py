"""Files of a checkpoint: tensors as the safetensors package has them, and values as JSON with their types."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pipepart
from pipepart.checkpoint.json_values import decode, encode
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


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = (
    st.text() | st.integers() | st.sampled_from(["$tuple", "$dict", "$bytes", ""]) | st.tuples(st.integers())
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
)


def types(value: Any) -> Any:
    """The value with the type of each part, as 1 == 1.0 == True."""
    if isinstance(value, dict):
        return type(value), [(types(key), types(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types(one) for one in value]
    return type(value), repr(value)


@settings(max_examples=10)
@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    assert types(decode(json.loads(json.dumps(encode(value, "value"))))) == types(value)


def test_numbers_of_numpy_and_ordered_dicts_become_plain_and_small_tensors_come_back() -> None:
    given = OrderedDict(a=np.float64(0.1), b=np.int32(3), c=np.bool_(True), d=float("inf"))
    found = decode(json.loads(json.dumps(encode(given, "value"))))
    assert types(found) == types({"a": 0.1, "b": 3, "c": True, "d": float("inf")})
    for one in (torch.tensor(0.1), torch.arange(6).view(2, 3).T, torch.ones(0, 2, dtype=torch.bfloat16)):
        (found,) = decode(json.loads(json.dumps(encode([one], "value"))))
        assert (found.dtype, found.shape) == (one.dtype, one.shape)
        assert found.equal(one)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"lr_lambdas": [len]}, r"value\['lr_lambdas'\]\[0\] is a builtin_function_or_method"),
        ({"a": (1, {2})}, r"value\['a'\]\[1\] is a set"),
        ({"best": torch.ones(1).to_sparse()}, r"value\['best'\] is sparse"),
        ([np.float32(1)], r"value\[0\] is a float32"),
        ({object(): 1}, "value is a object"),
    ],
)
def test_the_place_of_what_json_cannot_hold_is_named(value: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        encode(value, "value")
