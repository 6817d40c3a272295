"""torch.compile for the pieces of a block that lie between collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch

Args = ParamSpec("Args")
R = TypeVar("R")


def compiled(function: Callable[Args, R]) -> Callable[Args, R]:
    """The function as one graph, compiled when it is first called.

    Only where gradients are wanted: training has few shapes, while evaluation and generation have many. Methods of
    equal layers share what is compiled, because parameters are inputs of the graph.
    """
    graph = cast(Callable[Args, R], torch.compile(function, fullgraph=True, dynamic=False))

    @wraps(function)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> R:
        return (graph if torch.is_grad_enabled() else function)(*args, **kwargs)

    return run
