"""Teaches transformers' Auto classes the model of `boost export`, so that they need no code from its directory.

`import boost` calls `announce`, which imports nothing. Our classes are built on transformers' LLaMA, and transformers'
table of configurations may be imported in the middle of that. So the table gets a stand-in, and the classes come when a
model is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODEL_TYPE = "boost"
TABLE = "transformers.models.auto.configuration_auto"


def announce() -> None:
    """Enters the stand-in now if transformers has its table, else as soon as it has."""
    if TABLE in sys.modules:
        _enter(sys.modules[TABLE])
    elif not any(isinstance(finder, _AfterTable) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTable())


class StandIn:
    """What the table holds for `BoostConfig` until `AutoConfig.from_pretrained` asks for one."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, fields: dict[str, Any], **options: Any) -> Any:
        """`BoostConfig.from_dict`, after registering our classes."""
        from transformers import AutoConfig, AutoModelForCausalLM

        from boost.interop.modeling_boost import BoostConfig, BoostForCausalLM

        AutoConfig.register(MODEL_TYPE, BoostConfig, exist_ok=True)
        AutoModelForCausalLM.register(BoostConfig, BoostForCausalLM, exist_ok=True)
        return BoostConfig.from_dict(fields, **options)


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
            _enter(module)

        spec.loader.exec_module = run_and_enter  # type: ignore[method-assign]
        return spec


def _enter(table: ModuleType) -> None:
    table.AutoConfig.register(MODEL_TYPE, StandIn, exist_ok=True)
