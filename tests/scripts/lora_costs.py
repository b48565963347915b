"""Measure what adapters cost: for one stream, a stream per adapter, and many requests.

Each is measured without `enable_lora`, with it, and with adapters.

usage: python tests/scripts/lora_costs.py MODEL [--load-format dummy] [--adapters 8] [--rank 16] [--requests 256]
           [--input-len 512] [--output-len 256] [--dtype bfloat16] [--expert-rank 4]

The adapters are random, and change all linear layers, and with `--expert-rank` also experts. Each request has an
adapter, and neighbours have different ones.
Prints output tokens per second, the better of two runs, and the ratio to the engine without `enable_lora`.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file

from nanovllm import LLM, LoRARequest, SamplingParams


def make_adapters(folder: Path, registry: Any, count: int, rank: int, expert_rank: int) -> list[LoRARequest]:
    """Random adapters of all modules in an AdapterRegistry."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    shapes = {name: ((rank, inputs), (outputs, rank)) for name, (inputs, outputs) in registry.shapes.items()}
    if expert_rank:
        parameters = ["experts.gate_up_proj", "experts.down_proj"]
        config |= {"target_parameters": parameters, "rank_pattern": dict.fromkeys(parameters, expert_rank)}
        for path, experts in registry.experts.items():
            rows = experts.num_experts * expert_rank
            for name, (inputs, outputs) in zip((f"{path}.base_layer", path), experts.parameters.values()):
                shapes[name] = (rows, inputs), (outputs, rows)
    requests = []
    for number in range(1, count + 1):
        (own := folder / str(number)).mkdir()
        tensors = {}
        for name, pair in shapes.items():
            for kind, shape in zip("AB", pair):
                tensors[f"base_model.model.{name}.lora_{kind}.weight"] = 0.01 * torch.randn(shape).bfloat16()
        save_file(tensors, own / "adapter_model.safetensors")
        (own / "adapter_config.json").write_text(json.dumps(config))
        requests.append(LoRARequest(str(number), number, str(own)))
    return requests


def speed(llm: LLM, num_requests: int, options: argparse.Namespace, adapters: list[LoRARequest] | None = None) -> float:
    """Output tokens per second of the better of two runs."""
    vocab_size, best = llm.config.model_config.vocab_size, 0.0
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True, detokenize=False)
    used: Any = None if adapters is None else [adapters[i % len(adapters)] for i in range(num_requests)]
    for run in range(3):  # the first loads the adapters
        generator = torch.Generator().manual_seed(run)
        prompts = torch.randint(vocab_size, (num_requests, options.input_len), generator=generator).tolist()
        begin = perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=used)
        best = max(best, num_requests * options.output_len / (perf_counter() - begin) if run else 0.0)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    sizes_of_runs = ("requests", 256), ("input-len", 512), ("output-len", 256)
    for name, default in (("adapters", 8), ("rank", 16), ("expert-rank", 0), *sizes_of_runs):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    settings = {"load_format": options.load_format, "dtype": options.dtype, "seed": 0}
    sizes = 1, options.adapters, options.requests

    def measure(kind: str, adapters: list[LoRARequest] | None = None) -> None:
        for size in sizes:
            plain.setdefault(size, found := speed(llm, size, options, adapters))
            print(f"{kind}: {size} requests, {found:,.0f} tok/s ({found / plain[size]:.3f})", flush=True)

    plain: dict[int, float] = {}
    with LLM(options.model, **settings) as llm:
        measure("without enable_lora")
    lora = {"enable_lora": True, "max_loras": options.adapters, "max_lora_rank": options.rank}
    lora |= {"max_expert_lora_rank": options.expert_rank}
    with LLM(options.model, **settings, **lora) as llm, TemporaryDirectory() as folder:
        measure("without adapters")
        adapters = make_adapters(Path(folder), llm.core.adapters, options.adapters, options.rank, options.expert_rank)
        for adapter in adapters:
            llm.add_lora(adapter)
        measure("with adapters", adapters)


if __name__ == "__main__":
    main()
