"""`python -m nanovllm.compat MODULE ...` runs a program that imports vLLM with this package in vLLM's place."""

import os
import runpy
import sys

from nanovllm.compat.vllm import install

if len(sys.argv) < 2:
    sys.exit("usage: python -m nanovllm.compat MODULE_OR_FILE ...")
install()
del sys.argv[0]
if sys.argv[0].endswith(".py"):
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # as Python does
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
