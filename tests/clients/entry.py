"""Calls a case in another process, so that the libraries are imported there only."""

from __future__ import annotations

import importlib
from typing import Any


def call(case: str, *args: Any) -> Any:
    return getattr(importlib.import_module("clients.cases"), case)(*args)
