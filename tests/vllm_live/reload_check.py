"""Run by vLLM's own Python: loads a model, reloads it with other weights, and prints what the layers hold as JSON.

python tests/vllm_live/reload_check.py FIRST SECOND     folders of two models of one shape
"""

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPTS = [[1, 5, 9, 2], [7, 3, 3, 8, 4]]


def logprobs(llm: Any) -> list[list[float]]:
    """Of the prompts' own tokens."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], asked, use_tqdm=False)
    return [
        [
            row[token].logprob
            for token, row in zip(out.prompt_token_ids, out.prompt_logprobs, strict=True)
            if row
        ]
        for out in outputs
    ]


def reload(worker: Any, folder: str, damage: bool) -> dict[str, Any]:
    """Load the weights of another model into the worker's, and say what was found."""
    from transformers import AutoModelForCausalLM

    from penstock.errors import FingerprintMismatch
    from penstock.models.published import published_tensors
    from penstock.sync.fingerprint import fingerprints
    from penstock.vllm_plugin.weight_loading import load_weights

    tensors = {
        name: each.detach()
        for name, each in published_tensors(AutoModelForCausalLM.from_pretrained(folder)).items()
    }
    expected = fingerprints(tensors)
    if damage:
        name = next(name for name in tensors if "q_proj" in name)
        tensors[name] = tensors[name].flip(0).contiguous()
    model, config = worker.model_runner.model, worker.vllm_config.model_config
    try:
        _, unverified = load_weights(model, config, tensors, expected, 1)
    except FingerprintMismatch as error:
        return {"error": str(error)}
    return {"error": "", "unverified": unverified}


def main(first: str, second: str) -> None:
    from vllm import LLM

    llm = LLM(first, dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)
    found: dict[str, Any] = {"first": logprobs(llm)}
    found["reloaded"] = reload(worker, second, False)
    found["second"] = logprobs(llm)
    found["damaged"] = reload(worker, first, True)
    found["again"] = reload(worker, first, False)
    found["third"] = logprobs(llm)
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
