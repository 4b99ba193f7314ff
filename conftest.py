"""Doctests of the package are collected from ``src``, where some files need what not every machine has."""

import importlib.util

NEEDS = {"src/lather/kernels": "triton", "src/lather/integrations": "transformers"}

collect_ignore = [path for path, library in NEEDS.items() if importlib.util.find_spec(library) is None]
