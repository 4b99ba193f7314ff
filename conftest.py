"""Doctests of the package are collected from ``src``, where one file needs a compiler that not every machine has."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["src/lather/kernels"]
