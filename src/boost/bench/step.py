"""One training step of one variant on this rank: timed, counted on the wire, and weighed in live bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from boost.bench.intercept import Call, Work, intercepted
from boost.bench.memory import track_storages
from boost.config import TrainConfig
from boost.model.decoder import Decoder
from boost.parallel.collectives import Collective, count_collectives
from boost.parallel.mesh import Mesh
from boost.training.loop import build_model


class Stopwatch:
    """Time spent waiting in collectives: that of this thread, or on a GPU that of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timing(self) -> AbstractContextManager[None]:
        """Inside the block every blocking collective is timed, and every wait for one that was started."""
        return intercepted(self._begin)

    @property
    def seconds(self) -> float:
        """The sum so far; a GPU must have been synchronised."""
        return self._seconds + sum(began.elapsed_time(ended) for began, ended in self._events) * 1e-3

    @contextmanager
    def span(self) -> Iterator[None]:
        """Adds what the block takes."""
        if self._cuda:
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            yield
            ended.record()
            self._events.append((began, ended))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def _begin(self, call: Call) -> Work:
        with self.span():
            return _Timed(call.start(), self)


class _Timed:
    def __init__(self, work: Work, watch: Stopwatch) -> None:
        self._work, self._watch = work, watch

    def wait(self) -> None:
        with self._watch.span():
            self._work.wait()


class Step:
    """Forward and backward of one micro-batch of random tokens; no optimiser."""

    def __init__(self, config: TrainConfig, mesh: Mesh, layers: int | None = None) -> None:
        if layers is not None:
            config = config.model_copy(update={"model": config.model.model_copy(update={"layers": layers})})
        self.config, self.mesh = config, mesh
        model = build_model(config, mesh)
        assert isinstance(model, Decoder), "layouts are compared without pipelines"
        self.model = model
        shape = (config.train.micro_batch_size, config.train.sequence_length + 1)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.model.vocab_size, shape, generator=generator).to(mesh.device)
        self.inputs, self.labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    @property
    def tokens(self) -> int:
        return self.inputs.numel()

    def forward(self) -> Tensor:
        return self.model.loss(self.inputs, self.labels, samples=range(len(self.inputs))) / self.tokens

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if self.model.queue is not None:
            self.model.queue.flush()
        self.model.zero_grad(set_to_none=True)

    def run(self) -> None:
        self.backward(self.forward())
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    def timed(self) -> tuple[float, float]:
        """Seconds of one step, and those of them spent waiting in collectives."""
        watch = Stopwatch(self.mesh.device)
        if self.mesh.world.size > 1:
            dist.barrier()
        began = time.perf_counter()
        with watch.timing():
            self.run()
        return time.perf_counter() - began, watch.seconds

    def traffic(self) -> tuple[list[Collective], list[Collective]]:
        """Every collective of forward and of backward."""
        with count_collectives() as forward:
            loss = self.forward()
        with count_collectives() as backward:
            self.backward(loss)
        return list(forward), list(backward)

    def kept_bytes(self) -> int:
        """Bytes that live from forward to backward, parameters not counted."""
        with track_storages() as tracker:
            loss = self.forward()
        kept = tracker.live_bytes(excluding=self.model.parameters())
        self.backward(loss)
        return kept

    def peak_bytes(self) -> int:
        """The most bytes alive at once in a step: on a GPU as its allocator counts, else over live storages."""
        if self.mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.mesh.device)
            self.run()
            return torch.cuda.max_memory_allocated(self.mesh.device)
        with track_storages(sample=True, excluding=self.model.parameters()) as tracker:
            self.run()
        return tracker.peak + sum(p.numel() * p.element_size() for p in self.model.parameters())


def per_block(config: TrainConfig, mesh: Mesh) -> dict[str, float]:
    """Traffic and kept bytes of one block: a model of two blocks less one of one, so that the ends cancel."""
    one, two = Step(config, mesh, layers=1), Step(config, mesh, layers=2)
    out: dict[str, float] = {}
    for way, few, many in zip(("forward", "backward"), one.traffic(), two.traffic(), strict=True):
        out[f"{way}_collectives"] = len(many) - len(few)
        elements = sum(c.all_reduced_elements for c in many) - sum(c.all_reduced_elements for c in few)
        size = sum(c.all_reduced_bytes for c in many) - sum(c.all_reduced_bytes for c in few)
        out[f"{way}_elements"], out[f"{way}_bytes"] = elements / one.tokens, size / one.tokens
    out["saved_bytes_per_token"] = (two.kept_bytes() - one.kept_bytes()) / one.tokens
    return out
