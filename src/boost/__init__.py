"""BOOST: pre-training of low-rank-bottleneck language models on many devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from boost.interop.auto_classes import announce

__version__ = "0.1.0"
__all__ = ["TrainConfig", "__version__", "load_model", "train"]

if TYPE_CHECKING:
    from boost.config import TrainConfig
    from boost.inference.load import load_model
    from boost.launch import train


def __getattr__(name: str) -> Any:
    """The public names, imported on first use so that `import boost` stays light."""
    if name == "TrainConfig":
        from boost.config import TrainConfig

        return TrainConfig
    if name == "load_model":
        from boost.inference.load import load_model

        return load_model
    if name == "train":
        from boost.launch import train

        return train
    raise AttributeError(f"module 'boost' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


announce()
