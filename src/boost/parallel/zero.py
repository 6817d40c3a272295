"""ZeRO on torch's FSDP2: data-parallel ranks share what they would otherwise repeat.

Stage 1 shares master weights and optimiser state, stage 2 gradients too, stage 3 also the weights between their uses.
FSDP2 sees the dp ranks alone: it divides the rows of plain tensors, which are already this tp rank's share, and
`boost.parallel.sharding` says which rows of which canonical tensors a rank holds. Gradients are summed, never
divided: the loss is already divided by the global number of tokens.

Rajbhandari et al., arXiv 1910.02054; Zhao et al., arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from boost.parallel.mesh import Mesh
from boost.parallel.overlap import WeightGradQueue

if TYPE_CHECKING:  # imported where it is needed: it takes a second
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


def shard(
    model: nn.Module,
    units: Iterable[nn.Module],
    mesh: Mesh,
    stage: int,
    *,
    dtype: torch.dtype,
    entry: str,
    queue: WeightGradQueue | None = None,
) -> None:
    """Divides the rows of all parameters over `mesh.shards`, in place, and allocates the shares, empty.

    Args:
        model: with parameters of one type, best on the meta device.
        units: its modules that gather their weights and reduce their gradients as one; the rest is one unit too.
        stage: 1, 2 or 3.
        dtype: of activations; bf16 weights are gathered in bf16, and their gradients summed in fp32.
        entry: the method that runs the model.
        queue: takes the units' put-off weight gradients.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mixed = {"param_dtype": dtype, "reduce_dtype": torch.float32} if dtype == torch.bfloat16 else {}
    options: dict[str, Any] = {
        "mesh": _device_mesh(mesh),
        "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False, **mixed),
    }
    for unit in units:
        fully_shard(unit, reshard_after_forward=stage == 3, **options)
        if queue is not None:
            # After torch's own hook, so that in backward it comes before: what it reduces must be complete.
            unit.register_forward_pre_hook(_FlushBefore(queue))
    # Backward begins with the weights that forward ended with.
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, entry)
    model.to_empty(device=mesh.device)


def begin_micro_batch(model: nn.Module, stage: int, *, last: bool, apart: bool = False) -> None:
    """Says what the next backward communicates and frees.

    Weights are gathered once per step, or with stage 3 for every use. Gradients are reduced after the last
    micro-batch, or from stage 2 on, where no rank keeps all of them, after each; between replicas only once.

    Args:
        apart: the gradients of weights come after this backward, which reduces nothing; `end_micro_batch` then does.
            Not with stage 3: they may need weights that it has freed.
    """
    sharded = cast("FSDPModule", model)
    sharded.set_requires_gradient_sync(not apart and (last or stage > 1))
    if not last:
        sharded.set_requires_all_reduce(False)
    sharded.set_reshard_after_backward(stage == 3 or (last and not apart))


def end_micro_batch(model: nn.Module, stage: int, *, last: bool) -> None:
    """Does what a backward begun with `apart` left to do, once all gradients are there.

    `last` says whether no other micro-batch is under way.
    """
    # As torch's own pipelines do it: what FSDP2 does at the end of a backward, done by hand. First without a reduction:
    # that widens the new gradients, as the backward has those of other parameters, and one reduction takes one type.
    end_of_backward = cast("FSDPModule", model)._get_fsdp_state()._root_post_backward_final_callback
    begin_micro_batch(model, stage, last=last, apart=True)
    end_of_backward()
    begin_micro_batch(model, stage, last=last)
    end_of_backward()


def gather(units: Iterable[nn.Module]) -> None:
    """Gathers the weights of units whose `forward` will be passed by; nothing where they are not sharded."""
    for unit in units:
        if hasattr(unit, "unshard"):
            cast("FSDPModule", unit).unshard()


def release(model: nn.Module) -> None:
    """Frees gathered weights that no backward will free; nothing where they are not sharded."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast("FSDPModule", module).reshard()


def _device_mesh(mesh: Mesh) -> DeviceMesh:
    """The dp ranks as torch names them: [shards], or [replicas, shards]."""
    from torch.distributed.device_mesh import DeviceMesh

    kind, shards, replicas = mesh.device.type, mesh.shards.process_group, mesh.replicas.process_group
    assert shards is not None
    if replicas is None:
        return DeviceMesh.from_group(shards, kind, mesh_dim_names=("shards",))
    ranks = torch.tensor(dist.get_process_group_ranks(mesh.dp.process_group)).view(-1, mesh.shards.size)
    return DeviceMesh.from_group([replicas, shards], kind, mesh=ranks, mesh_dim_names=("replicas", "shards"))


class _FlushBefore:
    """A forward pre-hook: in backward, before what precedes it, the queue is flushed."""

    def __init__(self, queue: WeightGradQueue) -> None:
        self.queue = queue

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        return _Flush.apply(x, self.queue), *rest


class _Flush(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, queue: WeightGradQueue) -> Tensor:
        ctx.queue = queue
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.queue.flush()
        return grad, None
