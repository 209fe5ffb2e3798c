"""What runs inside vLLM's processes: our weight transfer backend, and the questions that engines ask its workers.

vLLM finds `register` through the entry point `vllm.general_plugins`, wherever penstock is installed beside it.
"""

BACKEND = "penstock"
"""`--weight-transfer-config '{"backend": "penstock"}'`."""


def register() -> None:
    """Called by vLLM in each of its processes. A vLLM without the registry is too old; the engine says so."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "penstock.vllm_plugin.transfer_backend", "PenstockTransfer"
        )
