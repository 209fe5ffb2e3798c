"""Tests mirror the source: who looks for the tests of a module finds them at the same path."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "penstock"

ACROSS_MODULES = {
    "test_end_to_end.py": "whole runs",
    "test_examples.py": "every example",
    "test_deterministic_runs.py": "whole runs, killed and resumed",
    "test_lora_runs.py": "whole runs of adapters",
    "test_parallel_runs.py": "whole runs with several ranks",
    "test_docs.py": "what the docs show",
    "test_own_parts.py": "whole runs with parts of a user's own",
    "test_routing_runs.py": "whole runs of mixtures of experts",
    "test_installation.py": "what pip may take",
    "test_layers.py": "imports of all modules",
    "test_mirror.py": "this",
    "http_server/test_every_door.py": "every HTTP server of ours",
    "worker/test_main.py": "the entry point of a worker",
    "scoring/test_contract.py": "one suite over every scorer",
    "durability/test_full_disk.py": "journal and blobs on a disk without room",
    "engines/embedded/adapters/test_policy_schedules.py": "the engine with adapters of several policies",
    "engines/embedded/test_exact.py": "the engine against plain forward passes",
    "engines/embedded/test_real_model.py": "the engine with a real model",
    "engines/embedded/test_staging.py": "the engine while updates are staged",
    "engines/embedded/test_swaps.py": "the engine under many updates",
    "engines/embedded/cuda/kernels/test_compiled.py": "every kernel through the compiler",
    "processes/launchers/test_task_launcher.py": "the launcher of tests, by the launchers' contract",
    "run/test_full_disk_run.py": "the controller and a disk without room",
    "run/test_lost_blobs.py": "the controller and its blob store",
    "run/test_shared_gpu.py": "the controller on a GPU that both sides share",
    "tools/test_several_gpus.py": "a script of the shell",
    "sync/test_processes.py": "engines in processes of their own over each transport",
    "sync/test_runs.py": "whole runs over each transport",
    "engines/vllm/test_runs.py": "whole runs on servers that die",
    "browser/test_large_run.py": "a long run in a browser",
    "browser/test_page.py": "the page in a browser",
    "browser/test_report.py": "a report in a browser",
    "browser/test_tokens.py": "tokens in a browser",
    "verifiers_live/test_live_environment.py": "an environment of verifiers through the front door",
    "browser/test_trace_in_perfetto.py": "a trace in Perfetto's page",
    "vllm_live/test_live_adapters.py": "adapters on a real vLLM server",
    "vllm_live/test_live_contract.py": "the engine contract on a real vLLM server",
    "vllm_live/test_live_pool.py": "pools of real vLLM servers",
    "vllm_live/test_live_runs.py": "whole runs on a real vLLM server",
    "vllm_live/test_live_reload.py": "layers that are reloaded inside vLLM",
    "vllm_live/test_live_weights.py": "weights into a real vLLM server",
    "ray_live/test_live_autoscaler.py": "a run on nodes that Ray's autoscaler adds",
    "ray_live/test_live_launcher.py": "the launcher contract on real Ray nodes",
    "ray_live/test_live_runs.py": "whole runs over real Ray nodes, some of which are lost",
    "trainer/test_algorithms.py": "every algorithm through the trainer",
    "trainer/test_routing_exactness.py": "engine and trainer with the same experts",
    "trainer/test_routing_replay.py": "routes from an engine to the metrics of a step",
    "trainer/test_token_columns.py": "columns from a score to the loss",
}
"""Tests of no single module, and what they are of."""


def has_source(test: Path) -> bool:
    """In the package, or beside it: tools, benchmarks."""
    source = test.parent / test.name.removeprefix("test_")
    modules = (PACKAGE / source, PACKAGE.parent / source)
    return any(module.exists() or (module.with_suffix("") / "__init__.py").exists() for module in modules)


def test_every_test_file_has_its_module_or_says_what_it_is_of() -> None:
    tests = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    strays = sorted(str(test) for test in tests if not has_source(test) and str(test) not in ACROSS_MODULES)
    assert strays == []


def test_the_list_names_only_files_that_are_there() -> None:
    assert [name for name in ACROSS_MODULES if not (TESTS / name).exists()] == []


def test_no_two_modules_have_one_name() -> None:
    """Who searches for a name finds one idea. Every room may have its own `config.py`."""
    names = Counter(
        path.name for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "config.py")
    )
    assert [name for name, count in names.items() if count > 1] == []
