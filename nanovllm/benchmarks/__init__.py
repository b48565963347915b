"""Measures throughput and latency for `nanovllm bench`, whose `--help` lists workloads and flags.

`command.py` gets requests from `throughput.py` or `sweeps.py`, runs them on each engine in `engines/`, and prints or
draws the results. `host.py` measures the host time of a step, `profiling.py` measures kernels, and `calls.py` compares
the speed of two calls. `http.py` starts servers with `servers.py`, and sends requests from several processes that run
`clients.py`.
"""
