"""Pipeline parallelism: torch's schedules over stages whose receive buffers live no longer than they must.

A rank holds one or two stages. A schedule says in which order it runs the forward and backward passes of its
micro-batches, and torch sends what crosses from stage to stage. The zero-bubble schedules run the weights' gradients
apart from the inputs': those are what a `HeldWeightGrads` queue took in the backward pass, so no operation, and no
collective, is ever repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from boost.parallel.bubble import Trace
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTIPLE = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Pipeline:
    """Runs the micro-batches of a step through this rank's stages and those of the other ranks.

    Args:
        schedule: a value of `parallel.pipeline_schedule`.
        modules: by index, this rank's stages. Each is called with what enters it, one micro-batch [T, d], and
            `samples`, an int64 tensor with an element per sequence; the first with token ids [batch, sequence].
        stages: how many there are over all ranks.
        micro_batches: per step.
        pp: the ranks.
        ids: like a micro-batch's token ids, int64 [batch, sequence], on any device.
        boundary: like what crosses from stage to stage, [T, d].
        device: of the stages.
        loss: from the last stage's output and the micro-batch's labels to a scalar; gradients are only ever summed.
        queue: that the stages put weight gradients into; with a zero-bubble schedule one that holds them.
        before_backward: called with a stage's module, and whether its backward pass that begins is the step's last.
        after_weight_grads: called with a stage's module after the weights' gradients that `queue` held of one backward
            pass, and whether these are the step's last.
    """

    def __init__(
        self,
        schedule: str,
        modules: Mapping[int, nn.Module],
        stages: int,
        micro_batches: int,
        pp: Group,
        ids: Tensor,
        boundary: Tensor,
        device: torch.device,
        loss: Callable[[Tensor, Tensor], Tensor],
        queue: WeightGradQueue | None = None,
        before_backward: Callable[[nn.Module, bool], None] = lambda module, last: None,
        after_weight_grads: Callable[[nn.Module, bool], None] = lambda module, last: None,
    ) -> None:
        self.name, self.pp, self.stages, self.micro_batches = schedule, pp, stages, micro_batches
        self.holds_first, self.holds_last = 0 in modules, stages - 1 in modules
        self.trace = Trace(device)
        # A failing stage is reported by the error itself; torch would add the whole schedule to it.
        logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
        if device.type == "cuda":
            # NCCL wants a group's first operation to be one of all its ranks.
            dist.all_reduce(torch.zeros(1, device=device), group=pp.process_group)
        self._stages: list[Any] = [
            _Stage(
                module,
                index,
                stages,
                ids,
                boundary,
                device,
                pp,
                queue,
                lambda module, count: before_backward(module, count == micro_batches),
                lambda module, count: after_weight_grads(module, count == micro_batches),
                self.trace,
            )
            for index, module in modules.items()
        ]

        def traced_loss(output: Tensor, labels: Tensor) -> Tensor:
            with self.trace.computing():
                return loss(output, labels)

        options: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": traced_loss, "scale_grads": False}
        self.schedule = (
            SINGLE[schedule](self._stages[0], **options)
            if schedule in SINGLE
            else MULTIPLE[schedule](self._stages, **options)
        )

    def communicate_over(self, pp: Group) -> None:
        """From here on stages send and receive in another group of the same ranks."""
        self.pp = pp
        for stage in self._stages:
            stage.group = pp.process_group

    def train(self, inputs: Tensor, labels: Tensor, samples: Tensor) -> list[Tensor]:
        """Forward and backward of every micro-batch.

        Args:
            inputs, labels: int64 [micro_batches * batch, sequence]; used on the ranks of the first and last stage.
            samples: int64 [micro_batches * batch], on the host.

        Returns:
            The loss of every micro-batch on the rank of the last stage, elsewhere nothing.
        """
        return self._run(self.schedule.step, inputs, labels, samples)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor, samples: Tensor) -> list[Tensor]:
        """As `train`, forward only."""
        return self._run(self.schedule.eval, inputs, labels, samples)

    def _run(self, step: Callable[..., Any], inputs: Tensor, labels: Tensor, samples: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        arguments = (inputs,) if self.holds_first else ()
        try:
            with self.trace.step():
                step(*arguments, target=labels, losses=losses, return_outputs=False, samples=samples)
        except RuntimeError as error:
            # torch puts a description of the arguments in front of what a stage raised.
            raise error.__cause__ or error from None
        return [loss.detach() for loss in losses]


class _Stage(PipelineStage):
    """A stage that receives into fresh tensors and forgets them.

    torch's own holds two buffers for every micro-batch of the step from start to end, and in evaluation all inputs and
    outputs as well, so its memory grows with the number of micro-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        ids: Tensor,
        boundary: Tensor,
        device: torch.device,
        pp: Group,
        queue: WeightGradQueue | None,
        before_backward: Callable[[nn.Module, int], None],
        after_weight_grads: Callable[[nn.Module, int], None],
        trace: Trace,
    ) -> None:
        # Given the shapes, torch does not run a forward pass to learn them. Nobody reads that of the last output.
        example = torch.empty_like(boundary, device="meta", requires_grad=True)
        super().__init__(
            module,
            index,
            stages,
            device,
            input_args=ids if index == 0 else example,
            output_args=example,
            group=pp.process_group,
            dw_builder=None if queue is None else lambda: self._weight_grads(queue.take()),
        )
        self._like, self._before_backward, self._after_weight_grads = example, before_backward, after_weight_grads
        self._backwards = self._weight_passes = 0
        self._trace = trace

    def _weight_grads(self, compute: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            compute()
            self._weight_passes += 1
            self._after_weight_grads(self.submod, self._weight_passes)

        return run

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._backwards = self._weight_passes = 0

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._prepare_forward_infra(*args, **kwargs)
        for chunk in self.args_recv_info:
            self._forget_input(chunk)
        return out

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._prepare_backward_infra(*args, **kwargs)
        for chunk in self.grad_recv_info:
            self._forget_gradient(chunk)
        return out

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            fresh = torch.empty_like(self._like, device=self.device, requires_grad=self.has_backward)
            self.args_recv_info[fwd_chunk_id][0].buffer = fresh
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self.grad_recv_info[bwd_chunk_id][0].buffer = torch.empty_like(self._like, device=self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._trace.computing():
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            self._forget_input(fwd_chunk_id)
            output, _ = self.fwd_cache[fwd_chunk_id]
            self.fwd_cache[fwd_chunk_id] = (() if self.is_last else output, [])
        return out

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            self.fwd_cache[fwd_chunk_id] = ((), [])
        return ops

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        if self.has_backward:
            self._backwards += 1
            self._before_backward(self.submod, self._backwards)
        with self._trace.computing():
            super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if not self.has_backward:
            return
        self._forget_input(bwd_chunk_id)
        self._forget_gradient(bwd_chunk_id)
        if loss is not None:
            # The schedule keeps all losses, each with its graph, and that would keep the stage's input.
            loss.detach_()

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._trace.computing():
            super().backward_weight_one_chunk(*args, **kwargs)

    # Between two stages of one rank torch hands gradients over even in evaluation, where there are none.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _forget_input(self, chunk: int) -> None:
        if not self.is_first:
            self.args_recv_info[chunk][0].buffer = None

    def _forget_gradient(self, chunk: int) -> None:
        if not self.is_last:
            self.grad_recv_info[chunk][0].buffer = None
