"""Measure what images cost: the time to the first token, many requests, and texts with and without a vision tower.

usage: python tests/scripts/image_costs.py [--shape qwen3-vl-8b] [--size 1024] [--requests 64] [--output-len 64]
           [--layers N] [--device cuda]

The weights are random, and have a published shape with its vision tower. Each request has another image of random
pixels. Prints medians of ten runs and, for many requests, the best of three runs.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

from nanovllm import LLM, SamplingParams
from nanovllm.benchmarks.shapes import write_shape

TOWER = {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "patch_size": 16}
TOWER |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304}
IMAGE_TOKEN_ID = 1000  # any id that is not a byte


def write_model(folder: Path, shape: str, num_layers: int | None) -> str:
    write_shape(shape, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text["num_hidden_layers"] = num_layers or text["num_hidden_layers"]
    deepstack = {"deepstack_visual_indexes": [8, 16, 24]} if "vl" in shape else {}
    config["vision_config"] = TOWER | {"out_hidden_size": text["hidden_size"]} | deepstack
    config["image_token_id"] = IMAGE_TOKEN_ID
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class Prompts:
    """Makes prompts that share nothing."""

    def __init__(self, size: int):
        self.random, self.size = np.random.default_rng(0), size

    def text(self, num_tokens: int) -> dict:
        return {"prompt_token_ids": self.random.integers(256, size=num_tokens).tolist()}

    def image(self) -> dict:
        pixels = self.random.integers(256, size=(self.size, self.size, 3), dtype=np.uint8)
        token_ids = [*self.text(8)["prompt_token_ids"], IMAGE_TOKEN_ID, *self.text(16)["prompt_token_ids"]]
        return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": pixels}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-vl-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="auto")
    for name, default in (("size", 1024), ("requests", 64), ("output-len", 64), ("max-model-len", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    prompts, count = Prompts(options.size), options.requests
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True, detokenize=False)
    settings = dict(load_format="dummy", device=options.device, max_model_len=options.max_model_len)
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", options.shape, options.layers)
        for language_model_only in (False, True):
            with LLM(model, language_model_only=language_model_only, **settings) as llm:
                texts = [[prompts.text(512) for _ in range(count)] for _ in range(4)]
                seconds = min([*times(llm, texts, params)][1:])
                print(f"{count} texts: {count * options.output_len / seconds:,.0f} tok/s, {language_model_only=}")
                if not language_model_only:
                    measure_images(llm, prompts, options)


def times(llm: LLM, batches: list, params: SamplingParams) -> Iterator[float]:
    for batch in batches:
        begin = perf_counter()
        llm.generate(batch, params, use_tqdm=False)
        yield perf_counter() - begin


def measure_images(llm: LLM, prompts: Prompts, options: argparse.Namespace) -> None:
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    params, count = replace(first, max_tokens=options.output_len), options.requests
    read, reading = [], []
    for _ in range(13):
        prompt, begin = prompts.image(), perf_counter()
        _, token_ids, images = llm.input_processor.tokenize(prompt)
        reading.append(perf_counter() - begin)
        read.append([{"prompt_token_ids": token_ids, "multi_modal_data": images}])
    num_tokens = len(token_ids)
    print(f"an image of {options.size} x {options.size}: {num_tokens} tokens")
    print(f"reading it: {1e3 * median(reading[3:]):.1f} ms (on the host)")
    print(f"to the first token, once it is read: {1e3 * median([*times(llm, read, first)][3:]):.1f} ms")
    texts = [[prompts.text(num_tokens)] for _ in range(13)]
    print(f"the same number of tokens of text: {1e3 * median([*times(llm, texts, first)][3:]):.1f} ms")
    seconds = min([*times(llm, [[prompts.image() for _ in range(count)] for _ in range(4)], params)][1:])
    print(f"{count} requests with images: {count / seconds:.1f} images/s, {options.output_len} tokens each")


if __name__ == "__main__":
    main()
