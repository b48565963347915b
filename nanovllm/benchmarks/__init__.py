"""Measures throughput and latency: the command `nanovllm bench`. `nanovllm bench --help` lists workloads and flags.

`command.py` reads the arguments, takes requests from `throughput.py` or `sweeps.py`, gives them to each engine in
`engines/`, and prints or draws the results. Four modules measure something else: `host.py` the host's part of a step,
`http.py` servers, `profiling.py` kernels, and `calls.py` two calls next to each other. `http.py` starts a server with
`servers.py`, and runs `clients.py` in several processes.
"""
