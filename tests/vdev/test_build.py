"""The backend is built where it can be, once, and after a build that was killed."""

from pathlib import Path

import pytest
from torch.utils import cpp_extension

from tests.vdev import build
from tests.vdev import devices as vdev


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setenv("CXX", "no-such-compiler")
        patched.setattr(vdev, "_backend", None)
        assert "install g++ or clang++" in vdev.reason_unavailable()
        with pytest.raises(
            RuntimeError, match="not available: there is no C\\+\\+ compiler 'no-such-compiler'"
        ):
            vdev.load()


def test_the_mark_of_a_killed_build_stops_no_later_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    names = []

    def load(name: str, sources: list[str], **_: object) -> object:
        folder = Path(cpp_extension._get_build_directory(name, verbose=False))
        assert not (folder / "lock").exists()
        assert {Path(source).suffix for source in sources} == {".cpp"}
        (folder / "lock").touch()  # and then it is killed
        names.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(cpp_extension, "load", load)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            build.built()
    assert len(set(names)) == 1
