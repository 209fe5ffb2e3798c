"""Runs clients of `penstock bench serve`: `python -m penstock.bench.serve_clients URL ROUTE COUNT TOKENS`.

They write a line when they are ready, begin at a line of their standard input, and report at the end how many
tokens they have read.
"""

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

from penstock.bench.serve_prompts import prompt, prompt_text


async def check(response: aiohttp.ClientResponse) -> None:
    """Exit on a refusal, which must not count as a quick answer."""
    if response.status != 200:
        raise SystemExit(f"{response.url.path} answered {response.status}: {await response.text()}")


async def read_stream(session: aiohttp.ClientSession, address: str, index: int, tokens: int) -> int:
    """Count the token ids of one answer, event by event."""
    sampling = {"max_tokens": tokens, "ignore_eos": True}
    body = {"token_ids": prompt(index), "sampling_params": sampling, "stream": True}
    made = 0
    async with session.post(f"{address}/inference/v1/generate", json=body) as response:
        await check(response)
        async for line in response.content:
            if line.startswith(b"data: {"):
                made += len(json.loads(line[6:])["choices"][0]["token_ids"])
    return made


async def read_text(session: aiohttp.ClientSession, address: str, index: int, tokens: int) -> int:
    body: dict[str, Any] = {"prompt": prompt(index), "max_tokens": tokens, "ignore_eos": True}
    async with session.post(f"{address}/v1/completions", json=body) as response:
        await check(response)
        return int((await response.json())["usage"]["completion_tokens"])


async def read_chat(session: aiohttp.ClientSession, address: str, index: int, tokens: int) -> int:
    """Read a streamed chat, event by event; the last event says how many tokens there were."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt_text(index)}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    made = 0
    async with session.post(f"{address}/v1/chat/completions", json=body) as response:
        await check(response)
        async for line in response.content:
            if line.startswith(b"data: {"):
                made = json.loads(line[6:]).get("usage", {}).get("completion_tokens", made)
    return made


READERS = {"generate": read_stream, "completions": read_text, "chat": read_chat}


async def main(address: str, route: str, count: int, tokens: int) -> None:
    read = READERS[route]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began = time.time()
        made = await asyncio.gather(*(read(session, address, index, tokens) for index in range(count)))
    print(json.dumps({"tokens": sum(made), "began": began, "ended": time.time()}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
