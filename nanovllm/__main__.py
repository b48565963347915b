"""`python -m nanovllm` is the command `nanovllm`."""

from nanovllm.serve.cli import main

main()
