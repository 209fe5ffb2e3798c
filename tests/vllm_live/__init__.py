"""The vLLM engine on real servers: `make live-vllm`. Without `--vllm PATH` these tests are skipped."""
