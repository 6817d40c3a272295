"""Teaches transformers' Auto classes the model of `boost export`, so that they need no code from its directory.

`import boost` calls `announce`, which imports nothing. Our classes are built on transformers' LLaMA, and transformers'
table of configurations may be imported in the middle of that. So the table gets a stand-in, and the classes come when a
model is loaded.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODEL_TYPE = "boost"
TABLE = "transformers.models.auto.configuration_auto"
log = logging.getLogger(__name__)


def announce() -> None:
    """Enters the stand-in now if transformers has its table, else as soon as it has."""
    if TABLE in sys.modules:
        _enter(sys.modules[TABLE])
    elif not any(isinstance(finder, _AfterTable) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTable())


class StandIn:
    """What the table holds for `BoostConfig` until it is asked for one; it makes those and none of its own."""

    model_type = MODEL_TYPE

    def __new__(cls, *arguments: Any, **fields: Any) -> Any:
        return _registered()(*arguments, **fields)

    @classmethod
    def from_dict(cls, fields: dict[str, Any], **options: Any) -> Any:
        return _registered().from_dict(fields, **options)

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        return _registered().from_pretrained(*arguments, **options)


def _registered() -> Any:
    """`BoostConfig`, which takes the stand-in's place."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from boost.interop.modeling_boost import BoostConfig, BoostForCausalLM

    AutoConfig.register(MODEL_TYPE, BoostConfig, exist_ok=True)
    AutoModelForCausalLM.register(BoostConfig, BoostForCausalLM, exist_ok=True)
    return BoostConfig


class _AfterTable(MetaPathFinder):
    """Finds the table where it is; whoever runs it enters the stand-in too."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TABLE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_enter(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _enter(module)

        spec.loader.exec_module = run_and_enter  # type: ignore[method-assign]
        return spec


def _enter(table: ModuleType) -> None:
    """Leaves transformers as it was where the name is taken, or where its table is not what it was."""
    try:
        if MODEL_TYPE not in table.CONFIG_MAPPING:
            table.AutoConfig.register(MODEL_TYPE, StandIn)
    except Exception:
        log.debug("exports need trust_remote_code=True: %s takes no entry", TABLE, exc_info=True)
