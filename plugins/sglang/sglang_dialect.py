"""SGLang's native `/generate` as its documentation describes it: requests as JSON, answers as events."""

import json
from typing import Any

from penstock.engines.vllm.dialect import Event
from penstock.errors import EngineLost
from penstock.records import GenerateRequest

GENERATE = "/generate"


def body_of(request: GenerateRequest, *, max_context: int) -> dict[str, Any]:
    """The whole request as JSON."""
    sampling, done = request.sampling, request.num_resumed
    return {
        "rid": request.id,
        "input_ids": request.token_ids.tolist(),
        "stream": True,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": min(sampling.max_tokens, max_context - request.num_prompt) - done,
            "min_new_tokens": max(0, sampling.min_tokens - done),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "sampling_seed": None if sampling.seed is None else (sampling.seed + done) % 2**31,
            "ignore_eos": True,
            "skip_special_tokens": False,
        },
    }


class CumulativeStream:
    """Each message repeats the whole output so far; what is new of it is an event."""

    def __init__(self) -> None:
        self._seen = 0

    def parse(self, line: bytes) -> Event | None:
        text = line.strip()
        if not text.startswith(b"data:"):
            return None
        data = text.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return None
        message = json.loads(data)
        if "error" in message:
            raise EngineLost(f"SGLang says: {message['error']}")
        meta = message["meta_info"]
        # [logprob, token id, text] of every output token.
        rows = meta.get("output_token_logprobs") or ()
        new, self._seen = rows[self._seen :], len(rows)
        reason = meta.get("finish_reason")
        if not new and reason is None:
            return None
        return Event(
            token_ids=tuple(int(row[1]) for row in new),
            logprobs=tuple(float(row[0]) for row in new),
            finish_reason=reason["type"] if isinstance(reason, dict) else reason,
        )
