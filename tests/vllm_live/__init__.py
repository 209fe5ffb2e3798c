"""The vLLM engine on real servers: `make test-vllm`. Without `--vllm PATH` these tests are skipped."""
