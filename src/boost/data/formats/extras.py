"""Packages that only some inputs or commands need, imported when such a one is met."""

from __future__ import annotations

import importlib
from typing import Any

from boost.errors import UserError


def optional_import(package: str, extra: str, where: str) -> Any:
    """Imports `package`, or raises a UserError that says which extra of boost-llm brings it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            where,
            f"this needs the package {package.partition('.')[0]}: {error}",
            hint=f"pip install 'boost-llm[{extra}]'",
        ) from error
