"""The `boost` command: one function per command, each a few lines. Heavy imports happen inside them."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from boost import __version__
from boost.errors import ENVIRONMENT, USER, BoostError, UserError

if TYPE_CHECKING:
    from boost.checkpoint.reading import Checkpoint

app = typer.Typer(
    name="boost",
    help="Pre-train low-rank-bottleneck language models with bottleneck-aware tensor parallelism.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Tokenised datasets and tokenizers.", no_args_is_help=True)
bench_app = typer.Typer(help="Measurements.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")

OnError = Literal["stop", "skip"]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto = cuda if there is one, else cpu.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.field=value]...", show_default=False)]


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped preset.")],
    overrides: Overrides = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show the configuration and stop.")] = False,
) -> None:
    """Train. The same command resumes from the newest complete checkpoint in run.dir."""
    from boost.config import TrainConfig

    resolved = TrainConfig.load(config, overrides or [])
    if print_config:
        from boost.training.console import memory_line

        typer.echo(resolved.to_yaml(), nl=False)
        typer.echo(memory_line(resolved), err=True)
        return
    from boost.launch import train as run

    run(resolved)


@app.command()
def slurm(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped preset.")],
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines; the ranks are shared evenly.")] = 1,
    time: Annotated[str | None, typer.Option(help="Time limit, e.g. 24:00:00; default: the partition's.")] = None,
    partition: Annotated[str | None, typer.Option(help="Default: the cluster's.")] = None,
    account: Annotated[str | None, typer.Option(help="Default: yours.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write; default: standard output.")] = None,
) -> None:
    """Write a Slurm batch script that trains, and goes on by itself after the time limit."""
    from boost.config import TrainConfig
    from boost.slurm import batch_script, crosses_machines
    from boost.training.console import memory_line

    resolved = TrainConfig.load(config, overrides or [])
    arguments = [config, *(overrides or [])]
    script = batch_script(resolved, arguments, nodes, time=time, partition=partition, account=account)
    typer.echo(memory_line(resolved), err=True)
    if crosses_machines(resolved, nodes):
        hint = "use fewer --nodes, or a tp that divides the ranks of one"
        typer.echo(f"warning: parallel.tp: its ranks lie on more than one node, where links are slow; {hint}", err=True)
    if output is None:
        typer.echo(script, nl=False)
        return
    try:
        if output.exists() and output.read_text() != script:
            raise UserError(
                str(output), "exists already, with other content", hint="name another --output or delete it"
            )
        output.write_text(script)
    except OSError as error:
        raise UserError(str(output), f"cannot be written: {error.strerror}") from error


@data_app.command("prepare")
def data_prepare(
    inputs: Annotated[list[str], typer.Argument(help="Text, JSONL, Parquet, compressed or not; folders; hf:NAME.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, its folder, or a shipped tokenizer's name.")],
    text_field: Annotated[str, typer.Option(help="The field that holds a document's text.")] = "text",
    validation_last: Annotated[int, typer.Option(help="Hold out this many documents at the end.")] = 0,
    validation_fraction: Annotated[float, typer.Option(help="Hold out this fraction, by each text's hash.")] = 0.0,
    bos: Annotated[bool, typer.Option("--bos", help="Begin each document with the tokenizer's begin token.")] = False,
    eos: Annotated[
        bool, typer.Option("--eos/--no-eos", help="End each document with the tokenizer's end token.")
    ] = True,
    on_error: Annotated[OnError, typer.Option(help="What a bad document does: stop, or skip with a count.")] = "stop",
) -> None:
    """Tokenise text into a dataset that training reads by memory map."""
    from boost.data.prepare import prepare

    typer.echo(
        prepare(
            inputs,
            out,
            tokenizer,
            text_field=text_field,
            validation_last=validation_last,
            validation_fraction=validation_fraction,
            bos=bos,
            eos=eos,
            on_error=on_error,
        )
    )


@data_app.command("train-tokenizer")
def data_train_tokenizer(
    inputs: Annotated[list[str], typer.Argument(help="As for `boost data prepare`.")],
    vocab_size: Annotated[int, typer.Option(help="Number of tokens, special ones included.")],
    out: Annotated[Path, typer.Option(help="The tokenizer.json to write.")],
    text_field: Annotated[str, typer.Option(help="The field that holds a document's text.")] = "text",
    on_error: Annotated[OnError, typer.Option(help="What a bad document does: stop, or skip with a count.")] = "stop",
) -> None:
    """Train a byte-level BPE tokenizer."""
    from boost.data.train_tokenizer import train_tokenizer

    typer.echo(train_tokenizer(inputs, vocab_size, out, text_field=text_field, on_error=on_error))


@app.command()
def generate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a run directory.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0 = all.")] = 50,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from the smallest set this probable.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal text.")] = 0,
    device: Device = "auto",
) -> None:
    """Sample text from a trained model, with a KV cache."""
    from boost.checkpoint.store import open_checkpoint
    from boost.data.tokenizer import special_ids
    from boost.inference.generate import generate as sample
    from boost.inference.load import model_on, tokenizer_from

    opened = open_checkpoint(checkpoint)
    tokenizer, model = tokenizer_from(opened), model_on(opened, device)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise UserError("--prompt", "holds no token", hint="give it some text")
    tokens = sample(
        model,
        ids,
        max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_id=special_ids(tokenizer).eos,
    )
    typer.echo(tokenizer.decode(ids + list(tokens)))


@app.command("eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a run directory.")],
    data: Annotated[Path | None, typer.Option(help="A prepared dataset with a validation split.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, or YAML files, with commas between.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="A folder with further tasks.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many documents of each task.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Solved examples before each question; default: the task's.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Default: as in training.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 8,
    papers_batches: Annotated[
        int | None, typer.Option(min=1, help="Also print the perplexity as C4 papers count it, over so many batches.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Loss, perplexity and bits per byte of a dataset's validation split, or lm-eval's tasks."""
    from boost.checkpoint.store import open_checkpoint

    if (data is None) == (tasks is None):
        raise UserError("boost eval", "needs --data or --tasks, one of them")
    if data is not None and (include_path or limit or num_fewshot is not None):
        raise UserError("boost eval", "--include-path, --limit and --num-fewshot go with --tasks")
    if tasks is not None and papers_batches:
        raise UserError("boost eval", "--papers-batches goes with --data")
    opened = open_checkpoint(checkpoint)
    if data is not None:
        _evaluate_data(opened, data, sequence_length, batch_size, papers_batches, device)
        return
    from boost.data.formats.extras import optional_import

    optional_import("lm_eval", "eval", "--tasks")
    from boost.checkpoint.weights import saved_config
    from boost.inference.load import model_on, tokenizer_from
    from boost.inference.tasks import run_tasks, table

    assert tasks is not None
    results = run_tasks(
        model_on(opened, device),
        tokenizer_from(opened),
        tasks.split(","),
        sequence_length=sequence_length or saved_config(opened).train.sequence_length,
        batch_size=batch_size,
        include_path=include_path,
        limit=limit,
        num_fewshot=num_fewshot,
    )
    typer.echo(table(results), nl=False)


def _evaluate_data(
    opened: Checkpoint,
    data: Path,
    sequence_length: int | None,
    batch_size: int,
    papers_batches: int | None,
    device: str,
) -> None:
    from boost.checkpoint.weights import saved_config
    from boost.data.dataset import Dataset
    from boost.inference.evaluate import context_token
    from boost.inference.evaluate import evaluate as run
    from boost.inference.load import model_on

    config = saved_config(opened)
    dataset = Dataset.open(data, vocab_size=config.model.vocab_size)
    if dataset.validation is None:
        raise UserError(str(data), "has no validation split", hint="prepare it with --validation-last or -fraction")
    if opened.read_file("tokenizer.json") != dataset.tokenizer_file.read_bytes():
        raise UserError(str(data), "was prepared with another tokenizer than the checkpoint's", hint="prepare it again")
    length = sequence_length or config.train.sequence_length
    found = run(model_on(opened, device), dataset.validation, context_token(dataset), length, batch_size)
    assert found is not None, "nothing stops it"
    typer.echo(found)
    if papers_batches:
        count = f"exp(loss * {papers_batches} / {papers_batches + 1}), as the C4 papers' code counts it"
        typer.echo(f"perplexity_c4_papers {found.papers_perplexity(papers_batches):.2f}: {count}")


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a run directory.")],
    out: Annotated[Path, typer.Argument(help="The directory to make.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Multiply the factors: transformers' own LLaMA, where nothing lies between.")
    ] = False,
) -> None:
    """Write a Hugging Face directory, which loads where boost is not installed."""
    from boost.interop.huggingface import export as run

    typer.echo(run(checkpoint, out, merge=merge))


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="A Hugging Face directory: config.json and safetensors files.")],
    out: Annotated[Path, typer.Argument(help="The checkpoint to make; run.init_from takes it.")],
    kind: Annotated[Literal["llama", "boost", "cola", "cola-m", "loro"], typer.Option("--from", help="Whose it is.")],
    rank: Annotated[int | None, typer.Option(min=1, help="Cut a LLaMA's linears to this rank; default: keep.")] = None,
    method: Annotated[Literal["svd"], typer.Option(help="How they are cut.")] = "svd",
    tokenizer: Annotated[str | None, typer.Option(help="As for `data prepare`; default: the one in SOURCE.")] = None,
) -> None:
    """Make a checkpoint of a model that another program has trained."""
    from boost.interop.importing import import_checkpoint

    typer.echo(import_checkpoint(kind, source, out, rank=rank, tokenizer=tokenizer))


@bench_app.command("layouts")
def bench_layouts(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped preset.")],
    overrides: Overrides = None,
    link: Annotated[str, typer.Option(help="Bytes per second between ranks; auto (as A100s), none, replay.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each variant, in turns.")] = 7,
    only: Annotated[
        list[str] | None, typer.Option(help="Variants to run, by name or pattern such as 'dense*'; repeatable.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a bar chart here, as PNG.")] = None,
) -> None:
    """Compare dense, vanilla and bottleneck-aware tensor parallelism, alternated in one run."""
    from boost.bench import layouts, report
    from boost.bench.variants import chosen, layout_variants
    from boost.config import TrainConfig

    variants = chosen(layout_variants(), only or [])
    loaded = TrainConfig.load(config, overrides or [])
    result = layouts.bench_layouts(loaded, link=link, rounds=rounds, variants=variants)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if chart is not None:
        report.bar_chart(result, chart)
    typer.echo(report.markdown(result), nl=False)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"boost {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


def _usage_problem(error: Any) -> str:
    command = error.ctx.command if error.ctx else None
    hint = f"see `{error.ctx.command_path if command else 'boost'} --help`"
    if hasattr(error, "option_name") and command and any(argument.name == "overrides" for argument in command.params):
        hint = f"a field is set as section.field=value, such as train.steps=10, without dashes; {hint}"
    return f"{error.format_message().rstrip('.')}; {hint}"


def main() -> None:
    """Runs the command line; the exit codes are those of `boost.errors`, and a failure's last line says what it was."""
    try:
        code = app(standalone_mode=False)
    except BoostError as error:
        for problem in getattr(error, "problems", [str(error)]):
            print(f"error: {problem}", file=sys.stderr)
        code = error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print("error: command: interrupted", file=sys.stderr)
        code = ENVIRONMENT
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of typer's own copy of click, which has no public name
            print(f"error: command line: {_usage_problem(error)}", file=sys.stderr)
            code = USER
        else:
            traceback.print_exc()
            print(f"error: boost: unexpected {type(error).__name__}: {error}", file=sys.stderr)
            code = ENVIRONMENT
    sys.exit(code if isinstance(code, int) else 0)
