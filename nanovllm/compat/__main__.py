"""`python -m nanovllm.compat MODULE ...` runs a program that imports vLLM, with this package instead of vLLM."""

import os
import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from nanovllm.utils.waiting import waiting_for

USAGE = """usage: python -m nanovllm.compat MODULE_OR_FILE [ARGUMENT ...]

Run a program that imports vLLM for offline generation, with nano-vllm in vLLM's place. For example:

    python -m nanovllm.compat lm_eval --model vllm --model_args pretrained=FOLDER --tasks gsm8k
    python -m nanovllm.compat my_program.py"""


def refuse(problem: str) -> NoReturn:
    print(problem, file=sys.stderr)
    sys.exit(2)


if len(sys.argv) < 2:
    refuse(USAGE)
if sys.argv[1] in ("-h", "--help"):
    print(USAGE)
    sys.exit()
if is_file := sys.argv[1].endswith(".py"):
    if not os.path.isfile(sys.argv[1]):
        refuse(f"nanovllm.compat: error: there is no file {sys.argv[1]!r}")
elif find_spec(sys.argv[1].partition(".")[0]) is None:
    advice = "install the package that has it, or name a file that ends in .py"
    refuse(f"nanovllm.compat: error: there is no module {sys.argv[1]!r}: {advice}")

with waiting_for("Importing PyTorch"):
    import_module("nanovllm.compat.vllm").install()
del sys.argv[0]
if is_file:
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # as Python does
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
