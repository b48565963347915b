"""Measure throughput and latency of nano-vllm and of other engines on the same requests.

    nanovllm bench --model MODEL                      the workloads headline, single and prefill
    nanovllm bench --model MODEL --compare vllm       the same workloads on nano-vllm and on vLLM
    nanovllm bench --shape llama-3.1-8b               a published model shape with random weights, without a download
    nanovllm bench online --model MODEL --request-rate 8,16,24      latency while requests keep arriving
    nanovllm bench conversations --model MODEL --max-model-len 32768    turns with a shared history
    nanovllm bench latency --model MODEL --max-model-len 32768      a single prompt; decode after long contexts
    nanovllm bench batches --model MODEL --batch-sizes 2,8,32       throughput by batch size
    nanovllm bench all,batches --model MODEL --compare vllm         several workloads in one run (or online,latency)
    nanovllm bench headline,images --shape qwen3-vl-8b --compare vllm   texts, then prompts with images
    nanovllm bench embed --model MODEL                embeddings of long and of short texts
    nanovllm bench http --model MODEL --compare vllm  clients of an HTTP server
    nanovllm bench host                               host time of a step, on any machine
    nanovllm bench --model MODEL --profile FOLDER     GPU time of a step by kind of kernel, and traces
    nanovllm bench --streaming                        the headline workload with generate() and with stream()
    nanovllm bench --beams 4                          beam search, compared with transformers
    nanovllm bench --figure FILE.svg                  a bar chart of the results in FILE.json (see --save)

In a clone of the repository, `python bench.py` accepts the same arguments.

Workloads. All requests have random token ids and temperature 0.6, and ignore the end-of-sequence token.

headline: --num-seqs requests. Input and output lengths are distributed uniformly between a tenth of the maximum and the
    maximum.
single: one request with --max-input-len / 8 input tokens and --max-output-len / 2 output tokens.
prefill: --num-seqs / 8 requests. Each request has --prefill-len input tokens and one output token.
online: at each --request-rate, --num-seqs requests arrive; by default, requests arrive for 20 seconds (6 on a CPU). The
    gaps between arrivals are exponentially distributed. Prompt and output lengths are log-normal (sigma 0.9 for
    prompts, 0.7 for outputs), and are cut to fit --max-model-len. On a CPU, the default rates are 30, 60 and 90% of the
    highest rate that the CPU sustains, which a short run measures first. The p99 is left out if there are fewer than 20
    requests.
conversations: --num-seqs conversations of --turns turns each. All conversations share a system prompt. Each question
    follows the previous answer after a pause. Pauses are exponentially distributed with the mean --pause. Each prompt
    contains the whole conversation so far. The lengths of questions and answers are distributed as in the workload
    online. A conversation ends early if it reaches --max-model-len. The table shows the TTFT by turn. The lines above
    the table show the hit rate of the prefix cache. With --swap-space, the lines also show the hit rates of the
    device, of host memory and of files.
latency: first, single requests run, with 16 to 32,000 input tokens and one output token. Each input length is measured
    --num-seqs times. Then a single sequence decodes after contexts of 100 to 30,000 tokens. Later, 8 sequences decode
    together after contexts of the same lengths. Each context length is measured three times. All lengths are bounded by
    --max-model-len and --max-input-len.
batches: for each number N in --batch-sizes, N requests run together. Each request has 512 input tokens and 256 output
    tokens (128 and 64 on a CPU).
images: first, single requests run, each with one square image and one output token. The flag --image-sizes sets the
    sides of images in pixels (default 1024; on a CPU 256). Next, single requests without an image run, with as many
    tokens as the requests with an image. Then --num-seqs requests (default 64; on a CPU 4) with one image each run
    together. Each request has --max-output-len output tokens (default 64; on a CPU 16). Besides its image, a prompt has
    24 tokens of text. Pixels are random, and all images are different. The engines get PIL images, and all times
    include the processing of the images. Each kind of single request runs ten times. The model must accept images. With
    --shape, the model has the published vision tower in all workloads of the run.
embed: computes embeddings of 512 texts of 512 tokens, then of 10,000 texts of 30 tokens (of fewer texts on a CPU). Any
    checkpoint works: nano-vllm runs with task="embed", and vLLM runs with runner="pooling".
http: clients send requests to `nanovllm serve`, which is started on a free port. Each client sends its next request
    when its previous request is answered. Each value of --clients makes a row of the table: 64x256/128 means 64 clients
    that send prompts of 256 tokens and get streamed answers of 128 tokens. In a row such as 256x200/256-chat, clients
    send chat requests. In a row such as 512x128/128-whole, answers are not streamed. The flag --num-seqs sets the
    number of requests per row.
host: no model runs. A fake device returns random tokens immediately. One table shows how long it takes to schedule, to
    prepare and to process a decode step of 1 to 1,024 sequences. Another table shows the CPU time of a step of 512
    sequences, until the caller of `generate` or `stream` has the text. The printed time of a Python loop shows how fast
    the machine is.

Runs. Each workload first runs once as a warm-up, with other token ids than the measured runs. The warm-ups of the
workloads online and conversations have a quarter of the requests. In the workload latency, all decode runs with the
same context length have the same token ids. After the warm-up, each of these workloads runs --rounds times, each time
with different token ids: headline, single, prefill, batches, embed, images. The fastest run is reported. One run is not
enough, because vLLM with FP8 compiles kernels whenever a step has a new number of tokens, even after the warm-up. With
--compare, each engine runs in a separate process. All settings of vLLM are its defaults, except for the model, the
dtypes, --max-model-len, the number of GPUs, --swap-space and --speculative-config. If you set --max-num-seqs,
--max-num-batched-tokens, --gpu-memory-utilization, --limit-mm-per-prompt or --mm-processor-kwargs, vLLM gets them too.
In a run with the workload images, both engines accept one image per prompt and no videos, unless you set
--limit-mm-per-prompt. If this package loads no vision tower, vLLM gets the flag --language-model-only. The output lists
the versions of the engines, and the environment variables VLLM_*. With --plot FILE.svg, the results of online,
conversations, latency, batches or images are drawn.

Random weights. With --shape, "model" in --speculative-config may also be the name of a shape, and the method "eagle3"
needs no "model". Drafts from random weights are never accepted. To make both engines accept drafts at given rates, set
for example --speculative-config '{"method": "eagle3", "num_speculative_tokens": 2, "rejection_sample_method":
"synthetic", "synthetic_acceptance_rates": [0.8, 0.64]}'.

Latency. The workload online is an open loop: each request is submitted when it is due, even if the engine is busy.
Latencies of a request are measured from the time when the request is due. TTFT is the time to first token. The "time
per output token" is the time from the first token of a request to its last token, divided by the number of tokens after
the first. ITL (inter-token latency) covers all gaps between consecutive tokens of a request. The longest gap between
two tokens of a request is also reported. The decode speed includes only tokens that arrive while all sequences of a
batch decode. Percentiles are interpolated between the two nearest values, so p50 is the median. In the workloads online
and latency, the same loop runs the steps of both engines, and vLLM has the default settings of its server. In the
workload http, each engine runs behind its HTTP server. The workloads headline, single, prefill, batches and images call
`LLM.generate`. The workload embed calls `LLM.embed`.

Profiles. --profile needs a GPU. The option traces one run of the workload headline, single, prefill, batches or
latency, with at most 65 output tokens per request. A table shows the mean time per step of each kind of kernel, in
microseconds. The first row of a workload covers the steps up to the last step that computes prompts. The second row
covers all later steps, which decode. Kernels overlap, so the time of a kernel is measured from the end of the previous
kernel. The column "products" shows the GEMMs of the layers, including operations that are fused into the GEMMs. The
column "limit" shows the least time that the hardware needs for a mean step of the row.

Limits. On CUDA, two columns compare the measured time with the least time that the hardware needs. A step spends time
on reading (weights, keys and values) and on multiplying. The column "of limit" assumes that each step either computes
prompts or decodes, and takes its reading time or its multiplying time, whichever is longer. The column "of overlap"
assumes that all reading of the run overlaps with all multiplying of the run. Memory bandwidth and GEMM throughput are
measured on this device under load. If there are several ranks, the bandwidth and the throughput are multiplied by the
number of ranks.
"""

import argparse
import json
import re
import shlex
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from nanovllm.benchmarks.engines import ENGINES, STEPPED_ENGINES
from nanovllm.benchmarks.http import Load
from nanovllm.benchmarks.shapes import SHAPES
from nanovllm.benchmarks.sweeps import STEPPED, SWEEPS
from nanovllm.benchmarks.throughput import WORKLOADS
from nanovllm.config import Config
from nanovllm.utils.checks import hint
from nanovllm.utils.flags import HelpFormatter, Parser, add_flags, given

OTHERS = "http", "host"  # workloads with separate modules, which do not use `engines/`
ALONE = *OTHERS, "embed"  # workloads that must be the only one of a run
LENGTHS, MEDIANS = ("headline", "single", "latency", "batches"), ("online", "conversations")
USED_BY = {  # the workloads that use a flag
    "num_seqs": ("headline", "prefill", *MEDIANS, "latency", "images", "http"),
    "max_input_len": LENGTHS,
    "max_output_len": (*LENGTHS, "images"),
    "prefill_len": ("prefill",),
    "request_rate": ("online",),
    "median_input_len": MEDIANS,
    "median_output_len": MEDIANS,
    "turns": ("conversations",),
    "pause": ("conversations",),
    "batch_sizes": ("batches",),
    "image_sizes": ("images",),
}
OWN_FLAGS = "model", "seed"  # not the engine settings of the same names: `seed` is the seed of the requests


class Formatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Make the parser. `prog` is the name of the command in help and errors; the default is the name of the script."""
    parser = Parser(prog, description=__doc__, formatter_class=Formatter)
    size = integer(1)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="tiny-qwen3", help="a folder, a hub id, or the bundled tiny-qwen3")
    names = [name for name in SHAPES if not name.endswith(("-fp8", "-w4a16"))]
    text = f"a model with random weights, which needs no download: {', '.join(names)}"
    text += "; names that begin with qwen3 may end with -fp8 or -w4a16 (quantized weights)"
    model.add_argument("--shape", choices=SHAPES, metavar="NAME", help=text)
    text = "one, or several with commas between (the first three)"
    workload = parser.add_mutually_exclusive_group()
    workload.add_argument("name", type=workload_names, nargs="?", metavar="WORKLOAD", help=text)
    workload.add_argument("--workload", type=workload_names, default="all", metavar="WORKLOAD", help="the same")
    parser.add_argument(
        "--num-seqs",
        type=size,
        help="requests, see above (256; on a CPU 64; of latency 20 and 5, of conversations 64 and 6)",
    )
    text = "longest prompt (1024; on a CPU 256; of batches 512, on a CPU 128)"
    parser.add_argument("--max-input-len", type=size, help=text)
    text = "longest output (1024; on a CPU 256; of batches 256, on a CPU 64; of latency 96)"
    parser.add_argument("--max-output-len", type=size, help=text)
    parser.add_argument("--prefill-len", type=size, help="prompt length of the prefill workload (3900; on a CPU 1024)")
    parser.add_argument("--request-rate", type=each(positive), help="online: requests per second (8,16,24)")
    parser.add_argument("--median-input-len", type=size, help="online: median prompt length (500; on a CPU 125)")
    parser.add_argument("--median-output-len", type=size, help="online: median output length (160; on a CPU 40)")
    text = "conversations: the fewest and the most turns of a conversation (3-20; on a CPU 2-5)"
    parser.add_argument("--turns", type=bounds, metavar="MIN-MAX", help=text)
    text = "conversations: the mean pause before a question, in seconds (2; on a CPU 0.2)"
    parser.add_argument("--pause", type=positive, metavar="SECONDS", help=text)
    text = "batches: numbers of requests (2,8,32,128,512; on a CPU 1,4,16,64)"
    parser.add_argument("--batch-sizes", type=each(size), help=text)
    parser.add_argument("--image-sizes", type=each(size), help="images: pixels of a side (1024; on a CPU 256)")
    text = (
        "http: rows, such as 64x256/128,512x128/128-whole,256x200/256-chat (seven of 1 to 512 clients; on a CPU four)"
    )
    parser.add_argument("--clients", type=each(load), metavar="ROWS", help=text)
    text = "http: further flags for the server of this package, such as --server-flags='--max-queued-requests 9'"
    parser.add_argument("--server-flags", type=words, default=[], metavar="'FLAGS'", help=text)
    parser.add_argument("--rounds", type=size, help="runs of which the fastest is reported (2; on a CPU 1)")
    parser.add_argument("--seed", type=integer(0), default=0, help="seed of the random requests")
    text = "transformers, vllm, or both with a comma between them"
    parser.add_argument("--compare", type=other_engines, default=[], help=text)
    parser.add_argument("--save", type=results_file, metavar="FILE.json", help="add the tokens per second to this file")
    parser.add_argument("--plot", type=svg_file, metavar="FILE.svg", help=f"draw {', '.join(SWEEPS)}; needs matplotlib")

    other = parser.add_argument_group("instead of the workloads")
    other.add_argument(
        "--profile", type=writable_folder, metavar="FOLDER", help="write traces here, and print where the time goes"
    )
    other.add_argument("--streaming", action="store_true", help="compare generate() with stream()")
    other.add_argument("--beams", type=size, metavar="WIDTH", help="compare beam search with that of transformers")
    other.add_argument("--figure", type=figure_file, metavar="FILE.svg", help="draw FILE.json (needs matplotlib)")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens")
    sampling.add_argument("--top-p", type=float, default=1.0, help="1 keeps all tokens")

    add_flags(parser, Config, "engine settings, as of LLM(...)", skip=OWN_FLAGS)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments. Exit with an error if arguments conflict."""
    args = parser.parse_args(arguments)
    args.workload = args.name or args.workload
    names, first = ",".join(args.workload), args.workload[0]
    if (args.figure or args.plot) and find_spec("matplotlib") is None:
        parser.error("--figure and --plot need matplotlib, which `pip install 'nano-vllm[plot]'` installs")
    if first in STEPPED and (missing := [engine for engine in args.compare if engine not in STEPPED_ENGINES]):
        parser.error(f"--compare {missing[0]}: --workload {first} compares with vllm only")
    if {"http", "embed", "images"} & {*args.workload} and "transformers" in args.compare:
        parser.error(f"--compare transformers: --workload {names} compares with vllm only")
    if "images" in args.workload and find_spec("PIL") is None:
        parser.error("--workload images: needs Pillow, which `pip install 'nano-vllm[images]'` installs")
    if first != "http" and (args.clients or args.server_flags):
        parser.error(f"--clients and --server-flags: --workload {names} must be http")
    for name, users in USED_BY.items():
        if getattr(args, name) and not (args.beams or args.streaming or {*users} & {*args.workload}):
            flag = f"--{name.replace('_', '-')}"
            meant = f" (did you mean {flag.replace('max', 'median')}?)" if first in MEDIANS and "max" in name else ""
            parser.error(f"{flag}: --workload {names} must be one of {', '.join(users)}{meant}")
    if args.compare and first == "host":
        parser.error("--compare: --workload host measures this package alone")
    if missing := [engine for engine in args.compare if find_spec(engine) is None]:
        parser.error(f"--compare {missing[0]}: is not installed in this environment; pip install {missing[0]}")
    if args.rounds and first in (*STEPPED, "http"):
        parser.error(f"--rounds: --workload {first} has a fixed number of runs")
    if args.plot and not SWEEPS.keys() & args.workload:
        parser.error(f"--plot: --workload {names} must be one of {', '.join(SWEEPS)}")
    if args.save and not WORKLOADS.keys() & args.workload:
        parser.error(f"--save: --workload {names} must be one of all, {', '.join(WORKLOADS)}")
    if args.profile and {"online", "embed", "images", *OTHERS} & {*args.workload}:
        parser.error(
            f"--profile: --workload {names} must be one of all, {', '.join([*WORKLOADS, 'batches', 'latency'])}"
        )
    if args.shape and (args.beams or "transformers" in args.compare):
        option = "--beams" if args.beams else "--compare transformers"
        parser.error(f"{option}: transformers reads weights from files, and --shape has none; use --model instead")
    return args


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings for `LLM` that were given as flags."""
    settings = given(args, Config, skip=OWN_FLAGS) | ({"load_format": "dummy"} if args.shape else {})
    if "images" in args.workload:
        settings.setdefault("limit_mm_per_prompt", {"image": 1, "video": 0})
    return settings | ({"task": "embed"} if args.workload == ["embed"] else {})


# -- types of arguments; each error states the value and its bound -----------------------------------------------------


def workload_names(text: str) -> list[str]:
    """Parse comma-separated names of workloads. "all" stands for headline, single and prefill."""
    names = dict.fromkeys(name for part in text.split(",") for name in (WORKLOADS if part == "all" else [part]))
    for name in names:
        if name not in (*WORKLOADS, *SWEEPS, *ALONE):
            choices = ", ".join(["all", *WORKLOADS, *SWEEPS, *ALONE])
            meant = hint(name, choices.split(", "))
            raise ArgumentTypeError(f"{name!r}{meant}: must be one of {choices}, or several with commas between")
        if name in ALONE and len(names) > 1:
            raise ArgumentTypeError(f"{name!r}: must be the only workload of a run")
    if 0 < len(names.keys() & STEPPED) < len(names):
        raise ArgumentTypeError(f"{text!r}: {' and '.join(STEPPED)} can't be in one run with other workloads")
    return list(names)


def other_engines(text: str) -> list[str]:
    other_names = [name for name in ENGINES if name != "nanovllm"]
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names:
        if name not in other_names:
            raise ArgumentTypeError(f"{name!r}: must be of {', '.join(other_names)}; nanovllm always runs")
    return names


def checked(parse: Callable, kind: str, is_allowed: Callable[[Any], bool], bound: str) -> Callable[[str], Any]:
    def parse_one(text: str) -> Any:
        try:
            value = parse(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r}: must be {kind}") from None
        if not is_allowed(value):
            raise ArgumentTypeError(f"{text}: must be {bound}")
        return value

    return parse_one


def integer(low: int) -> Callable[[str], int]:
    return checked(int, "an integer", lambda value: value >= low, f"at least {low}")


positive = checked(float, "a number", lambda value: 0 < value < inf, "greater than 0 and finite")


def load(text: str) -> Load:
    if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)/([1-9]\d*)(?:-(whole|chat))?", text)):
        raise ArgumentTypeError(f"{text!r}: must be CLIENTSxINPUT/OUTPUT, optionally with -whole or -chat at the end")
    return Load(*map(int, match.groups()[:3]), match[4] or "")


def bounds(text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"([1-9]\d*)-([1-9]\d*)", text)) or int(match[1]) > int(match[2]):
        raise ArgumentTypeError(f"{text!r}: must be MIN-MAX, such as 3-20, and MAX must be at least MIN")
    return int(match[1]), int(match[2])


def words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: {error}") from None


def each(parse: Callable[[str], Any]) -> Callable[[str], list]:
    """Make a parser for comma-separated values. The parser sorts the values, and removes duplicates."""

    def parse_all(text: str) -> list:
        if not (parts := list(filter(None, map(str.strip, text.split(","))))):
            raise ArgumentTypeError(f"{text!r}: must have at least one value")
        return sorted(set(map(parse, parts)))

    return parse_all


def writable_folder(text: str) -> Path:
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ArgumentTypeError(f"{text!r}: is not a writable folder ({error.strerror})") from error
    return folder


def results_file(text: str) -> Path:
    """Check that a file is missing or contains `{"notes": text, "results": {setup: {workload: {engine: rate}}}}`."""
    file = Path(text)
    writable_folder(str(file.parent))
    if file.exists():
        try:
            json.loads(file.read_text())["results"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentTypeError(f"{text!r}: is not a results file of --save ({error!r})") from error
    return file


def svg_file(text: str) -> Path:
    file = Path(text)
    if file.suffix != ".svg":
        raise ArgumentTypeError(f"{text!r}: must end in .svg")
    writable_folder(str(file.parent))
    return file


def figure_file(text: str) -> Path:
    """Check that an svg file can be written, and that its folder contains a results file with the same name."""
    file = svg_file(text)
    if not file.with_suffix(".json").is_file():
        raise ArgumentTypeError(f"{text!r}: must have a .json of the same name beside it")
    results_file(str(file.with_suffix(".json")))
    return file
