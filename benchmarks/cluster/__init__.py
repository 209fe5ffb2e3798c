"""`python -m benchmarks ray`: a Ray cluster of several nodes on this machine, each in namespaces of its own."""
