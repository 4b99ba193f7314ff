"""The tests of the executor by kernels, as tests/test_kernels.py runs the others."""

from __future__ import annotations

import importlib.util

import pytest
from interpreted import run_interpreted


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which there is for Linux")
def test_the_executor_under_the_interpreter():
    run_interpreted("test_executor.py")
