"""From a step to this rank's micro-batches: a pure function, so that resuming needs no more than the step."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from boost.config import TrainConfig
from boost.data.dataset import Split
from boost.data.sampler import batch_hash, sequence_hash, train_sequence
from boost.parallel.collectives import all_gather
from boost.parallel.mesh import Group


@dataclass(frozen=True)
class MicroBatch:
    """input_ids and labels, int64 [micro_batch_size, sequence_length], and the sequences' global sample indices."""

    input_ids: Tensor
    labels: Tensor
    samples: range


@dataclass(frozen=True)
class Batch:
    """One optimiser step's data on this rank.

    Attributes:
        micro_batches: in order.
        tokens: labels that count, over the whole global batch.
        hash: of all sequences of the global batch in global order.
    """

    micro_batches: list[MicroBatch]
    tokens: int
    hash: str


class Batches:
    """The batches of a run. Sample `step * global_batch_size + i` is sequence i of step `step`.

    Every dp rank takes a contiguous run of the global batch; tp ranks of one dp rank see the same sequences.

    Args:
        split: the training tokens.
        config: sizes and the data seed.
        dp: the data-parallel group.
    """

    def __init__(self, split: Split, config: TrainConfig, dp: Group) -> None:
        self.split, self.config, self.dp = split, config, dp
        self.per_rank = config.train.global_batch_size // dp.size

    def read(self, step: int) -> list[np.ndarray]:
        """This rank's sequences of the step, each int64 [sequence_length + 1]."""
        first = step * self.config.train.global_batch_size + self.dp.rank * self.per_rank
        length, seed = self.config.train.sequence_length, self.config.data.seed
        return [train_sequence(self.split, length, seed, first + i) for i in range(self.per_rank)]

    def batch(self, step: int, sequences: list[np.ndarray], device: torch.device) -> Batch:
        """The step's batch, with the numbers that all dp ranks must agree on."""
        micro = self.config.train.micro_batch_size
        first = step * self.config.train.global_batch_size + self.dp.rank * self.per_rank
        micro_batches = []
        for start in range(0, self.per_rank, micro):
            tokens = torch.from_numpy(np.stack(sequences[start : start + micro])).to(device)
            samples = range(first + start, first + start + micro)
            micro_batches.append(MicroBatch(tokens[:, :-1], tokens[:, 1:], samples))
        hashes = torch.frombuffer(bytearray(b"".join(map(sequence_hash, sequences))), dtype=torch.uint8)
        gathered = all_gather(hashes.to(device), self.dp).cpu().numpy().tobytes()
        digest = batch_hash([gathered[i : i + 32] for i in range(0, len(gathered), 32)])
        return Batch(micro_batches, self.config.train.global_batch_size * self.config.train.sequence_length, digest)

    def iterate(self, start: int, stop: int, device: torch.device) -> Iterator[Batch]:
        """Batches of steps start..stop-1; with `data.num_workers` threads reading that many steps ahead."""
        ahead = self.config.data.num_workers
        if ahead == 0:
            for step in range(start, stop):
                yield self.batch(step, self.read(step), device)
            return
        with ThreadPoolExecutor(ahead) as pool:
            pending = {step: pool.submit(self.read, step) for step in range(start, min(start + ahead, stop))}
            for step in range(start, stop):
                sequences = pending.pop(step).result()
                if step + ahead < stop:
                    pending[step + ahead] = pool.submit(self.read, step + ahead)
                yield self.batch(step, sequences, device)
