"""How a worker opens the SGLang engine: join a server, and look at it. Named in `engines/kinds.py`."""

from penstock.engines.kinds import EngineParts
from penstock.engines.sglang.sglang_engine import SglangEngine
from penstock.engines.sglang.weight_folders import WeightFolders
from penstock.engines.vllm.server_client import ServerClient
from penstock.errors import EngineLost, UserError
from penstock.models.tokenizer import ChatTokenizer, model_context


async def open_sglang(parts: EngineParts) -> SglangEngine:
    """The server that `engine.sglang.urls` names for this engine."""
    section = parts.config.sglang
    if not section.urls:
        raise UserError("engine.sglang.urls must name a server for engine.kind=sglang, got none")
    if parts.lora is not None or parts.adapter:
        raise UserError("engine.kind=sglang serves no adapters; use engine.kind=vllm or embedded")
    client = ServerClient(parts.name, section.urls[0])
    try:
        await client.get("/get_model_info")
    except EngineLost as error:
        await client.close()
        raise UserError(
            f"engine.sglang.urls: there is no server at {client.url}; start it, or correct the URL"
        ) from error
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
