"""`python -m benchmarks scale`: a trainer of several ranks against one, and an update from ranks to engines."""
