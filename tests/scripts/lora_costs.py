"""Measure what adapters cost: for one stream, a stream per adapter, and many requests.

Each is measured without `enable_lora`, with it, and with adapters.

usage: python tests/scripts/lora_costs.py (MODEL | --shape qwen3-8b) [--compare vllm] [--sizes 1,8,256] [--skip-idle]
           [--load-format dummy] [--adapters 8] [--rank 16] [--input-len 512] [--output-len 256] [--dtype bfloat16]
           [--expert-rank 4]

With `--shape`, the weights are random. The adapters are random, and change all linear layers, and with `--expert-rank`
also experts. Each request has an adapter, and neighbours have different ones. With `--compare vllm`, vLLM then gets the
same requests and reads the same adapters. Each engine has a process of its own. With `--skip-idle`, engines with
`enable_lora` are measured only with adapters.
Prints output tokens per second, the better of two runs, and the ratio to the same engine without `enable_lora`. The
folder for temporary files needs space for the adapters: 90 MB each for qwen3-8b.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file

from nanovllm.benchmarks.arguments import each, integer
from nanovllm.benchmarks.engines.vllm import ending, vllm_settings
from nanovllm.benchmarks.processes import progress, run_in_process
from nanovllm.benchmarks.shapes import SHAPES, write_shape
from nanovllm.config import Config

LORA_REQUEST = {"nanovllm": "nanovllm", "vllm": "vllm.lora.request"}  # where each engine has its `LoRARequest`


def make_adapters(folder: Path, registry: Any, count: int, rank: int, expert_rank: int) -> None:
    """Write random adapters of all modules in an AdapterRegistry, as PEFT does, to the folders "1", "2", ..."""
    targets = sorted({name.rpartition(".")[2] for name in registry.shapes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    shapes = {name: ((rank, inputs), (outputs, rank)) for name, (inputs, outputs) in registry.shapes.items()}
    if expert_rank:
        parameters = ["experts.gate_up_proj", "experts.down_proj"]
        config |= {"target_parameters": parameters, "rank_pattern": dict.fromkeys(parameters, expert_rank)}
        for path, experts in registry.experts.items():
            rows = experts.num_experts * expert_rank
            for name, (inputs, outputs) in zip((f"{path}.base_layer", path), experts.parameters.values()):
                shapes[name] = (rows, inputs), (outputs, rows)
    for number in range(1, count + 1):
        (own := folder / str(number)).mkdir()
        tensors = {}
        for name, pair in shapes.items():
            for kind, shape in zip("AB", pair):
                tensors[f"base_model.model.{name}.lora_{kind}.weight"] = 0.01 * torch.randn(shape).bfloat16()
        save_file(tensors, own / "adapter_model.safetensors")
        (own / "adapter_config.json").write_text(json.dumps(config))


@contextmanager
def engine(name: str, settings: dict[str, Any]) -> Iterator[Any]:
    """An `LLM` of either engine, which have the names that are used here."""
    llm = import_module(name).LLM(**settings)
    with ending(llm.llm_engine) if name == "vllm" else llm:
        yield llm


def measure(name: str, model: str, folder: Path, options: argparse.Namespace) -> None:
    """Measure an engine. Our engine, which is the first one, writes the adapters to `folder`."""
    settings: dict[str, Any] = {"load_format": options.load_format, "dtype": options.dtype, "seed": 0}
    vocab_size = Config.create(model, settings).model_config.vocab_size
    settings |= vllm_settings(model, settings) if name == "vllm" else {"model": model}
    params = import_module(name).SamplingParams(
        temperature=0, max_tokens=options.output_len, ignore_eos=True, detokenize=False
    )

    def speed(llm: Any, size: int, adapters: list[Any] | None) -> float:
        """Output tokens per second of the better of two runs."""
        used, best = adapters and [adapters[i % len(adapters)] for i in range(size)], 0.0
        for run in range(3):  # the first loads the adapters
            generator = torch.Generator().manual_seed(3 * size + run)  # no two runs share a prompt
            token_ids = torch.randint(vocab_size, (size, options.input_len), generator=generator).tolist()
            prompts, begin = [{"prompt_token_ids": prompt} for prompt in token_ids], perf_counter()
            llm.generate(prompts, params, use_tqdm=False, lora_request=used)
            best = max(best, size * options.output_len / (perf_counter() - begin) if run else 0.0)
        return best

    def report(llm: Any, kind: str, adapters: list[Any] | None = None) -> None:
        for size in options.sizes:
            plain.setdefault(size, found := speed(llm, size, adapters))
            print(f"{name} {kind}: {size} requests, {found:,.0f} tok/s ({found / plain[size]:.3f})", flush=True)

    plain: dict[int, float] = {}
    with engine(name, settings) as llm:
        report(llm, "without enable_lora")
    settings |= {"enable_lora": True, "max_loras": options.adapters, "max_lora_rank": options.rank}
    settings |= {"max_expert_lora_rank": options.expert_rank} if options.expert_rank else {}
    with engine(name, settings) as llm:
        if not options.skip_idle:
            report(llm, "without adapters")
        if name == "nanovllm":
            make_adapters(folder, llm.core.adapters, options.adapters, options.rank, options.expert_rank)
        make_request = import_module(LORA_REQUEST[name]).LoRARequest
        adapters = [make_request(str(i), i, str(folder / str(i))) for i in range(1, options.adapters + 1)]
        report(llm, "with adapters", adapters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of_model = parser.add_mutually_exclusive_group(required=True)
    of_model.add_argument("model", nargs="?")
    of_model.add_argument("--shape", choices=SHAPES, metavar="NAME")
    parser.add_argument("--compare", choices=["vllm"])
    parser.add_argument("--sizes", type=each(integer(1)), default=[1, 8, 256])
    parser.add_argument("--skip-idle", action="store_true")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    for name, default in ("adapters", 8), ("rank", 16), ("input-len", 512), ("output-len", 256):
        parser.add_argument(f"--{name}", type=integer(1), default=default)
    parser.add_argument("--expert-rank", type=integer(0), default=0)
    options = parser.parse_args()
    if options.compare and find_spec(options.compare) is None:
        parser.error(f"--compare {options.compare}: is not installed in this environment")
    if options.compare and options.expert_rank:
        parser.error("--compare: has no adapters of experts; --expert-rank measures this package alone")
    with TemporaryDirectory() as temporary:
        folder, model = Path(temporary), options.model
        if options.shape:
            write_shape(options.shape, folder / options.shape)
            model, options.load_format = str(folder / options.shape), "dummy"
        for name in filter(None, ["nanovllm", options.compare]):
            with progress(f"{name}:"):
                run_in_process(measure, name, model, folder, options)


if __name__ == "__main__":
    main()
