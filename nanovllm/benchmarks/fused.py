"""Implements `nanovllm show-fused MODEL`, which lists the modules that are fused on CUDA.

With --measure, the command also measures how long steps take.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from nanovllm.benchmarks.processes import run_in_process
from nanovllm.benchmarks.tables import print_table
from nanovllm.config import Config
from nanovllm.utils.flags import Parser
from nanovllm.utils.libraries import import_libraries
from nanovllm.utils.model_files import check_model
from nanovllm.utils.waiting import waiting_for

# groups of fused forms, which --measure disables one at a time; each value lists suffixes of names in FORMS
PARTS = {
    "attention: norms, RoPE and store": ("Attention",),
    "feed-forward: product and activation, experts": ("MLP", "MoE"),
    "delta rule: its projections": ("GatedDeltaNet",),
    "between them: norms and sums": ("DecoderLayer", "HybridLayer", "Qwen3Model"),
    "all": ("",),
}
STEPS = {"1 sequence": (1, 128, 129), "32 sequences": (32, 128, 129), "a prompt of 4,000": (1, 4000, 1)}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--quantization", choices=["fp8", "int8", "int4"], help="quantize the weights, as the engine does"
    )
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto", help="dummy makes random weights")
    text = "run the model on this GPU without one group of forms at a time, and print how much longer steps take"
    parser.add_argument("--measure", action="store_true", help=text)
    parser.set_defaults(run=show_fused)


def show_fused(options: argparse.Namespace) -> int:
    check_model(options.model)
    import_libraries({"device": "cpu"})  # --measure runs the model in other processes
    import torch

    if options.measure and not torch.cuda.is_available():
        raise ValueError("--measure: needs a CUDA device")
    settings = {"quantization": options.quantization, "load_format": options.load_format}
    with waiting_for(f"Reading {options.model}"):
        model = make_fused(options.model, settings)
    forms = Counter((plain_name(x), x.what) for x in model.modules() if hasattr(x, "what"))
    rows = [[plain, str(count), what] for (plain, what), count in forms.items()]
    print_table(f"{options.model}: what CUDA replaces with fused forms", ["module", "number", ""], rows)
    kept = Counter(type(x).__name__ for x in model.modules() if stays_plain(x))
    names = ", ".join(f"{number} {name}" for name, number in kept.items())
    print(f"\nplain because of their parts, although a fused form exists: {names or 'none'}")
    if options.measure:
        measure(options.model, settings, [plain for plain, _ in forms])
    return 0


def make_fused(model: str, settings: dict[str, Any]) -> Any:
    """Return the model with its fused forms. The model is on the meta device, where weights take no memory."""
    import torch

    from nanovllm.fused import fuse
    from nanovllm.models import make_model

    config = Config.create(model, {"device": "cpu", **settings}).model_config
    with torch.device("meta"):
        module = make_model(config, 16)
    if config.quantization is not None:
        config.quantization.prepare(module, torch.device("meta"))
    fuse(module)
    return module


def plain_name(module: Any) -> str:
    """Return the class name that a module had before it was fused."""
    return type(module).__bases__[1].__name__


def stays_plain(module: Any) -> bool:
    from nanovllm.fused import find_form

    return find_form(module) is not None and not hasattr(module, "what")


@contextmanager
def without(names: tuple[str, ...]) -> Iterator[None]:
    """During a `with` block, disable the fused forms of classes whose names end with one of `names`."""
    from nanovllm.fused import FORMS

    kept = dict(FORMS)
    for function in kept:
        if function.removesuffix(".forward").endswith(names):
            del FORMS[function]
    try:
        yield
    finally:
        FORMS.update(kept)


def step_times(
    model: str, settings: dict[str, Any], left_out: tuple[str, ...] = ("no such class",)
) -> dict[str, float]:
    """Return the time of each kind of step in microseconds (minimum of 3 runs).

    The fused forms in `left_out` are disabled.
    """
    from nanovllm import LLM, SamplingParams

    with without(left_out), LLM(model, device="cuda", enable_prefix_caching=False, **settings) as llm:

        def seconds(num_seqs: int, length: int, num_tokens: int) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            begin = perf_counter()
            llm.generate([[i + 5] * length for i in range(num_seqs)], params, use_tqdm=False)
            return perf_counter() - begin

        times = {}
        for name, (num_seqs, length, num_tokens) in STEPS.items():
            if llm.config.max_model_len <= length + num_tokens:
                continue
            longer = [seconds(num_seqs, length, num_tokens) for _ in range(4)][1:]
            prompt = [seconds(num_seqs, length, 1) for _ in range(4)][1:] if num_tokens > 1 else [0.0]
            times[name] = 1e6 * (min(longer) - min(prompt)) / max(1, num_tokens - 1)
        return times


def measure(model: str, settings: dict[str, Any], fused: list[str]) -> None:
    """Print the time of a step, and how much longer the step takes without each group of fused forms."""
    import torch

    base = run_in_process(step_times, model, settings)
    rows = [["a step", *(f"{base[name]:,.0f}" for name in base)]]
    for part, names in PARTS.items():
        if any(plain.endswith(names) for plain in fused):
            times = run_in_process(step_times, model, settings, names)
            rows.append([part, *(f"{times[name] - base[name]:+,.0f}" for name in base)])
    print_table(
        f"microseconds on {torch.cuda.get_device_name()}: a step, and how much longer it is without", ["", *base], rows
    )
