"""The training loop, top to bottom."""

from __future__ import annotations

import logging
import math
import os
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
from torch import nn

from boost.checkpoint.saver import Saver
from boost.checkpoint.store import Checkpoint, latest, open_checkpoint
from boost.checkpoint.weights import load_weights, saved_config, saved_supports
from boost.config import TrainConfig
from boost.config_rules import ZERO_BUBBLE
from boost.data.dataset import Dataset, open_dataset
from boost.errors import EnvironmentFailure, NumericsError, Preempted, UserError
from boost.inference.evaluate import Evaluation, context_token, evaluate
from boost.model import costs
from boost.model.decoder import Decoder, outline
from boost.model.relora import factor_names
from boost.model.stages import PipelinedDecoder
from boost.parallel.collectives import all_reduce, any_rank, barrier, first_text, same_on_all_ranks
from boost.parallel.data_parallel import sum_gradients
from boost.parallel.mesh import Group, Mesh, shorten_timeouts
from boost.parallel.overlap import HeldWeightGrads, WeightGradQueue
from boost.parallel.sharding import initialize, partial_parameters
from boost.parallel.zero import begin_micro_batch, shard
from boost.training.batches import Batch, Batches
from boost.training.clipping import clip_gradients, gradient_norm
from boost.training.console import Progress, log_summary
from boost.training.metrics import MetricsWriter, peak_flops, peak_memory_bytes, write_plots
from boost.training.optimizers.build import build_optimizer
from boost.training.restart import count_since_restart, restart, steps_since_restart
from boost.training.run_directory import RunDirectory
from boost.training.schedule import lr_multiplier
from boost.training.signals import StopRequest
from boost.training.state import check_resumable, load_state, save_state
from boost.training.watch import Watch

logger = logging.getLogger("boost")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def train(
    config: TrainConfig,
    mesh: Mesh,
    run: RunDirectory,
    stop: StopRequest | None = None,
    watch: Watch | None = None,
) -> None:
    """Trains to `train.steps`, resuming from the newest complete checkpoint of the run directory.

    Every rank of the mesh calls it. Before every step, and between the batches of a validation, all ranks look together
    whether one was asked to stop. Rank 0 owns the run directory's files; checkpoints are written by all ranks.

    Raises:
        UserError: configuration, data or checkpoint do not go together.
        NumericsError: a loss or gradient is not finite; nothing was updated or saved since the last checkpoint.
        Preempted: the run was asked to stop and has saved its state.
    """
    main, stop = mesh.world.rank == 0, stop or StopRequest()
    waiting = nullcontext if watch is None else watch.waiting
    check_shared(run, mesh.world)
    dataset = open_dataset(config)
    if not same_on_all_ranks(int(dataset.fingerprint[:15], 16), mesh.world):
        raise UserError("data.path", "ranks see different datasets", got=f"fingerprint {dataset.fingerprint[:12]} here")
    batches = Batches(dataset.train, config, mesh.dp)
    resumed, source = starting_point(config, mesh, run, dataset)
    if resumed and source is not None and source.step >= config.train.steps:
        what = "nothing to do: step %d of %d; raise train.steps or choose another run.dir"
        logger.info(what, source.step, config.train.steps)
        if watch is not None:
            watch.finish()
        barrier(mesh.saving)
        return
    model = build_model(config, mesh, source)
    optimizer = build_optimizer(model, config, mesh)
    start = restore(source, config, mesh, model, optimizer, resumed=resumed) if source else 0
    restart_every = config.optimizer.restart_every
    tokens_per_step = config.train.global_batch_size * config.train.sequence_length
    flops_per_token = costs.training_flops_per_token(config.model, config.train.sequence_length)
    peak = peak_flops(mesh.device, config.train.precision)

    writer = None
    if main:
        run.write_config(config.to_yaml())
        run.rewind_metrics(start)
        log_summary(config, mesh, dataset, start)
        if isinstance(model, PipelinedDecoder):
            logger.info("%s", model.describe())
    writer = (
        MetricsWriter(run.metrics, run.path / "tensorboard" if config.logging.tensorboard else None) if main else None
    )

    saver = Saver(mesh.saving, asynchronous=config.checkpoint.asynchronous)

    # Of what is not tensors rank 0's counts. Read now: the dataset may be gone when the run saves.
    tokenizer = dataset.tokenizer_file.read_bytes() if main else b""

    def save(step: int) -> None:
        save_state(saver, run.checkpoints, step, model, optimizer, config, mesh, dataset.fingerprint, tokenizer)

    def asked_to_stop() -> bool:
        if watch is not None:
            watch.beat()
        return any_rank(stop.requested, mesh.world)

    def validate(step: int) -> Evaluation | None:
        if config.train.validate_every == 0 or dataset.validation is None:
            return None
        began = time.perf_counter()
        with waiting():
            result = evaluate(
                model,
                dataset.validation,
                context_token(dataset),
                config.train.sequence_length,
                # A pipeline takes a whole step's sequences at a time.
                config.train.micro_batch_size * (config.micro_batches if mesh.pp.size > 1 else 1),
                mesh.dp,
                mesh.device,
                asked_to_stop,
            )
        outcome = "broken off, for the run was asked to stop" if result is None else result
        logger.info("validation after step %d: %s (%.1f s)", step, outcome, time.perf_counter() - began)
        return result

    saved_at: int | None = start if start > 0 else None
    step = start
    with Progress(config.train.steps, start, enabled=main) as progress, saver:
        before_first = validate(0) if start == 0 and not asked_to_stop() else None
        for batch in batches.iterate(start, config.train.steps, mesh.device):
            with waiting():
                ends = any_rank(stop.requested or saver.failed, mesh.world)
            if ends:
                logger.info("stopping after step %d, then saving", step)
                break
            began = time.perf_counter()
            multiplier = lr_multiplier(
                config.schedule, step, config.train.steps, config.optimizer.exact_every, restart_every
            )
            lr = config.optimizer.lr * multiplier
            with waiting():
                loss, norm = update(
                    model, optimizer, batch, lr, config.optimizer.clip, mesh, step + 1, zero=config.parallel.zero
                )
                step += 1
                if restart_every is not None and steps_since_restart(step, restart_every) == 0:
                    restart(model, optimizer, config.train.seed, step, mesh.tp)
                if mesh.device.type == "cuda":
                    torch.cuda.synchronize(mesh.device)
            seconds = time.perf_counter() - began
            if step == start + 1:
                shorten_timeouts(mesh, config.parallel.timeout_seconds, longest_wait=seconds)
                if watch is not None:
                    watch.limit()
                if isinstance(model, PipelinedDecoder):
                    model.communicate_over(mesh.prompt)

            flops = flops_per_token * tokens_per_step / seconds
            record: dict[str, Any] = {
                "step": step,
                "tokens": step * tokens_per_step,
                "loss": loss,
                "grad_norm": norm,
                "lr": lr,
                "step_seconds": seconds,
                "tokens_per_second": tokens_per_step / seconds,
                "model_flops_per_second": flops,
                "mfu": flops / mesh.world.size / peak if peak else None,
                "peak_memory_bytes": peak_memory_bytes(mesh.device),
                "batch_hash": batch.hash,
            }
            if isinstance(model, PipelinedDecoder):
                record["pipeline_idle_seconds"], record["pipeline_idle"] = model.idle()
            due = config.train.validate_every and step % config.train.validate_every == 0
            validation = validate(step) if due or step == config.train.steps else None
            if validation is not None:
                record |= validation.record(step)
            elif before_first is not None:
                record |= before_first.record(0)
            before_first = None
            if writer is not None:
                writer.write(record)
            progress.show(record, every=config.logging.every)
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                save(step)
                saved_at = step
        if saved_at != step:
            save(step)
        saver.wait()
        stopped = asked_to_stop() and step < config.train.steps

    if writer is not None:
        writer.close()
        for path in write_plots(run.read_metrics(), run.path / "plots") if config.logging.plots else ():
            logger.info("plot %s", path)
    if watch is not None:
        watch.finish()
    barrier(mesh.saving)  # the others stay until rank 0 has written all of this: a rank that exits ends the rest
    if stopped:
        raise Preempted(
            f"run.dir: stopped by a signal after step {step}, state saved; the same command goes on from here"
        )
    logger.info("done: %d steps, checkpoint %s", step, run.checkpoints / f"step-{step}")


def build_model(config: TrainConfig, mesh: Mesh, source: Checkpoint | None = None) -> Decoder | PipelinedDecoder:
    """This rank's share of the model, initialised from the seed alone.

    Args:
        source: what it will be filled from, and what has the supports of its sparse matrices.
    """
    supports = saved_supports(source, config.model) if source is not None else None
    parallel, dtype = config.parallel, DTYPES[config.train.precision]
    queue: WeightGradQueue | None = None
    if mesh.pp.size > 1 and parallel.pipeline_schedule in ZERO_BUBBLE:
        queue = HeldWeightGrads()
    elif parallel.overlap == "weight_grads" and mesh.tp.size > 1:
        queue = WeightGradQueue()
    # Where ZeRO divides the parameters, only this rank's share is ever allocated.
    sharded = mesh.shards.size > 1

    def build(layers: range | None = None) -> Decoder:
        return Decoder(
            config.model,
            parallel,
            mesh.tp,
            dtype=dtype,
            seed=config.train.seed,
            recompute=config.train.recompute,
            compile=config.train.compile,
            queue=queue,
            layers=layers,
            supports=supports,
        )

    with torch.device("meta") if sharded else mesh.device:
        model = PipelinedDecoder(config, mesh, build, queue) if mesh.pp.size > 1 else build()
    if sharded and isinstance(model, PipelinedDecoder):
        model.shard(mesh)
    elif sharded:
        shard(model, cast(nn.ModuleList, model.blocks), mesh, parallel.zero, dtype=dtype, entry="loss", queue=queue)
    initialize(model, config.train.seed, mesh.tp)
    return model


def check_shared(run: RunDirectory, world: Group, patience: float = 5.0) -> None:
    """Looks, from all ranks, for a file that rank 0 makes: else the first save would be the first to miss it.

    Args:
        patience: seconds to wait for it; file systems on a network may show it late.

    Raises:
        UserError: on every rank, naming one that does not see the file.
    """
    if world.size == 1:
        return
    path = run.path / f".shared.{first_text(uuid4().hex if world.rank == 0 else '', world)}"
    with suppress(OSError):
        if world.rank == 0:
            path.touch()
    barrier(world)
    deadline = time.monotonic() + patience
    while not (seen := os.path.exists(path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    problem = first_text("" if seen else f"rank {world.rank} does not see what rank 0 writes in {run.path}", world)
    with suppress(OSError):
        if world.rank == 0:
            path.unlink()
    if problem:
        raise UserError("run.dir", problem, hint="give a directory that all machines share")


def starting_point(
    config: TrainConfig, mesh: Mesh, run: RunDirectory, dataset: Dataset
) -> tuple[bool, Checkpoint | None]:
    """The checkpoint that the run starts from, if any, and whether it goes on from there."""
    # Rank 0 alone reads all manifests.
    found = latest(run.checkpoints) if mesh.world.rank == 0 else None
    name = first_text("" if found is None else found.name, mesh.world)
    newest = run.checkpoints / name if name else None
    if any_rank(newest is not None and not newest.is_dir(), mesh.world):
        raise EnvironmentFailure(str(newest), "not seen by every rank", hint="wait until the file system agrees")
    if newest is not None and config.run.resume == "false":
        raise UserError(
            "run.dir", f"{run.path} holds checkpoints", hint="set run.resume=auto to go on, or choose another run.dir"
        )
    if newest is not None:
        checkpoint = _open(newest, "run.dir", config, mesh)
        check_resumable(checkpoint, config, dataset.fingerprint)
        return True, checkpoint
    init_from = config.run.init_from
    return False, None if init_from is None else _open(init_from, "run.init_from", config, mesh)


def restore(
    source: Checkpoint,
    config: TrainConfig,
    mesh: Mesh,
    model: Decoder | PipelinedDecoder,
    optimizer: torch.optim.Optimizer,
    *,
    resumed: bool,
) -> int:
    """Loads a checkpoint, or its weights alone, and returns how many steps the run has then taken."""
    if resumed:
        step = load_state(source, model, optimizer, mesh.tp)
        if config.optimizer.restart_every is not None:
            count_since_restart(model, optimizer, step, config.optimizer.restart_every)
        logger.info("resuming from %s", source.path)
        return step
    whole = outline(config.model)
    # A full-rank warm start has no factors yet: they stay as they were drawn.
    fresh = factor_names(whole) if saved_config(source).model.linear == "dense" else frozenset()
    load_weights(source, model, mesh.tp, cast=True, whole=whole, fresh=fresh)
    logger.info("starting from the weights of %s", source.path)
    return 0


def _open(path: str | Path, field: str, config: TrainConfig, mesh: Mesh) -> Checkpoint:
    """Opens a checkpoint on every rank. Each verifies its share of the files, and what one finds all raise.

    The path may differ between ranks, the checkpoint must be the same one: else the weights would not be.
    """
    rank, world = mesh.world.rank, mesh.world.size
    problem: UserError | None = None
    try:
        checkpoint = open_checkpoint(path, verify=config.checkpoint.verify, rank=rank, world=world)
    except UserError as error:
        problem = error
    found = first_text("" if problem is None else str(problem), mesh.world)
    if found:
        where, _, what = found.partition(": ")
        raise problem or UserError(where, what)
    if not same_on_all_ranks(int(checkpoint.state_hash[:15], 16), mesh.world):
        got = f"state_hash {checkpoint.state_hash[:12]} in {checkpoint.path} here"
        raise UserError(field, "ranks opened different checkpoints", got=got, hint="give all of them the same one")
    return checkpoint


def forward_backward(model: Decoder | PipelinedDecoder, batch: Batch, mesh: Mesh, zero: int = 0) -> torch.Tensor:
    """Adds this rank's gradients of the mean loss, and returns its share of that loss in fp64."""
    micro_batches = batch.micro_batches
    if isinstance(model, PipelinedDecoder):
        inputs, labels = (
            torch.cat(side) for side in zip(*((m.input_ids, m.labels) for m in micro_batches), strict=True)
        )
        return model.forward_backward(inputs, labels, [s for m in micro_batches for s in m.samples], batch.tokens)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for micro in micro_batches:
        if mesh.shards.size > 1:
            begin_micro_batch(model, zero, last=micro is micro_batches[-1])
        # Divided by the global count before backward, so that gradients are only ever summed.
        loss = model.loss(micro.input_ids, micro.labels, micro.samples) / batch.tokens
        loss.backward()
        if model.queue is not None:
            model.queue.flush()
        total += loss.detach()
    return total


def update(
    model: Decoder | PipelinedDecoder,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    lr: float,
    clip: float | None,
    mesh: Mesh,
    step: int,
    *,
    zero: int = 0,
) -> tuple[float, float]:
    """One optimiser step: the mean loss over the global batch and the gradient norm before clipping.

    Raises:
        NumericsError: one of them is not finite; the weights are untouched. All ranks see the same numbers.
    """
    total = forward_backward(model, batch, mesh, zero)
    if mesh.shards.size == 1:
        sum_gradients(model.parameters(), mesh.dp)
    sum_gradients(partial_parameters(model), mesh.tp)
    if isinstance(model, PipelinedDecoder):
        model.join_twins()
    norm = gradient_norm(model, mesh.tp, mesh.shards, mesh.pp)
    loss_value, norm_value = all_reduce(all_reduce(total, mesh.dp), mesh.pp).item(), norm.item()
    for name, value in (("loss", loss_value), ("grad_norm", norm_value)):
        if not math.isfinite(value):
            raise NumericsError(
                f"step {step}", f"{name} is {value}", hint="lower optimizer.lr or look at the batch; no update was made"
            )
    clip_gradients(model, norm, clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss_value, norm_value
