"""The decoder: embedding, blocks, final norm, head. The same code for every layout and for one process.

Under BTP the residual stream is this rank's shard of hidden from the embedding to the last block, and one all-gather
makes it whole for the final norm and the head. The other layouts keep it whole throughout, or, dense ones with
sequence parallelism, sharded over tokens until after the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from boost.config import ModelSection, ParallelSection
from boost.kernels.compiled import compiled
from boost.kernels.norm import rms_norm
from boost.model.blocks.bottleneck import BottleneckBlock, block_stages
from boost.model.blocks.dense import DenseBlock
from boost.model.blocks.relora import ReloraBlock
from boost.model.blocks.sltrain import SLTrainBlock
from boost.model.blocks.vanilla import VanillaBlock
from boost.model.context import Context, KeyValueCache, Recompute
from boost.model.crossing import pack, unpack
from boost.model.embedding import HiddenShardedEmbedding, VocabShardedTable
from boost.model.loss import chunk_tokens, head_loss
from boost.model.norm import Gain
from boost.model.rope import rope_tables
from boost.model.sparse import Supports, drawn, unplaced
from boost.parallel.collectives import gather_last, sum_backward
from boost.parallel.interleave import interleave
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue
from boost.parallel.recompute import call, recompute_block
from boost.parallel.residual import make_stream
from boost.parallel.zero import gather


class Decoder(nn.Module):
    """A LLaMA-like decoder, this rank's share of it.

    Args:
        model: what is computed.
        parallel: how it is laid out over tp (tensor_layout, norm, group_linears, sequence_parallel).
        tp: the tensor-parallel group.
        dtype: of activations and GEMMs.
        master_dtype: of the parameters; fp32 beside bf16 activations.
        recompute: "block" repeats whole blocks in backward, "latent" what lies between bottlenecks.
        queue: takes weight gradients that wait for an all-reduce to hide behind; flush it after every backward.
        compile: compile what lies between collectives. Not with a queue, nor with dropout.
        seed: of dropout masks, and of sparse supports that are not given.
        layers: those that are held, one run of them; default all. The embedding is held with the first layer, the
            final norm and the head with the last.
        supports: of SLTrain's sparse matrices, for example those of a checkpoint.

    Parameters are empty until `boost.parallel.sharding.initialize` or a checkpoint fills them.
    """

    def __init__(
        self,
        model: ModelSection,
        parallel: ParallelSection | None = None,
        tp: Group | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        master_dtype: torch.dtype | None = None,
        recompute: Recompute = "none",
        queue: WeightGradQueue | None = None,
        compile: bool = False,
        seed: int = 0,
        layers: range | None = None,
        supports: Supports | None = None,
    ) -> None:
        super().__init__()
        parallel, tp = parallel or ParallelSection(), tp or Group()
        master = master_dtype or (torch.float32 if dtype == torch.bfloat16 else dtype)
        self.model, self.tp, self.dtype, self.seed = model, tp, dtype, seed
        self.recompute, self.queue, self.compiled = recompute, queue, compile
        self.split_batch = parallel.overlap == "split_batch" and tp.size > 1
        self.hidden_sharded = model.linear in ("low_rank", "sltrain") and parallel.tensor_layout == "btp"
        self.crossing = model.crossing != "none"
        assert not self.crossing or (self.hidden_sharded and not self.split_batch), "refused by the configuration"
        assert model.linear != "sltrain" or (self.hidden_sharded and not self.split_batch), (
            "refused by the configuration"
        )
        kinds: dict[str, Any] = {
            "dense": DenseBlock,
            "low_rank": BottleneckBlock if self.hidden_sharded else VanillaBlock,
            "relora": ReloraBlock,
            "sltrain": partial(SLTrainBlock, supports=supports or drawn(model, seed)),
        }
        kind = kinds[model.linear]

        self.stream = make_stream(parallel.sequence_parallel, tp)
        layers = range(model.layers) if layers is None else layers
        self.first, self.last = layers.start == 0, layers.stop == model.layers
        table = (model.vocab_size, model.hidden_size, model.init_std, tp, master)
        self.embedding: HiddenShardedEmbedding | VocabShardedTable
        if self.first and self.hidden_sharded and not model.tie_embeddings:
            self.embedding = HiddenShardedEmbedding(*table)
        elif self.first:
            stream = None if self.hidden_sharded else self.stream
            self.embedding = VocabShardedTable("embedding.weight", *table, stream)
        self.blocks = nn.ModuleList(kind(model, parallel, layer, tp, master) for layer in layers)
        for block in self.blocks if compile else ():
            for name in cast(Sequence[str], block.LOCAL):
                setattr(block, name, compiled(getattr(block, name)))
        if self.last:
            self.norm = Gain("norm.weight", model.hidden_size, master)
            if not model.tie_embeddings:
                self.head = VocabShardedTable("head.weight", *table)
            elif self.first:
                assert isinstance(self.embedding, VocabShardedTable)
                self.head = self.embedding
            else:
                self.head = VocabShardedTable("embedding.weight", *table, owned=False)

    def forward(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Token ids [batch, sequence] to logits [batch, sequence, vocab], in `dtype`; differentiable at tp = 1 only.

        With a cache, positions continue after the tokens it holds and it grows by the new ones.
        """
        h_TD = self.hidden(input_ids, cache=cache)
        logits_Tv = h_TD @ self.head.weight.to(h_TD.dtype).t()
        if self.tp.size > 1:
            # Every rank then sees all logits, so the sum in `gather_last`'s backward would count them tp times.
            logits_Tv = gather_last(logits_Tv.detach(), self.tp)
        return logits_Tv[:, : self.model.vocab_size].unflatten(0, input_ids.shape)

    def loss(self, input_ids: Tensor, labels: Tensor, samples: Sequence[int] = ()) -> Tensor:
        """The sum of the losses of all tokens whose label is not -100, a scalar in fp32 or fp64.

        Args:
            input_ids, labels: int64 [batch, sequence]; labels are the next tokens, already shifted.
            samples: each sequence's global sample index, needed where the model has dropout.
        """
        return self.loss_from(self.hidden(input_ids, samples=samples), labels)

    def loss_from(self, h_TD: Tensor, labels: Tensor) -> Tensor:
        """The same from normalised hidden states."""
        # Of the padded share, which is the same on every rank.
        chunk = chunk_tokens(len(self.head.weight))
        return head_loss(h_TD, self.head.real_rows(), labels.reshape(-1), self.head.start, self.tp, chunk)

    def hidden(self, input_ids: Tensor, *, samples: Sequence[int] = (), cache: KeyValueCache | None = None) -> Tensor:
        """Normalised hidden states of all tokens, [T, D], equal on every rank."""
        batch, sequence = input_ids.shape
        return self.section(input_ids.reshape(-1), batch, sequence, samples=samples, cache=cache)

    def section(
        self,
        x: Tensor,
        batch: int,
        sequence: int,
        *,
        samples: Sequence[int] = (),
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """What the layers held here make of their input.

        Args:
            x: token ids [T] with the first layer, else the residual stream [T, d]; with crossings beside it what
                the first block takes up (`boost.model.crossing.pack`).
            batch, sequence: the shape of the token ids.

        Returns:
            Normalised hidden states [T, D] with the last layer, else what the next stage takes.
        """
        context = self._context(batch, sequence, x.device, samples, cache)
        x_Td = self.embedding(x, self.dtype) if self.first else x
        taken_up: Sequence[Tensor] = ()
        if self.crossing and not self.first:
            columns = cast(BottleneckBlock, self.blocks[0]).columns
            x_Td, taken_up = unpack(x_Td, self.model.hidden_size // self.tp.size, columns, self.tp)
        if self.split_batch and torch.is_grad_enabled() and context.batch > 1:
            x_Td = self._interleaved(x_Td, context)
        else:
            run = recompute_block if self.recompute == "block" else call
            for block in self.blocks:
                if isinstance(block, BottleneckBlock):
                    x_Td, taken_up = run(block, x_Td, context, taken_up)
                else:
                    x_Td = run(block, x_Td, context)
        if self.last:
            return self._final_norm(x_Td, context.tokens)
        return pack(x_Td, taken_up, self.tp) if self.crossing else x_Td

    def _interleaved(self, x_Td: Tensor, context: Context) -> Tensor:
        """The blocks over two halves of the batch that take turns."""
        first = context.batch - context.batch // 2
        queue = WeightGradQueue() if context.queue is None and not self.compiled else context.queue
        context = replace(context, queue=queue, interleaved=True)
        halves = [
            replace(context, batch=first, samples_B=context.samples_B[:first]),
            replace(context, batch=context.batch - first, samples_B=context.samples_B[first:]),
        ]
        gather(self.blocks)
        blocks = cast(Sequence[BottleneckBlock], self.blocks)
        sizes = [half.batch * half.sequence for half in halves]
        return interleave(x_Td, sizes, list(block_stages(blocks, halves)), blocks[0].bridge, queue)

    def _final_norm(self, x_Td: Tensor, tokens: int) -> Tensor:
        """The final norm, then the head's backward sum.

        Under BTP the sum is the backward of the all-gather: the norm's backward, linear in its gradient, acts on
        partial gradients before it, and only the gain needs a sum of its own.
        """
        if self.hidden_sharded:
            x_TD = gather_last(x_Td, self.tp)
            return rms_norm(x_TD, sum_backward(self.norm.weight, self.tp), self.model.norm_eps)
        gain_D = self.stream.replicated(self.norm.weight)
        return self.stream.enter(rms_norm(x_Td, gain_D, self.model.norm_eps), tokens)

    def _context(
        self, batch: int, sequence: int, device: torch.device, samples: Sequence[int], cache: KeyValueCache | None
    ) -> Context:
        start = cache.length if cache is not None else 0
        dropout, lora_dropout = (self.model.dropout, self.model.lora_dropout) if self.training else (0.0, 0.0)
        if (dropout or lora_dropout) and len(samples) != batch:
            raise ValueError(f"dropout needs the sample index of each of {batch} sequences, got {len(samples)}")
        host_B = torch.tensor(list(samples) if dropout or lora_dropout else [], dtype=torch.int64)
        cos, sin = rope_tables(start + sequence, self.model.head_size, self.model.rope_theta, self.dtype, device)
        return Context(
            batch,
            sequence,
            cos[start:],
            sin[start:],
            cache,
            dropout=dropout,
            recompute=self.recompute,
            queue=self.queue,
            seed=self.seed,
            samples_B=host_B.to(device, non_blocking=True),
            lora_dropout=lora_dropout,
        )


def outline(model: ModelSection) -> Decoder:
    """The whole model on the meta device, for its names and shapes: no memory, and no support is drawn."""
    with torch.device("meta"):
        return Decoder(model, supports=unplaced(model))
