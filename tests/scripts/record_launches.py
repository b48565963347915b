"""Records the kernels that a step launches, so that a refactoring can show that it changed none.

    python tests/scripts/record_launches.py record --shape qwen3-0.6b before.json     needs a GPU
    python tests/scripts/record_launches.py compare before.json after.json            status 1 if they differ

A record has the kernels of each step in their order, with grids and blocks, as the profiler saw them; and of each
Triton kernel the machine code of all its variants, as a hash, with the constants that they were compiled for. Libraries
choose their kernels by the GPU: compare records of the same machine.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# (prompts, tokens of each, tokens that each generates): steps of prompts alone, then of decodes alone
CASES = {
    "one prompt of 16": (1, 16, 2),
    "one prompt of 4,000": (1, 4000, 2),
    "8 prompts of 100": (8, 100, 2),
    "32 prompts of 100": (32, 100, 2),
    "128 prompts of 100": (128, 100, 2),
    "256 prompts of 100": (256, 100, 2),
}
MAX_SHOWN = 12  # differences of a case


def record(shape: str, settings: dict[str, Any]) -> dict[str, Any]:
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # else a kernel that moved within its file has another hash
    from nanovllm import LLM
    from nanovllm.benchmarks.shapes import write_shape

    with TemporaryDirectory() as folder:
        write_shape(shape, path := Path(folder) / shape)
        with LLM(str(path), load_format="dummy", seed=0, **settings) as llm:
            steps = {name: launches(llm, *case, Path(folder)) for name, case in CASES.items()}
    return {"shape": shape, "steps": steps, "code": dict(sorted(machine_code()))}


def launches(llm: Any, num_prompts: int, prompt_len: int, num_tokens: int, folder: Path) -> list[list[Any]]:
    """[name, grid, block] of each kernel of a second run, in which all are compiled, and no prompt is in the cache."""
    from torch.profiler import ProfilerActivity, profile

    from nanovllm import SamplingParams

    params = SamplingParams(temperature=0.8, max_tokens=num_tokens, ignore_eos=True, seed=1)
    prompts = [[10 + i, *range(2, 1 + prompt_len)] for i in range(num_prompts)]
    llm.generate(prompts, params, use_tqdm=False)
    llm.reset_prefix_cache()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        llm.generate(prompts, params, use_tqdm=False)
    llm.reset_prefix_cache()
    trace.export_chrome_trace(str(file := folder / "trace.json"))
    return kernels_of(json.loads(file.read_text())["traceEvents"])


def kernels_of(events: list[dict[str, Any]]) -> list[list[Any]]:
    """[name, grid, block] of the kernels of a trace, by when they began."""
    found = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    return [[event["name"], event["args"].get("grid"), event["args"].get("block")] for event in found]


def machine_code() -> Iterator[tuple[str, list[list[str]]]]:
    """Of each Triton kernel that was compiled: its name, and (constants, hash of the machine code) of each variant."""
    import gc

    from triton.runtime.jit import JITFunction

    for jit in [x for x in gc.get_objects() if isinstance(x, JITFunction)]:
        variants = set()
        for kernels, *_ in jit.device_caches.values():
            for kernel in kernels.values():
                code = kernel.asm.get("cubin", b"")
                constants = getattr(kernel.src, "constants", {})
                variants.add((repr(sorted(constants.items(), key=repr)), sha256(code).hexdigest()[:16]))
        if variants:
            yield f"{jit.fn.__module__}.{jit.fn.__name__}", sorted([*variant] for variant in variants)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two records, as lines."""
    found = []
    for case in old["steps"].keys() | new["steps"].keys():
        pair = old["steps"].get(case, []), new["steps"].get(case, [])
        found += [f"{case}: {line}" for line in _changes(*pair)]
    # a kernel may have moved to another module
    codes = [{re.sub(".*[.]", "", name): variants for name, variants in each["code"].items()} for each in (old, new)]
    for name in sorted(codes[0].keys() | codes[1].keys()):
        before, after = ({code for _, code in each.get(name, ())} for each in codes)
        if before != after:
            found.append(f"{name}: {len(before - after)} variants are gone, {len(after - before)} are new")
    return found


def _changes(old: list[list[Any]], new: list[list[Any]]) -> list[str]:
    if old == new:
        return []
    shown = [
        f"launch {i}: {before} is {after} now" for i, (before, after) in enumerate(zip(old, new)) if before != after
    ]
    more = [f"and {len(shown) - MAX_SHOWN} more"] if len(shown) > MAX_SHOWN else []
    return [f"{len(old)} launches are {len(new)} now", *shown[:MAX_SHOWN], *more]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--shape", default="qwen3-0.6b")
    recording.add_argument("--settings", type=json.loads, default={}, help="of the engine, as JSON")
    recording.add_argument("file", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "record":
        options.file.write_text(json.dumps(record(options.shape, options.settings)))
        return 0
    found = differences(*(json.loads(file.read_text()) for file in (options.old, options.new)))
    print("\n".join(found) or "the same launches, and the same machine code")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
