"""Trainer steps in a loop of one's own: sample, score, train, and let the engine take the new weights."""

import asyncio
import random

import penstock

STEPS, GROUPS, ATTEMPTS = 10, 16, 8


async def main() -> list[float]:
    rewards, draw = [], random.Random(0)
    async with (
        penstock.open_engine("builtin", max_context=64) as engine,
        penstock.open_trainer("builtin", steps=STEPS, learning_rate=1e-3) as trainer,
    ):

        async def group(number: int) -> penstock.ScoredGroup:
            a, b = draw.randint(100, 449), draw.randint(100, 449)
            asked = (engine.answer(f"{a}+{b}=", max_tokens=5) for _ in range(ATTEMPTS))
            answers = await asyncio.gather(*asked)
            values = [float(answer.text == str(a + b)) for answer in answers]
            return penstock.ScoredGroup.of(answers, values, number=number)

        for step in range(STEPS):
            groups = await asyncio.gather(*(group(step * GROUPS + place) for place in range(GROUPS)))
            reward = (await trainer.step(groups))["reward_mean"]
            async with trainer.published() as update:
                receipt = await engine.update(update)
            rewards.append(reward)
            print(f"step {step + 1}: reward {reward:.3f}; the engine serves version {receipt.version}")
    return rewards


if __name__ == "__main__":
    asyncio.run(main())
