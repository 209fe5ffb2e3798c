"""An engine alone: batched answers with their tokens, logprobs and the version of the weights."""

import asyncio

import penstock


async def main() -> None:
    async with penstock.open_engine("builtin", max_context=64) as engine:
        prompts = [f"{a}+214=" for a in (100, 221, 357, 401)]
        answers = await asyncio.gather(
            *(
                engine.answer(prompt, max_tokens=5, temperature=0.7, seed=a)
                for a, prompt in enumerate(prompts)
            )
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            logprob = answer.logprobs.sum()
            print(f"{prompt}{answer.text}  logprob {logprob:.2f}, versions {set(answer.versions.tolist())}")


if __name__ == "__main__":
    asyncio.run(main())
