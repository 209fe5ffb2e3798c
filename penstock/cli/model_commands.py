"""Defines the commands that use a model: to evaluate, export, prompt or serve it."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.shared_arguments import Debug, Overrides, Run, file_and_words
from penstock.errors import UserError


def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A run, a Hugging Face name or folder, an adapter, `builtin` or `builtin-moe`."),
    ],
    config: Annotated[str | None, typer.Argument(help="A YAML config; a run has its own.")] = None,
    overrides: Overrides = None,
    tasks: Annotated[str | None, typer.Option(help="A source of tasks, in the place of eval.tasks.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Answers per task.")] = None,
    correct: Annotated[
        float, typer.Option(help="For pass@k: from which reward on an answer is correct.")
    ] = 1.0,
    debug: Debug = False,
) -> None:
    """Measure mean reward and pass@k of a model on held-out tasks."""
    from penstock.cli.evaluate import evaluate_model, evaluation_config, print_report

    file, words = file_and_words(config, overrides)
    root = evaluation_config(model, file, words, tasks=tasks, samples=samples)
    print_report(evaluate_model(root, correct=correct), model, correct=correct)


def export(
    name: Run,
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


def generate(
    model: Annotated[
        str,
        typer.Argument(help="A run, a Hugging Face name or folder, an adapter, `builtin` or `builtin-moe`."),
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
    from penstock.api import cache_folder
    from penstock.cli.export import find_model, to_stderr
    from penstock.demo.model import open_builtin
    from penstock.engines.config import EngineConfig
    from penstock.engines.embedded.text_generation import Prompt, generate_text
    from penstock.http_server.hub_access import check_hub
    from penstock.models.adapter_folder import model_below
    from penstock.observe.plain_text import plain_block
    from penstock.placement.shares import usable_cores
    from penstock.records import Message, SamplingParams
    from penstock.worker.quiet import quieten

    try:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    quieten()
    found, _ = find_model(model, to_stderr)
    model = open_builtin(found, cache_folder(), log=to_stderr)
    check_hub(model_below(model)[0], to_stderr)
    asked: list[Prompt] = [(Message(role="user", content=prompt),) if chat else prompt for prompt in prompts]
    config = EngineConfig(threads=usable_cores(), record_routing="off")
    if len(asked) == 1:
        generate_text(
            model,
            asked,
            sampling,
            config=config,
            on_text=lambda _, piece: print(plain_block(piece), end="", flush=True),
            say=to_stderr,
        )
        print()
        return
    texts = generate_text(model, asked, sampling, config=config, say=to_stderr)
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt} → {plain_block(text)}")


def serve(
    model: Annotated[
        str, typer.Argument(help="A run, a Hugging Face name or folder, an adapter, or `builtin`.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="engine.key=value …")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Others than loopback need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token_file: Annotated[Path | None, typer.Option(help="A file with the token that clients bring.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name under which clients ask: a proxy's or container's.")
    ] = None,
    name: Annotated[str, typer.Option(help="What clients call the model.")] = "",
    updates: Annotated[bool, typer.Option("--updates", help="Let a trainer send new weights.")] = False,
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP, for OpenAI's and vLLM's clients."""
    from penstock.cli.serve import serve_model

    serve_model(
        model,
        name=name,
        host=host,
        port=port,
        token_file=token_file,
        allow_hosts=tuple(allow_host or ()),
        updates=updates,
        overrides=overrides or [],
    )
