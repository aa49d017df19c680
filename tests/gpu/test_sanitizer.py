"""On a GPU torch's own sanitizer finds no kernel that another stream does not wait for, and finds waits left out."""

import subprocess
import sys

import pytest

LEFT_OUT = ["STEP_BEHIND_CALLER", "CALLER_BEHIND_STEP", "COMPUTE_BEHIND_COPY"]


def sanitized(*wait: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.sanitized", *wait], capture_output=True, text=True, timeout=100
    )


def test_all_schedules_pass():
    ended = sanitized()
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout.split()[-1]) > 10_000


@pytest.mark.parametrize("wait", LEFT_OUT)
def test_a_wait_that_is_left_out_is_found(wait):
    ended = sanitized(wait)
    assert ended.returncode == 1
    assert "CUDASanitizerErrors" in ended.stderr, ended.stderr[-2000:]
