"""Runs inside vLLM's processes: a weight transfer backend, and the methods that engines call on vLLM's workers.

vLLM finds `register` through the entry point `vllm.general_plugins`, wherever penstock is installed beside it.
"""

BACKEND = "penstock"
"""`--weight-transfer-config '{"backend": "penstock"}'`."""


def register() -> None:
    """Register the backend; vLLM calls this in each of its processes. The engine reports a vLLM that is too old
    for it."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "penstock.vllm_plugin.transfer_backend", "PenstockTransfer"
        )
