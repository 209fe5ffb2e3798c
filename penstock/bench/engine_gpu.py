"""Measures the embedded engine with random weights of a real shape on a GPU (`penstock bench engine --shape …`).

There are three jobs. *Uniform* sends all requests at once, with equal prompts and answers; the time covers
the whole job with prefill and scheduling, with logprobs and versions recorded. *Long-tailed* takes log-normal
answers from a queue, measured until it is empty, and compares with a uniform job at the same mean live
context. *Masks* compares top-p with and without recording what it kept, at about one nat of entropy.
transformers' two ways to serve run beside them.

Settings of the engine are given as to a run (`engine.embedded.kv_dtype=float8`).
"""

import asyncio
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from penstock.bench.engine_contenders import Workload, run_continuous, run_generate
from penstock.bench.shapes import hardware, make_shape, num_matrix_parameters
from penstock.config import Section
from penstock.config.loader import load_config
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.text_generation import FixedWeights
from penstock.models.load import resolve_device
from penstock.records import DEFAULT_POLICY, GenerateRequest, SamplingParams
from penstock.records.interfaces import WeightReceiver

JOBS = ("uniform", "masks", "long_tail")
TOP_P, ENTROPY = 0.95, 1.0
LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sets how large the jobs are."""

    batch: int = 512
    prompt: int = 64
    answer: int = 512
    queued: int = 4096
    median: int = 256
    longest: int = 8192
    masked_answer: int = 256
    repeats: int = 2
    contenders: int = 128
    """Requests for each of transformers' two ways."""
    contenders_answer: int = 64


SMALL = Sizes(
    batch=8,
    prompt=6,
    answer=12,
    queued=32,
    median=6,
    longest=48,
    masked_answer=8,
    repeats=1,
    contenders=4,
    contenders_answer=8,
)
"""For a CPU, where only the logic is tested."""


class Settings(Section):
    """Holds the settings that can be given on the command line."""

    engine: EngineConfig = EngineConfig()


def run(
    json_path: Path | None = None,
    *,
    shape: str,
    settings: Sequence[str] = (),
    only: str | None = None,
    sizes: Sizes | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run all jobs (or `only` one of them), print a table, and write JSON."""
    if only not in (None, *JOBS):
        raise ValueError(f"only must be one of {', '.join(JOBS)}, got {only!r}")
    console = console or Console()
    asked = load_config(Settings, None, settings).engine
    device = resolve_device(asked.device)
    on_gpu = device != "cpu"
    sizes = sizes or (Sizes() if on_gpu else SMALL)
    config = engine_config(device, sizes, asked)
    dtype = getattr(torch, config.dtype)
    contenders = run_contenders(make_shape(shape, device, dtype), sizes) if only is None else {}
    clean(on_gpu)
    model = make_shape(shape, device, dtype)
    measured = asyncio.run(Bench(model, sizes, config, console).run_all(only))
    report = {
        "headline": headline(measured, contenders),
        "hardware": hardware(device),
        "setting": {"shape": shape, "batch": config.embedded.max_batch, "engine": list(settings)},
        "contenders_tokens_per_s": contenders,
        "floor": floor(model, sizes, config),
        **measured,
    }
    console.print(table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def engine_config(device: str, sizes: Sizes, asked: EngineConfig) -> EngineConfig:
    """Return the settings that the jobs need, overridden by those that were given."""
    on_gpu = device != "cpu"
    context = sizes.prompt + sizes.longest
    needed: dict[str, Any] = {
        "max_context": context,
        "device": device,
        "dtype": "bfloat16" if on_gpu else "float32",
    }
    embedded: dict[str, Any] = {
        "max_batch": sizes.batch,
        "prefill_chunk": 8192 if on_gpu else 64,
        "kv_tokens": sizes.batch * min(context, 2048),
        "prefix_cache": False,
        "keep_finished": 0,
        "compile": "on" if on_gpu else "off",
    }
    given = asked.model_dump(exclude_unset=True, exclude={"device"})
    embedded |= given.pop("embedded", {})
    return EngineConfig(**{**needed, **given}, embedded=EmbeddedConfig(**embedded))


def headline(measured: dict[str, Any], contenders: dict[str, float]) -> dict[str, float]:
    """Return the main figures of the jobs that were run."""
    found = {}
    if "uniform" in measured:
        found["tokens_per_s"] = uniform = measured["uniform"]["tokens_per_s"]
        found |= {f"vs_{name}": uniform / rate for name, rate in contenders.items()}
    if "long_tail" in measured:
        found["long_tail_fraction"] = measured["long_tail"]["fraction"]
    if "masks" in measured:
        found |= {name: measured["masks"][name] for name in ("mask_cost", "top_p_cost")}
    return found


def run_contenders(model: Any, sizes: Sizes) -> dict[str, float]:
    """Measure the tokens per second of `generate` on one batch and of a running continuous-batching manager."""
    rng = np.random.default_rng(0)
    shape = (sizes.contenders, sizes.prompt)
    prompts = rng.integers(0, model.config.vocab_size, size=shape, dtype=np.int32)
    load = Workload(prompts=prompts, lengths=(sizes.contenders_answer,) * sizes.contenders)
    warm = Workload(prompts=prompts, lengths=(2,) * sizes.contenders)
    rates = {}
    for name, contender in (("generate", run_generate), ("continuous_batching", run_continuous)):
        contender(model, warm)
        rates[name] = load.num_useful / contender(model, load)
    return rates


class Bench:
    """Runs jobs one after another on one engine."""

    def __init__(
        self,
        model: Any,
        sizes: Sizes,
        config: EngineConfig,
        console: Console,
        *,
        receiver: WeightReceiver | None = None,
        policies: Sequence[str] = (DEFAULT_POLICY,),
    ) -> None:
        """Requests go to the `policies` in turn."""
        self.sizes = sizes
        self.vocab = int(model.config.vocab_size)
        self.console = console
        self.model = model
        began = time.perf_counter()
        self.engine = EmbeddedEngine(model, config=config, receiver=receiver or FixedWeights())
        self._made_s = time.perf_counter() - began
        self._policies = policies
        self._number = 0
        self._rng = np.random.default_rng(1)

    async def run_all(self, only: str | None = None) -> dict[str, Any]:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self.engine.run())
            began = time.perf_counter()
            self.engine.warm_up()
            await self.job([8] * self.sizes.batch)
            gc.collect()
            gc.freeze()  # as a worker does when it has started
            start_s = self._made_s + time.perf_counter() - began
            self.console.print(f"started in {start_s:.1f} s")
            measured: dict[str, Any] = {"start_s": start_s}
            if only in (None, "uniform"):
                measured["uniform"] = uniform = await self.uniform(self.sizes.answer)
                self.console.print(f"uniform: {uniform['tokens_per_s']:,.0f} tokens/s")
            if only in (None, "masks"):
                measured["masks"] = masks = await self.masks()
                self.console.print(f"masks: {masks['mask_cost']:+.1%}, top-p {masks['top_p_cost']:+.1%}")
            if only in (None, "long_tail"):
                measured["long_tail"] = await self.long_tail()
            await self.engine.close()
            await asyncio.wait([serving])
        return measured

    async def uniform(self, answer: int) -> dict[str, float]:
        """Return the best of some rounds of a job in which all answers are equally long."""
        rounds = [await self.job([answer] * self.sizes.batch) for _ in range(self.sizes.repeats)]
        tokens = answer * self.sizes.batch
        return {"tokens_per_s": tokens / min(rounds), "seconds": min(rounds), "answer": answer}

    async def masks(self) -> dict[str, float]:
        """Measure the same job without truncation, with top-p, and with top-p and its masks recorded."""
        lengths = [self.sizes.masked_answer] * self.sizes.batch
        heat = self.temperature_of_one_nat()
        arms: dict[str, dict[str, Any]] = {
            "plain": {},
            "top_p": {"top_p": TOP_P},
            "recorded": {"top_p": TOP_P, "record": True},
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(self.sizes.repeats + 1):
            for name, options in arms.items():
                seconds[name].append(await self.job(lengths, temperature=heat, **options))
        best = {name: min(times[1:]) for name, times in seconds.items()}
        return {
            "mask_cost": best["recorded"] / best["top_p"] - 1,
            "top_p_cost": best["top_p"] / best["plain"] - 1,
            "both_cost": best["recorded"] / best["plain"] - 1,
            "temperature": heat,
            **{f"{name}_s": value for name, value in best.items()},
        }

    async def long_tail(self) -> dict[str, float]:
        """Measure tokens per second until no request waits, against a uniform job of the same mean live context."""
        sigma = np.log(5) / 1.2815515655446004
        raw = self.sizes.median * np.exp(sigma * self._rng.standard_normal(self.sizes.queued))
        lengths = [int(length) for length in np.clip(np.rint(raw), 1, self.sizes.longest)]
        before = (await self.engine.report()).counters["tokens"]
        began = time.perf_counter()
        job = asyncio.create_task(self.job(lengths))
        contexts, batches, report = [], [], await self.engine.report()
        while not job.done() and (report.num_waiting > 0 or report.counters["tokens"] == before):
            await asyncio.sleep(LOOK_EVERY_S)
            live = self.engine.live_tokens()
            if live:
                contexts.append(statistics.fmean(live))
                batches.append(len(live))
            report = await self.engine.report()
        seconds = time.perf_counter() - began
        rate = (report.counters["tokens"] - before) / seconds
        self.console.print(f"long-tailed: {rate:,.0f} tokens/s in {seconds:.1f} s")
        job.cancel()
        await asyncio.wait([job])
        context = statistics.fmean(contexts) if contexts else float(self.sizes.prompt)
        answer = min(max(2, round(2 * (context - self.sizes.prompt))), self.sizes.longest)
        uniform = await self.uniform(answer)
        return {
            "fraction": rate / uniform["tokens_per_s"],
            "tokens_per_s": rate,
            "uniform_tokens_per_s": uniform["tokens_per_s"],
            "uniform_answer": answer,
            "mean_live_context": context,
            "mean_batch": statistics.fmean(batches) if batches else 0.0,
            "seconds": seconds,
        }

    async def job(
        self,
        lengths: list[int],
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        record: bool = False,
        routes: bool = False,
    ) -> float:
        """Return the seconds from the first request to the last token. `record` keeps sampling masks, `routes`
        experts."""

        def request(length: int) -> GenerateRequest:
            self._number += 1
            return GenerateRequest(
                id=str(self._number),
                policy=self._policies[self._number % len(self._policies)],
                token_ids=self._rng.integers(0, self.vocab, self.sizes.prompt).astype(np.int32),
                sampling=SamplingParams(
                    max_tokens=length, temperature=temperature, top_p=top_p, seed=self._number
                ),
                chunk_tokens=64,
                record_sampling_mask=record,
                record_routing=routes,
            )

        async def ask(request: GenerateRequest) -> None:
            async for _ in self.engine.generate(request):
                pass

        requests = [request(length) for length in lengths]
        began = time.perf_counter()
        await asyncio.gather(*map(ask, requests))
        seconds = time.perf_counter() - began
        for scope in {one.blob_scope for one in requests}:
            self.engine.blobs.delete(scope)
        return seconds

    @torch.inference_mode()
    def temperature_of_one_nat(self) -> float:
        """Return the temperature at which next tokens have about `ENTROPY` nats: random weights have far more."""
        device = next(self.model.parameters()).device
        states = torch.randn(64, self.model.config.hidden_size, device=device)
        states = (states / states.square().mean(-1, keepdim=True).sqrt()).to(self.model.dtype)
        logits = self.model.get_output_embeddings()(states).float()
        low, high = 1e-3, 10.0
        for _ in range(40):
            middle = (low * high) ** 0.5
            scaled = torch.log_softmax(logits / middle, dim=-1)
            entropy = float(-(scaled.exp() * scaled).nansum(dim=-1).mean())
            low, high = (middle, high) if entropy < ENTROPY else (low, middle)
        return float((low * high) ** 0.5)


def floor(model: Any, sizes: Sizes, engine: EngineConfig) -> dict[str, float]:
    """Compute what a decode step of the uniform job must at least do: multiply, and read weights and cache."""
    config = model.config
    parameters = num_matrix_parameters(model)
    dim = config.hidden_size // config.num_attention_heads
    key_bytes = 1 if engine.embedded.kv_dtype == "float8" else model.dtype.itemsize
    per_token = 2 * config.num_key_value_heads * dim * config.num_hidden_layers * key_bytes
    batch = min(engine.embedded.max_batch, sizes.batch)
    context = sizes.prompt + sizes.answer / 2
    return {
        "step_tflop": 2.0 * parameters * batch / 1e12,
        "step_weights_gb": parameters * model.dtype.itemsize / 1e9,
        "step_cache_gb": per_token * context * batch / 1e9,
        "prefill_tflop": 2.0 * parameters * sizes.batch * sizes.prompt / 1e12,
    }


def clean(on_gpu: bool) -> None:
    """Free the previous engine and its compiled code, which counts towards torch's limit."""
    gc.unfreeze()
    torch._dynamo.reset()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def table(report: dict[str, Any]) -> Table:
    setting = report["setting"]
    parts = [setting["shape"], f"batch {setting['batch']}", report["hardware"]["device"], *setting["engine"]]
    shown = Table("", "tokens/s", "", title=", ".join(parts))
    shown.add_row("start", "", f"{report['start_s']:.1f} s")
    if uniform := report.get("uniform"):
        shown.add_row("uniform", f"{uniform['tokens_per_s']:,.0f}", f"{uniform['seconds']:.2f} s")
    if tail := report.get("long_tail"):
        share = f"{tail['fraction']:.2f} of uniform at context {tail['mean_live_context']:.0f}"
        shown.add_row("long-tailed", f"{tail['tokens_per_s']:,.0f}", share)
    for name, rate in report["contenders_tokens_per_s"].items():
        shown.add_row(f"transformers {name.replace('_', ' ')}", f"{rate:,.0f}", "")
    if masks := report.get("masks"):
        shown.add_row("top-p 0.95 at one nat", "", f"{masks['top_p_cost']:+.1%} time")
        shown.add_row("and its masks recorded", "", f"{masks['mask_cost']:+.1%} more")
    return shown
