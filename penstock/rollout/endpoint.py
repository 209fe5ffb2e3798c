"""Where an agent finds its episode: what it needs to know, and nothing of how it is served."""

import msgspec


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An address that speaks OpenAI's API, for one episode."""

    base_url: str
    """What OpenAI's client calls `base_url`."""
    api_key: str
    """The key of the episode. Whoever has it is the episode, until that is over."""
    model: str
    """A name that the address knows the policy by."""

    @property
    def episode_url(self) -> str:
        """`GET` gives the task, `POST …/reward` takes the reward."""
        return f"{self.base_url.removesuffix('/v1')}/episodes/{self.api_key}"
