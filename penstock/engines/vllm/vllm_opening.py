"""Opens the vLLM engine in a worker: starts or joins a server, and checks it."""

import asyncio
from typing import Any

from penstock.engines.kinds import EngineParts
from penstock.engines.vllm.adapter_files import AdapterFiles
from penstock.engines.vllm.routed_experts import read_layout
from penstock.engines.vllm.server import Server
from penstock.engines.vllm.server_check import (
    SAMPLE,
    check_experts,
    check_routes,
    check_sizes,
    check_tokenizer,
    describe,
    served_context,
)
from penstock.engines.vllm.server_client import ServerClient
from penstock.engines.vllm.server_process import ServerProcess, ServerSettings
from penstock.engines.vllm.vllm_engine import VllmEngine
from penstock.engines.vllm.weight_calls import WeightCalls
from penstock.errors import UserError
from penstock.models.load import resolve_device
from penstock.models.tokenizer import ChatTokenizer, model_context

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts"),
)


async def open_vllm(parts: EngineParts) -> VllmEngine:
    """Start a server, or join the one that `engine.vllm.urls` names for this engine."""
    section = parts.config.vllm
    process = None
    if not section.urls:
        process = ServerProcess(parts.name, server_settings(parts), folder=parts.folder)
        await process.start()
    url = section.urls[0] if process is None else process.url
    client = ServerClient(parts.name, url)
    try:
        return await _open(parts, client, process)
    except BaseException:
        await client.close()
        if process is not None:
            await process.stop()
            process.remove()
        raise


def server_settings(parts: EngineParts) -> ServerSettings:
    config, section = parts.config, parts.config.vllm
    device = resolve_device(parts.device if config.device == "auto" else config.device)
    return ServerSettings(
        model=parts.model,
        command=section.command,
        device=device,
        dtype=config.dtype,
        max_context=config.max_context
        or model_context(parts.model, trust_remote_code=parts.trust_remote_code),
        max_batch=section.max_batch,
        threads=parts.threads,
        cache_gb=section.cache_gb,
        memory_share=section.memory_share,
        tensor_parallel=section.tensor_parallel,
        trust_remote_code=parts.trust_remote_code,
        adapter_rank=0 if parts.lora is None else parts.lora.rank,
        returns_experts=config.record_routing == "on",
        arguments=section.arguments,
        start_timeout_s=section.start_timeout_s,
    )


async def _open(parts: EngineParts, client: ServerClient, process: ServerProcess | None) -> VllmEngine:
    await check_routes(client)
    described = await describe(client)
    mine = await asyncio.to_thread(_sizes, parts)
    check_sizes(client.url, described["sizes"], mine, model=parts.model)
    if described["dtype"] != parts.config.dtype:
        raise UserError(
            f"the server at {client.url} computes in {described['dtype']}, and engine.dtype is "
            f"{parts.config.dtype}; set engine.dtype={described['dtype']}, or start it with --dtype "
            f"{parts.config.dtype}"
        )
    layout = None
    if parts.config.record_routing == "on":
        check_experts(client.url, described)
        layout = await asyncio.to_thread(read_layout, parts.model, trust_remote_code=parts.trust_remote_code)
    tokenizer = ChatTokenizer(parts.model, trust_remote_code=parts.trust_remote_code)
    await check_tokenizer(client, tokenizer.encode(SAMPLE), model=parts.model)
    version = next(iter(parts.versions.values()))
    server = Server(
        client,
        lambda client: WeightCalls(client, interface=parts.interface, token=parts.sync_token),
        process=process,
        restarts=parts.config.vllm.restarts,
    )
    await server.weights.open(version)
    context = await served_context(client)
    adapters = (
        AdapterFiles(
            parts.receiver, model=parts.model, folder=parts.config.vllm.adapter_folder or parts.folder
        )
        if parts.lora is not None
        else None
    )
    return VllmEngine(
        server,
        name=parts.name,
        versions=parts.versions,
        max_context=min(context, parts.config.max_context or context),
        vocab_size=int(described["sizes"]["vocab_size"]),
        adapters=adapters,
        blobs=parts.blobs,
        layout=layout,
    )


def _sizes(parts: EngineParts) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(parts.model, trust_remote_code=parts.trust_remote_code)
    text = config.get_text_config()
    return {name: getattr(text, name, None) for name in SIZES}
