"""Throughput and latency, behind `nanovllm bench`, which lists all workloads and arguments with `--help`.

`command.py` reads the arguments, asks `throughput.py` or `sweeps.py` for requests, gives them to each of `engines/`,
and prints the results as tables or draws them. `host.py`, `http.py`, `profiling.py` and `calls.py` measure something
else instead: the host's part of a step, servers, kernels, and one call beside another. `http.py` starts `servers.py`'s
processes, and runs `clients.py` in others.
"""
