"""Measures throughput and latency for `nanovllm bench`. `nanovllm bench --help` lists workloads and flags.

`command.py` reads the arguments, gets requests from `throughput.py` or `sweeps.py`, runs them on each engine in
`engines/`, and prints or draws the results. Four modules measure other things. `host.py` measures the host time of a
step, `profiling.py` measures kernels, and `calls.py` compares two calls. `http.py` measures servers, which it starts
with `servers.py`, and runs `clients.py` in several processes.
"""
