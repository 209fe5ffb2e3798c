"""SGLang's servers as a kind of engine, taken by path. Written from SGLang's documentation and tested against a
stand-in; not run against a real server.

    penstock train config.yaml engine.kind=plugins/sglang/sglang_kind.py:SGLANG sync.interrupt=drain
"""

from pydantic import Field
from sglang_engine import CAPABILITIES, SglangEngine
from weight_folders import WeightFolders

from penstock.config import Section
from penstock.engines.kinds import EngineKind, EngineParts
from penstock.engines.vllm.server_client import ServerClient
from penstock.errors import EngineLost, UserError


class SglangConfig(Section):
    """SGLang's servers."""

    urls: tuple[str, ...] = ()
    """Servers that run already (`http://host:30000`), one engine each."""
    weights_folder: str = ""
    """Where new weights are written for servers to load; they must see the same path. Empty: a temporary folder."""
    max_context: int = Field(default=0, ge=0)
    """The servers' `--context-length`; 0 takes the model's own limit."""


async def open_sglang(parts: EngineParts) -> SglangEngine:
    """Join the server that `urls` names for this engine."""
    from penstock.models.tokenizer import ChatTokenizer, model_context

    section: SglangConfig = parts.settings
    if not section.urls:
        raise UserError("urls must name a server for SGLang engines, got none")
    client = ServerClient(parts.name, section.urls[0])
    try:
        await client.get("/get_model_info")
    except EngineLost as error:
        await client.close()
        raise UserError(f"urls: there is no server at {client.url}; start it, or correct the URL") from error
    limit = section.max_context or model_context(parts.model, trust_remote_code=parts.trust_remote_code)
    tokenizer = ChatTokenizer(parts.model, trust_remote_code=parts.trust_remote_code)
    return SglangEngine(
        client,
        WeightFolders(parts.receiver, model=parts.model, folder=section.weights_folder or parts.folder),
        name=parts.name,
        versions=parts.versions,
        max_context=min(limit, parts.config.max_context or limit),
        vocab_size=tokenizer.num_tokens,
    )


SGLANG = EngineKind(
    opener=open_sglang,
    settings=SglangConfig,
    can=lambda section, lora: CAPABILITIES,
    num_gpus=lambda settings: 0,
)
