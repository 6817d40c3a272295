"""A decoder cut into pipeline stages: which layers each has, and this rank's stages as one model.

Under BTP what crosses from stage to stage is this rank's shard of the residual stream, d / tp wide; every tp rank
sends to the tp rank of its own number. Bottlenecks that a next block takes up (`boost.model.crossing`) go with it,
1 / tp of them from each rank. In the other layouts the stream, and what crosses, is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from boost.config import ModelSection, TrainConfig
from boost.model import costs
from boost.model.crossing import boundary_columns
from boost.model.decoder import Decoder
from boost.parallel.bubble import actions, idle_fraction
from boost.parallel.collectives import all_gather, all_reduce, swap
from boost.parallel.mesh import Group, Mesh
from boost.parallel.overlap import HeldWeightGrads, WeightGradQueue
from boost.parallel.sharding import held_rows
from boost.parallel.zero import begin_micro_batch, end_micro_batch, shard


def cut(model: ModelSection, sequence_length: int, stages: int) -> list[range]:
    """The layers of every stage: each layer once, at least one per stage, and the dearest stage as cheap as can be.

    All blocks cost the same; the last stage also has the head.
    """
    if model.layers < stages:
        raise ValueError(f"{model.layers} layers cannot be cut into {stages} stages")
    counts = [1] * stages
    for _ in range(model.layers - stages):
        cost = _costs(model, sequence_length, counts)
        counts[cost.index(min(cost))] += 1
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def held_stages(schedule: str, stages: int, pp: Group) -> list[int]:
    """Which stages this rank has, in order: with `zbv` the n-th from either end, else every pp-th."""
    return [pp.rank, stages - 1 - pp.rank] if schedule == "zbv" else list(range(pp.rank, stages, pp.size))


def _costs(model: ModelSection, sequence_length: int, counts: Sequence[int]) -> list[float]:
    """Forward FLOPs per token of stages with that many layers."""
    block = costs.block_flops_per_token(model, sequence_length)
    return [*(count * block for count in counts[:-1]), counts[-1] * block + costs.head_flops_per_token(model)]


class _Section(nn.Module):
    """A stage as the pipeline calls it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:
        batch = len(samples)
        x = x.reshape(-1) if self.decoder.first else x
        return self.decoder.section(x, batch, len(x) // batch, samples=samples.tolist())


class PipelinedDecoder(nn.Module):
    """This rank's stages of a decoder, joined to the other ranks'.

    Args:
        config: model, batch and schedule.
        mesh: pp of more than one rank.
        build: makes a stage from its layers.
        queue: that the stages put weight gradients into.
    """

    def __init__(
        self, config: TrainConfig, mesh: Mesh, build: Callable[[range], Decoder], queue: WeightGradQueue | None
    ) -> None:
        from boost.parallel.pipeline import Pipeline  # a second of imports, which other runs do without

        super().__init__()
        model, train, parallel = config.model, config.train, config.parallel
        self.pp, self.device = mesh.pp, mesh.device
        self.layers = cut(model, train.sequence_length, config.stages)
        self.costs = _costs(model, train.sequence_length, [len(layers) for layers in self.layers])
        indices = held_stages(parallel.pipeline_schedule, config.stages, mesh.pp)
        self.decoders = cast(Sequence[Decoder], nn.ModuleList(build(self.layers[index]) for index in indices))
        first, last = self.decoders[0], self.decoders[-1]
        # Where both ends of the stack are on one rank, their table is one, unless ZeRO divides it with either stage;
        # else their ranks add up its gradients.
        self._zero = parallel.zero if mesh.shards.size > 1 else 0
        end = 0 if parallel.pipeline_schedule == "zbv" else mesh.pp.size - 1
        self.twin = {0: end, end: 0}.get(mesh.pp.rank) if model.tie_embeddings else None
        if self.twin == mesh.pp.rank and not self._zero:
            last.head, self.twin = first.embedding, None  # type: ignore[assignment]
        width = model.hidden_size // (mesh.tp.size if first.hidden_sharded else 1)
        width += boundary_columns(model, mesh.tp)
        self.pipeline = Pipeline(
            parallel.pipeline_schedule,
            {index: _Section(decoder) for index, decoder in zip(indices, self.decoders, strict=True)},
            config.stages,
            config.micro_batches,
            mesh.pp,
            torch.empty(train.micro_batch_size, train.sequence_length, dtype=torch.int64, device="meta"),
            torch.empty(train.micro_batch_size * train.sequence_length, width, dtype=first.dtype, device="meta"),
            mesh.device,
            lambda h_TD, labels: last.loss_from(h_TD, labels) / self._tokens,
            queue,
            self._before_backward,
            self._after_weight_grads,
        )
        self._queue = queue
        self._tokens = 1
        self._sequences = config.micro_batches * train.micro_batch_size

    def shard(self, mesh: Mesh) -> None:
        """Divides the parameters of every stage over `mesh.shards`."""
        for decoder in self.decoders:
            # The loss comes right after a section, while what the section gathered is still there.
            shard(decoder, decoder.blocks, mesh, self._zero, dtype=decoder.dtype, entry="section", queue=self._queue)

    def _before_backward(self, stage: nn.Module, last: bool) -> None:
        if self._zero:
            apart = isinstance(self._queue, HeldWeightGrads)
            begin_micro_batch(cast(_Section, stage).decoder, self._zero, last=last, apart=apart)

    def _after_weight_grads(self, stage: nn.Module, last: bool) -> None:
        if self._zero and isinstance(self._queue, HeldWeightGrads):
            end_micro_batch(cast(_Section, stage).decoder, self._zero, last=last)

    def forward_backward(self, inputs: Tensor, labels: Tensor, samples: Sequence[int], tokens: int) -> Tensor:
        """Adds the gradients of the summed loss, divided by `tokens`, of all of a step's sequences on this dp rank.

        Args:
            inputs, labels: int64 [sequences, sequence_length], equal on all pp ranks.

        Returns:
            The loss in fp64 on the rank of the last stage, elsewhere 0.
        """
        self._tokens = tokens
        losses = self.pipeline.train(inputs, labels, torch.tensor(samples))
        return self._total(losses)

    def communicate_over(self, pp: Group) -> None:
        """From here on stages meet in another group of the same ranks."""
        self.pp = pp
        self.pipeline.communicate_over(pp)

    def join_twins(self) -> None:
        """Adds up the gradients of a table that the first and the last stage both hold.

        After any sum over dp: the two ends add that up in other orders, and must not end with other gradients.
        """
        if self.twin is None:
            return
        tables = [self.decoders[0].embedding] if self.pipeline.holds_first else []
        tables += [self.decoders[-1].head] if self.pipeline.holds_last else []
        rows, *others = (held_rows(cast(Tensor, table.weight.grad))[0] for table in tables)
        if not rows.numel():
            return
        if others:
            rows += others[0]
            others[0].copy_(rows)
        else:
            rows += swap(rows, self.twin, self.pp)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses in fp64 without gradients, equal on all pp ranks.

        Args:
            inputs, labels: as for `forward_backward`, or fewer sequences.
        """
        self._tokens = 1
        missing = self._sequences - len(inputs)
        inputs = torch.cat([inputs, inputs.new_zeros(missing, inputs.shape[1])])
        labels = torch.cat([labels, labels.new_full((missing, labels.shape[1]), -100)])
        return all_reduce(
            self._total(self.pipeline.evaluate(inputs, labels, torch.zeros(len(inputs), dtype=torch.int64))), self.pp
        )

    def _total(self, losses: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss
        return total

    def idle(self) -> tuple[float, float]:
        """Seconds of the last step's schedule that the pp ranks did not compute, and their share of it, equal on all.

        Both are means over the ranks, of the time that the slowest of them took. A GPU must have been synchronised.
        """
        seconds = torch.tensor(self.pipeline.trace.seconds(), dtype=torch.float64, device=self.device)
        computed, whole = all_gather(seconds, self.pp).unbind(1)
        idle = whole.max() - computed.mean()
        return idle.item(), (idle / whole.max()).item()

    def describe(self) -> str:
        """The cut, and what the schedule leaves idle."""
        idle = idle_fraction(actions(self.pipeline), self.costs)
        layers = ", ".join(str(len(layers)) for layers in self.layers)
        return (
            f"pipeline: {self.pipeline.name}, stages of {layers} layers, "
            f"{self.pipeline.micro_batches} micro-batches, ranks idle {idle:.1%} of a step by its schedule"
        )
