"""What a call of an agent costs beside the generation itself: CPU time of client and server, in one process.

`python tools/door_cost.py` asks for chat answers of four tokens through the front door, with a key for each, and
for the same turns from a rollout directly."""

import asyncio
import tempfile
import time

import aiohttp

from penstock.demo.model import ToolRecipe
from penstock.demo.tool_start import make_tool_tokenizer
from penstock.engines.scripted import ScriptedEngine
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import SamplingParams, Task
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.serve.agents.agent_server import AgentServer

CALLS, WARM_UP = 400, 30
BODY = {"model": "policy", "messages": [{"role": "user", "content": "214+387="}]}


async def main(tokenizer: ChatTokenizer) -> None:
    ends = tokenizer.stop_token_ids
    engine = ScriptedEngine(lambda request: [*tokenizer.encode("601"), *ends])
    door = AgentServer(engine, tokenizer, model="m", max_context=256)
    await door.open()

    def rollout(index: int) -> Rollout:
        task, sampling = Task(id="t", prompt="214+387="), SamplingParams(max_tokens=8, stop_token_ids=ends)
        return Rollout(EpisodeSpec(group=0, index=index, task=task, sampling=sampling), engine, tokenizer)

    async with aiohttp.ClientSession() as http:

        async def call(index: int) -> None:
            endpoint = door.admit(rollout(index))
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with http.post(f"{endpoint.base_url}/chat/completions", json=BODY, headers=headers) as got:
                await got.json()
            door.dismiss(endpoint)

        for index in range(WARM_UP):
            await call(index)
        start = time.process_time()
        for index in range(CALLS):
            await call(index)
        through = time.process_time() - start
    start = time.process_time()
    for index in range(CALLS):
        await rollout(index).generate("214+387=")
    directly = time.process_time() - start
    await door.close()
    each, alone = through / CALLS * 1e3, directly / CALLS * 1e3
    print(f"a call: {each:.2f} ms of a core, a turn of the rollout alone: {alone:.2f} ms")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_tool_tokenizer(ToolRecipe()).save_pretrained(folder)
        asyncio.run(main(ChatTokenizer(folder)))
