"""Commands and how their errors are shown: one sentence and exit code 2 for what the user can mend."""

import contextlib
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli.bench import bench
from penstock.cli.early_signals import Stopped, ending_at_once
from penstock.errors import PenstockError, UserError, WorkerDied
from penstock.observe.plain_text import plain_block, plain_line

NO_MODEL = "stopped; no model was saved"


class Commands(TyperGroup):
    """typer would end in silence at a `KeyboardInterrupt`."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with ending_at_once("stopped"):
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with ending_at_once("stopped"):
            return super().invoke(ctx)


app = typer.Typer(
    name="penstock",
    cls=Commands,
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")

NOT_THE_DEMO = ("model.name", "tasks.source")
"""Whoever names one of these has a run of their own, and the demo's settings are not for it."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main(arguments: list[str] | None = None) -> None:
    """Run a command, and show its errors."""
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    _show_what_the_terminal_can()
    try:
        app(args=words, standalone_mode=True, prog_name="penstock")
    except UserError as error:
        _complain(str(error), debug)
        sys.exit(2)
    except WorkerDied as error:
        sys.stderr.write(plain_block(error.detail))
        _complain(str(error), debug)
        sys.exit(1)
    except Stopped as error:
        _complain(str(error), debug)
        sys.exit(130)
    except PenstockError as error:
        _complain(str(error), debug)
        sys.exit(1)
    finally:
        _leave_closed_output()


def _show_what_the_terminal_can() -> None:
    """Characters that its encoding lacks become question marks, not an exception in the middle of a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _leave_closed_output() -> None:
    """Python flushes at its end, and would complain there about a reader that has left."""
    try:
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _say_that_it_starts() -> None:
    """Before the imports, the config and the tasks, which together take a second and more."""
    with contextlib.suppress(OSError, ValueError):  # a closed stdout ends no run
        print(f"penstock {__version__}: starting", flush=True)


def _complain(sentence: str, debug: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    if debug:
        traceback.print_exc()
    shown = Text.assemble(("error:", "bold red"), f" {plain_line(sentence)}")
    Console(stderr=True).print(shown, soft_wrap=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""


def _file_and_words(config: str | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """A first argument that is no file but has a `=` is an override."""
    words = list(overrides or [])
    if config is not None and "=" in config and not Path(config).exists():
        return None, [config, *words]
    return (None if config is None else Path(config)), words


def _is_of_another_run(word: str) -> bool:
    """Whether an override names something else than the demo trains."""
    from penstock.demo.model import RECIPES

    setting, _, value = word.partition("=")
    return setting in NOT_THE_DEMO and not (setting == "model.name" and value in RECIPES)


@app.command()
def train(
    config: Annotated[
        str | None,
        typer.Argument(help="A YAML config; without one, and without a model or tasks, the demo runs."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value …")] = None,
    debug: Debug = False,
) -> None:
    """Train a model. Without arguments: a tiny built-in model on a built-in task, offline."""
    with ending_at_once(NO_MODEL):
        _say_that_it_starts()
        from penstock.api import DEMO, run
        from penstock.cli.report import print_summary
        from penstock.config.loader import load_config
        from penstock.observe.views import make_view
        from penstock.orchestration.config import PenstockConfig

        file, words = _file_and_words(config, overrides)
        own = any(_is_of_another_run(word) for word in words)
        root = load_config(PenstockConfig, file or (None if own else DEMO), words)
        summary = run(root, make_view(root.observe))
    # `penstock train | head`: whoever read has left, which is no failure of the run. rich exits then.
    with contextlib.suppress(BrokenPipeError, SystemExit):
        print_summary(summary)


@app.command()
def chaos(
    kills: Annotated[int, typer.Option(min=1, help="How many processes are killed or frozen.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the run, and of what happens to it.")] = 0,
    steps: Annotated[int, typer.Option(min=10, help="Of the run; more when they do not suffice.")] = 60,
    folder: Annotated[Path | None, typer.Option(help="Where the run goes; a temporary folder.")] = None,
    debug: Debug = False,
) -> None:
    """Train the demo while its processes are killed and frozen at random moments; then audit what came out."""
    from penstock.bench.chaos.chaos_report import run

    report = run(json, kills=kills, seed=seed, steps=steps, folder=folder)
    if report["complaints"]:
        raise PenstockError(f"{len(report['complaints'])} violations: {'; '.join(report['complaints'])}")


@app.command()
def simulate(
    config: Annotated[
        str | None,
        typer.Argument(help="A run's config, with a section `simulation`; without one, the demo's."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value …")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the outcome to this file.")] = None,
    debug: Debug = False,
) -> None:
    """The real controller in virtual time, against simulated engines and ranks: utilisation and staleness of
    a run."""
    from dataclasses import asdict
    from json import dumps

    from penstock.api import DEMO
    from penstock.cli.simulate import lines_of
    from penstock.config.loader import load_config
    from penstock.planner.config import SimulatedConfig
    from penstock.planner.simulated_run import simulate as simulate_run

    file, words = _file_and_words(config, overrides)
    outcome = simulate_run(load_config(SimulatedConfig, file or DEMO, words))
    print("\n".join(lines_of(outcome)))
    if json is not None:
        json.write_text(dumps(asdict(outcome), indent=2) + "\n")


@app.command()
def doctor(
    run: Annotated[str, typer.Argument(help="A run folder, or its name in runs/.")],
    debug: Debug = False,
) -> None:
    """How a run is, while it goes on or after its end: its processes and their stacks, groups, and usual causes."""
    from penstock.cli.doctor import diagnose

    with contextlib.suppress(BrokenPipeError):
        for line in diagnose(run):
            print(line)


@app.command()
def samples(
    run: Annotated[str, typer.Argument(help="A run folder, or its name in runs/.")],
    best: Annotated[int, typer.Option(min=0, help="How many of the highest rewards.")] = 0,
    worst: Annotated[int, typer.Option(min=0, help="How many of the lowest rewards.")] = 0,
    latest: Annotated[int, typer.Option(min=0, help="How many of the newest, dropped ones too.")] = 0,
    step: Annotated[int | None, typer.Option(help="Only what this step trained on.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Show all of a text that the run has kept.")] = False,
    export: Annotated[
        bool, typer.Option("--export", help="Write all that is kept to RUN/samples.jsonl instead.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Read what the model answered: prompt, answer, rewards, versions. Also while the run goes on."""
    from penstock.cli.samples import Choice, export_to_file, print_samples

    if export:
        print(export_to_file(run))
        return

    choice = Choice(best=best, worst=worst, latest=latest, step=step)
    with contextlib.suppress(BrokenPipeError):  # `penstock samples run | head`
        print_samples(run, choice, full=full)


@app.command()
def trace(
    run: Annotated[str, typer.Argument(help="A run folder, or its name in runs/.")],
    to: Annotated[Path | None, typer.Option(help="Where to; without it, RUN/trace.pftrace.")] = None,
    debug: Debug = False,
) -> None:
    """Write a timeline for Perfetto: slots, stages, counters, arrows from rollouts to steps. Also while it runs."""
    from penstock.cli.run_views import trace_run

    print(trace_run(run, to))


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="A run folder, or its name in runs/.")],
    to: Annotated[Path | None, typer.Option(help="Where to; without it, RUN/report.html.")] = None,
    debug: Debug = False,
) -> None:
    """Write what a run amounts to as one HTML file to send to somebody, and its main plots as PNGs."""
    from penstock.cli.run_views import report_run

    for line in report_run(run, to):
        print(line)


@app.command()
def watch(
    run: Annotated[str, typer.Argument(help="A run folder, or its name in runs/.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing; end when the run ends.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines, also in a terminal.")] = False,
    debug: Debug = False,
) -> None:
    """Attach to a run with the view of `penstock train`, also after its end. Ctrl-C leaves the run alone."""
    from penstock.cli.run_views import watch_run

    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        watch_run(run, quiet=quiet, plain=plain)


@app.command()
def view(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Run folders, or their names in runs/.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free one; so does 8421 where it is taken.")
    ] = 8421,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token that the page needs; without it, a new one.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name under which the page may be asked for: a proxy's.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Look at runs in a browser: samples, tokens, time, staleness, drops, a timeline. Also while they run."""
    from penstock.cli.view import ViewSettings, view_runs

    settings = ViewSettings(host=host, port=port, token_file=token_file, allow_hosts=tuple(allow_host or ()))
    view_runs(runs, settings)


@app.command()
def inspect(
    run: Annotated[str, typer.Argument(help="A run folder, or its name in runs/.")],
    group: Annotated[int | None, typer.Option(min=0, help="Show the whole life of this group.")] = None,
    debug: Debug = False,
) -> None:
    """What became of a run's groups: how many are in each state, and why some were dropped. Also while it runs."""
    from penstock.cli.inspect import print_run

    with contextlib.suppress(BrokenPipeError):
        print_run(run, group=group)


@app.command()
def resume(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value …")] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="Go back to the checkpoint of this step, or `best`. Later ones move to RUN/undone."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Go on with a run from its last checkpoint and its journal, in its folder; run.steps=N makes it longer."""
    with ending_at_once(NO_MODEL):
        _say_that_it_starts()
        from penstock.api import run
        from penstock.cli.export import read_step
        from penstock.cli.report import print_summary
        from penstock.cli.samples import run_folder
        from penstock.observe.views import make_view
        from penstock.orchestration.run_folder import load_saved_run

        chosen = None if step is None else read_step(step)
        root, saved = load_saved_run(run_folder(name), list(overrides or []), chosen)
        summary = run(root, make_view(root.observe), saved=saved)
    with contextlib.suppress(BrokenPipeError, SystemExit):
        print_summary(summary)


@app.command()
def export(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")],
    step: Annotated[
        str | None,
        typer.Option(
            help="The checkpoint of this step, or `best`: the highest held-out reward. Without it, the newest."
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Where to; without it, a folder named after the run.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a LoRA run: the adapter merged into its model.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write a run's model as an ordinary Hugging Face folder; of a LoRA run, the adapter in peft's format."""
    from penstock.cli.export import export_model, read_step
    from penstock.cli.samples import run_folder

    wanted = None if step is None else read_step(step)
    print(f"wrote {export_model(run_folder(name), step=wanted, to=to, merge=merge)}")


@app.command(name="eval")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face name or folder, a run folder, an adapter, `builtin` or `builtin-moe`."
        ),
    ],
    config: Annotated[str | None, typer.Argument(help="A YAML config; a run has its own.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value …")] = None,
    tasks: Annotated[str | None, typer.Option(help="A source of tasks, in the place of eval.tasks.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Answers per task.")] = None,
    correct: Annotated[
        float, typer.Option(help="For pass@k: from which reward on an answer is correct.")
    ] = 1.0,
    debug: Debug = False,
) -> None:
    """Mean reward and pass@k of a model over held-out tasks."""
    from penstock.cli.evaluate import evaluate_model, evaluation_config, print_report

    file, words = _file_and_words(config, overrides)
    root = evaluation_config(model, file, words, tasks=tasks, samples=samples)
    print_report(evaluate_model(root, correct=correct), model, correct=correct)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("penstock.yaml"),
    debug: Debug = False,
) -> None:
    """Write a commented starter config."""
    from penstock.cli.config_reference import starter_config

    if path.exists():
        raise UserError(f"{path} exists already; name another file or remove it")
    path.write_text(starter_config())
    print(f"wrote {path}; edit model, tasks and reward, then: penstock train {path}")


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face name or folder, an adapter, `builtin` or `builtin-moe`.")
    ],
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    max_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    chat: Annotated[bool, typer.Option(help="Apply the model's chat template.")] = False,
    debug: Debug = False,
) -> None:
    """Try the embedded engine by hand."""
    from penstock.cli.generate import generate_to_terminal
    from penstock.types import SamplingParams

    try:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    generate_to_terminal(model, prompts, sampling, chat=chat)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A Hugging Face name or folder, or `builtin`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="engine.key=value …")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Others than loopback need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token_file: Annotated[Path | None, typer.Option(help="A file with the token that clients bring.")] = None,
    name: Annotated[str, typer.Option(help="What clients call the model.")] = "",
    updates: Annotated[bool, typer.Option("--updates", help="Let a trainer send new weights.")] = False,
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's and vLLM's clients expect it."""
    from penstock.cli.serve import serve_model

    serve_model(
        model,
        name=name,
        host=host,
        port=port,
        token_file=token_file,
        updates=updates,
        overrides=overrides or [],
    )


@app.command()
def scale(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")],
    wish: Annotated[str, typer.Argument(metavar="engines=N", help="How many; engines=auto lets it decide.")],
    debug: Debug = False,
) -> None:
    """Give a run that goes on another number of engines. They join and leave while it trains."""
    from penstock.cli.scale import scale_run

    print(scale_run(name, wish))


@app.command()
def worker(
    connect: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where a run listens (launcher.listen).")],
    token_file: Annotated[Path | None, typer.Option(help="A file with the run's token.")] = None,
    debug: Debug = False,
) -> None:
    """Join a run on another machine: this one computes for it as an engine, until the run ends."""
    from penstock.cli.join import join_run

    raise typer.Exit(join_run(connect, token_file))


@app.command(name="list")
def list_entries(
    what: Annotated[str, typer.Argument(help="What to list: algorithms.")] = "algorithms",
    debug: Debug = False,
) -> None:
    """List what the config can name."""
    from penstock.cli.algorithm_list import print_algorithms

    if what != "algorithms":
        raise UserError(f"penstock list knows algorithms, got {what!r}")
    print_algorithms()
