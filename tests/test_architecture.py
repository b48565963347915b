"""The house: who may import whom, read from the sources, and how much there is to read."""

import ast
import json
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
from common import run_with_copy

import nanovllm
from nanovllm.engine.features import FEATURES
from nanovllm.engine.runners import RUNNERS
from nanovllm.fused import FORMS
from nanovllm.spec_decode.proposer import PROPOSERS
from nanovllm.spec_decode.speculation import DRAFTERS

ROOT = Path(nanovllm.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
OURS = {*FILES}
RANKS = [
    "distributed/ranks.py",
    "distributed/worker.py",
    "distributed/step_channel.py",
    "distributed/process_group.py",
    "distributed/peer_memory.py",
]
LIBRARY = "llm.py"  # imports what `__init__.py` has, which imports nothing until it is asked for
SCHEDULING = [
    "requests/detokenizer.py",
    "engine/sequence.py",
    "engine/scheduled_step.py",
    "engine/block_manager.py",
    "engine/scheduling_policy.py",
    "engine/admission.py",
    "engine/scheduler.py",
]

# A file imports from lower floors, from what stands left of it on its own line, and from its own place if that is a
# folder or a group. An indented line continues the one before. A floor may have several lines, which do not know of
# each other.
HOUSE = """
0 | kernels/activations.py <- utils/checks.py utils/construction.py utils/context.py utils/cores.py utils/cuda_driver.py
  utils/daemon_threads.py
  utils/double_buffer.py utils/download.py utils/families.py utils/model_files.py
  utils/flags.py utils/interrupts.py utils/libraries.py utils/partial_sum.py utils/progress.py utils/refusals.py
  utils/replace.py utils/rope_scaling.py utils/setting_checks.py utils/tensor_parallel.py utils/transformers_4.py
  utils/waiting.py
  utils/__init__.py moe/__init__.py moe/moe_config.py moe/expert_weights.py reasoning/__init__.py reasoning/formats.py
  reasoning/stage.py reasoning/harmony.py lora/__init__.py lora/lora_request.py lora/adapter_config.py
  utils/tensor_parts.py
  <- utils/loader.py utils/sharded_checkpoint.py utils/dummy_weights.py utils/tied_head.py
  utils/merged_tensors.py utils/nested_names.py
  quantization/__init__.py pooling/__init__.py
  <- models/__init__.py attention/__init__.py
  structured_outputs/__init__.py compat/__init__.py <- structured_outputs/spec.py compat/vllm_settings.py
  compat/vllm_flags.py
  distributed/division.py utils/device_checks.py <- utils/collection_checks.py pooling/task.py
  pooling/pooling_config.py pooling/pooling_params.py spec_decode/__init__.py
  spec_decode/speculative_config.py
  vision/__init__.py vision/vision_config.py vision/prompt_images.py
  spec_decode/head_checkpoint.py tiers/__init__.py tiers/swap_space.py <- config.py sampling_params.py
  features/beam_params.py <- compat/params.py
0 | engine/__init__.py
1 | engine/sequence.py <- engine/scheduled_step.py <- engine/features.py
  spec_decode/proposer.py spec_decode/ngram.py spec_decode/suffix.py
  engine/block_manager.py engine/scheduling_policy.py engine/admission.py lora/lora_feature.py
  vision/image_feature.py
  <- engine/state_blocks.py engine/window_blocks.py lora/adapter_queue.py
  <- engine/scheduler.py engine/awaiting.py engine/forks.py spec_decode/drafting_scheduler.py
  pooling/pooling_scheduler.py tiers/connector.py vision/image_budget.py
  <- engine/stats.py tiers/tiered_blocks.py vision/image_blocks.py
1 | engine/outputs.py <- engine/collector.py requests/stream_event.py pooling/pooling_outputs.py
1 | kernels/ moe/kernels/ delta_net/kernels/ quantization/kernels/ invariant/kernels/ distributed/kernels/
  lora/kernels/ vision/kernels/
2 | cache/ quantization/fp8_cache.py <- attention/base.py attention/sdpa.py <- layers/ <- attention/ moe/experts.py
  delta_net/ vision/tower.py vision/mrope.py
3 | models/
3 | fused/ <- quantization/scaled.py <- quantization/packed.py quantization/scaled_linear.py
  quantization/scaled_experts.py <- quantization/fp8_linear.py quantization/packed_linear.py <-
  quantization/quant_config.py <- quantization/formats/
  <- lora/adapter_tensors.py lora/lora_linear.py <- lora/expert_files.py lora/lora_experts.py <- lora/adapter_files.py
  <- lora/adapter_stacks.py lora/adapter_registry.py
4 | engine/forward_output.py
  features/__init__.py cache/block_copies.py <- features/logit_edits.py features/logprob_outputs.py
  <- features/logprobs.py engine/model_runner.py
  <- batches/__init__.py batches/batch.py <- batches/request_tables.py spec_decode/rows.py <- batches/batch_runner.py
  spec_decode/speculation.py spec_decode/draft_model.py spec_decode/draft_heads.py pooling/pooling_runner.py
  vision/image_store.py <- vision/vision_runner.py
  <- cuda/__init__.py cuda/buffers.py <- cuda/graphs.py cuda/draft_graphs.py <- cuda/arena.py cuda/start.py
  <- cuda/runner.py <- vision/vision_graphs.py
  invariant/__init__.py invariant/cpu_ops.py invariant/cuda_ops.py <- invariant/cpu_attention.py
  <- invariant/cpu.py invariant/cuda.py <- engine/runners.py
5 | distributed/__init__.py distributed/ranks.py <- distributed/peer_memory.py
  <- distributed/process_group.py distributed/step_channel.py <- distributed/worker.py
3 | reasoning/reasoning_feature.py
5 | structured_outputs/grammar.py structured_outputs/json_schema.py structured_outputs/sandbox.py
  <- structured_outputs/masks.py <- structured_outputs/constraint.py <- structured_outputs/grammars.py
  <- structured_outputs/structured_feature.py
6 | requests/__init__.py requests/detokenizer.py
  requests/sentencepiece.py requests/recommended_params.py features/stop_strings.py <- requests/request.py
  requests/content_parts.py <- vision/image_urls.py vision/image_sources.py <- vision/image_reader.py
  <- requests/chat_templates.py <- requests/prompts.py <- vision/image_prompts.py requests/truncation.py
  requests/streamed_request.py <- requests/read_prompts.py <- requests/input_processor.py engine/output_processor.py
  lora/adapters.py <- engine/engine.py features/beam_search.py pooling/pooling_prompts.py pooling/pooling_request.py
  pooling/calls.py tiers/shared_rows.py tiers/block_files.py <- tiers/host_blocks.py
  <- lora/setup.py tiers/host_tier.py vision/setup.py <- tiers/disk_tier.py
  <- engine/build.py engine/engine_thread.py
  <- requests/step_callers.py requests/streams.py
  <- engine/llm_engine.py rollout/ <- llm.py <- __init__.py <- compat/vllm_pooling.py
  <- compat/vllm_llm.py <- compat/vllm.py <-
  compat/__main__.py
7 | benchmarks/__init__.py benchmarks/clients.py benchmarks/processes.py benchmarks/requests.py benchmarks/results.py
  benchmarks/shapes.py
  <- benchmarks/limits.py benchmarks/servers.py benchmarks/tables.py benchmarks/engines/loops.py <- benchmarks/engines/
  <- benchmarks/throughput.py benchmarks/sweeps.py benchmarks/host.py benchmarks/http.py benchmarks/profiling.py
  benchmarks/calls.py benchmarks/fused.py
  <- benchmarks/arguments.py benchmarks/pictures.py <- benchmarks/command.py <- serve/ <- __main__.py
"""


@cache
def place_of(file: str) -> tuple[int, int, int]:
    """(floor, line, how far to the right) of a file in HOUSE."""
    for line, text in enumerate(HOUSE.strip().replace("\n  ", " ").splitlines()):
        floor, chain = text.split(" | ")
        for link, names in enumerate(chain.split(" <- ")):
            if any(file == name or (name.endswith("/") and file.startswith(name)) for name in names.split()):
                return int(floor), line, link
    raise AssertionError(f"{file} has no place in the house: add it to HOUSE in {__file__}, beside its neighbours")


def may_import(file: str, other: str) -> bool:
    floor, line, link = place_of(file)
    other_floor, other_line, other_link = place_of(other)
    if file.startswith(("layers/", "models/")) and other.startswith("engine/"):
        return False
    return other_floor < floor or (other_line == line and other_link <= link)


FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
STATEMENTS = ast.stmt, ast.ExceptHandler, ast.match_case


def nodes(node: ast.AST, module_level: bool, runs: bool = False):
    """All statements below a node; with `runs` none for type checkers, and at module level no bodies of functions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, STATEMENTS) and not (
            (module_level and isinstance(child, FUNCTIONS)) or ((module_level or runs) and is_for_types(child))
        ):
            yield from nodes(child, module_level, runs)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


tree_of = cache(ast.parse)  # of a source


@cache
def imports(file: str, module_level: bool = False, runs: bool = False) -> frozenset[str]:
    """What a file imports: files of ours by path, other packages by their first name."""
    found = set()
    for node in nodes(tree_of((ROOT / file).read_text()), module_level, runs):
        if isinstance(node, ast.Import):
            found |= {resolve(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            found |= {resolve(node.module, alias.name) for alias in node.names}
    return frozenset(found)


def resolve(module: str, name: str = "") -> str:
    package, *path = module.split(".")
    if package != "nanovllm":
        return package
    for parts in ([*path, name], path):  # `from a import b`: b is a module, or something in a
        stem = "/".join(part for part in parts if part)
        for file in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
            if file in OURS and (parts != path or not name or name in names_in(file)):
                return file
    raise AssertionError(f"{module}.{name}: no such module")


@cache
def names_in(file: str) -> frozenset[str]:
    """All that a file may define, and more."""
    return frozenset(re.findall(r"\w+", (ROOT / file).read_text()))


def reach(file: str, module_level: bool = False, runs: bool = False) -> set[str]:
    """All that is imported on behalf of a file, through any number of our files."""
    seen, todo = set(), [file]
    while todo:
        new = imports(todo.pop(), module_level, runs) - seen
        seen |= new
        todo += [target for target in new if target in OURS]
    return seen


def test_imports_go_down():
    """And each file has a place."""
    for file in FILES:
        place_of(file)
    bad = [(file, target) for file in FILES for target in imports(file, runs=True) if target in OURS]
    bad = [pair for pair in bad if not may_import(*pair)]
    assert not bad, bad


def test_house_refuses():
    """The rules themselves can say no."""
    for file, other in [
        ("layers/attention.py", "batches/batch.py"),
        ("models/qwen3.py", "engine/sequence.py"),
        ("engine/sequence.py", "engine/scheduler.py"),
        ("engine/scheduler.py", "kernels/ops.py"),
        ("kernels/ops.py", "engine/sequence.py"),
        ("engine/llm_engine.py", "llm.py"),
        ("engine/model_runner.py", "batches/batch_runner.py"),
        ("utils/loader.py", "config.py"),
        ("llm.py", "serve/async_llm.py"),
        ("benchmarks/tables.py", "benchmarks/sweeps.py"),
        ("engine/engine.py", "benchmarks/processes.py"),
    ]:
        assert not may_import(file, other), (file, other)
    with pytest.raises(AssertionError, match="no place"):
        place_of("engine/surprise.py")


@pytest.mark.parametrize("file", SCHEDULING)
def test_scheduling_is_plain_python(file):
    assert not reach(file, runs=True) & {"torch", "triton", "transformers"}


def is_kernel(file: str) -> bool:
    """Those of a room are in a folder of that room."""
    return "kernels" in file.split("/")[:-1]


@pytest.mark.parametrize("file", [file for file in FILES if is_kernel(file)])
def test_kernels_know_kernels_only(file):
    assert all(is_kernel(target) for target in imports(file) if target in FILES)


def test_optional_packages_are_imported_when_used():
    optional = {"triton", "flash_attn", "llguidance"}
    for file in FILES:
        if not is_kernel(file):
            assert not imports(file, module_level=True) & optional, file
    assert not reach(LIBRARY, module_level=True) & optional
    assert "triton" in reach("__init__.py")  # and this walk would have seen it


def test_ranks_do_without_transformers():
    """It takes seconds to import, and they have no use for it."""
    assert "transformers" not in reach("distributed/worker.py", module_level=True)
    assert "transformers" in reach("engine/llm_engine.py")


ROOMS_BY_USE = ("cuda", "distributed", "fused", "lora", "structured_outputs", "tiers")
FEATURE_FILES = {feature.home.split(":")[0].replace(".", "/") + ".py" for feature in FEATURES.values()}
HOMES = *RUNNERS.values(), *DRAFTERS.values(), *(home for home in PROPOSERS.values() if isinstance(home, str))
OF_HOMES = {home.split(":")[0].removeprefix("nanovllm.").replace(".", "/") + ".py" for home in HOMES}
FUSED_FILES = {f"fused/{home.split(':')[0]}.py" for home in FORMS.values()}
NAMED_FILES = FEATURE_FILES | OF_HOMES | FUSED_FILES | {"rollout/__init__.py"}


def test_optional_rooms_are_imported_when_used():
    """One rank needs nothing of `distributed/`, a CPU no graphs, and only some requests need grammars."""
    loaded = reach(LIBRARY, module_level=True)
    rooms = [file for file in FILES if file.split("/")[0] in ROOMS_BY_USE and not is_kernel(file)]
    assert len(rooms) >= 8
    for file in rooms:
        assert file not in loaded and file in reach("__init__.py").union(NAMED_FILES, *map(reach, NAMED_FILES)) | {
            "distributed/__init__.py",
            "fused/__init__.py",
            "cuda/__init__.py",
            "lora/__init__.py",
            "structured_outputs/__init__.py",
            "tiers/__init__.py",
        }


def test_vocabulary_of_vllm_stays_in_its_room():
    """The engine asks for its table of settings, the command for its flags, and nothing else knows of the room."""
    outside = [file for file in FILES if not file.startswith("compat/")]
    assert {target for file in outside for target in imports(file) if target.startswith("compat/")} == {
        "compat/vllm_settings.py",
        "compat/vllm_flags.py",
    }


def test_formats_of_weights_are_imported_when_used():
    """The registry finds the others by their names."""
    loaded = reach(LIBRARY, module_level=True)
    assert {file for file in loaded if file.startswith("quantization/")} == {"quantization/__init__.py"}
    assert {"quantization/__init__.py", "quantization/fp8_cache.py"} <= reach("__init__.py")
    assert not [target for target in imports("quantization/__init__.py") if target in FILES]


def test_serving_is_an_extra():
    """Nothing else knows of it, and its packages are installed with it only; `nanovllm.serve` itself needs none."""
    packages = {
        "fastapi",
        "starlette",
        "uvicorn",
        "pydantic",
        "prometheus_client",
        "httptools",
        "llguidance",
        "msgspec",
    }
    for file in FILES:
        if not file.startswith("serve/") and file != "__main__.py":
            assert not any(target.startswith("serve/") for target in imports(file)), file
            assert not imports(file) & (packages - {"llguidance"}), file
    for file in ("__init__.py", "serve/__init__.py", "__main__.py"):
        assert not reach(file, module_level=True) & packages, file
    assert {"fastapi", "uvicorn", "pydantic", "prometheus_client"} <= reach("__main__.py")


def test_replicas_are_an_extra():
    """Only one file speaks to Ray, the command line alone imports that folder, and neither happens at import time."""
    for file in FILES:
        assert "ray" not in imports(file) or file == "serve/replicas/actors.py", file
        if not file.startswith(("serve/replicas/", "serve/fronts/")) and file != "serve/cli.py":
            assert not any(target.startswith("serve/replicas/") for target in imports(file)), file
    assert not any(target.startswith("serve/replicas/") for target in reach("serve/cli.py", module_level=True))
    for file in ("replica", "group", "routing", "ray_data", "__init__"):
        assert "ray" not in reach(f"serve/replicas/{file}.py", module_level=True)
    assert not reach("serve/replicas/routing.py") & {"torch", "numpy", "transformers"}


def test_benchmarks_are_an_extra():
    """The command line alone knows of them; other engines and what draws pictures are imported when they are used."""
    for file in FILES:
        if not file.startswith("benchmarks/") and file != "serve/cli.py":
            assert not any(target.startswith("benchmarks/") for target in imports(file)), file
    assert not any(target.startswith("benchmarks/") for target in reach("serve/cli.py", module_level=True))
    packages = {"matplotlib", "transformers", "vllm"}
    assert not reach("benchmarks/command.py", module_level=True) & packages
    assert packages <= reach("benchmarks/command.py")


def test_families_are_named_in_models_only():
    """A head that drafts is no family."""
    for file in FILES:
        if room_of(file) != "models":
            tree = tree_of((ROOT / file).read_text())
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert not any("qwen" in name.lower() for name in names), file
            heads = {"models/shared/head_models.py"} if room_of(file) == "spec_decode" else set()
            assert {x for x in imports(file) if x.startswith("models/")} <= {"models/__init__.py"} | heads, file


def code_lines(source: str) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    lines = {i for i, line in enumerate(source.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    in_docstrings: set[int] = set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            lines.update(range(node.lineno, node.end_lineno + 1))  # all lines of a string
        elif isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None:
            in_docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines - in_docstrings)


def room_of(file: str) -> str:
    """The folder of a file."""
    return file.split("/")[0] if "/" in file else "nanovllm"


def test_sizes_are_printed(record_property, capsys):
    """How much there is to read, folder by folder: a figure to look at, not a bound."""
    code = dict.fromkeys(map(room_of, FILES), 0)
    for file in FILES:
        code[room_of(file)] += code_lines((ROOT / file).read_text())
    record_property("lines", code)
    with capsys.disabled():
        rooms = ", ".join(f"{room} {lines:,}" for room, lines in code.items())
        print(f"\nnanovllm, lines of code: {rooms}; {sum(code.values()):,} in all, in {len(FILES)} files")
    assert code["engine"] > 500


FOLDERS_OF_ROOMS = (
    "benchmarks",
    "distributed",
    "fused",
    "cuda",
    "invariant",
    "lora",
    "serve",
    "structured_outputs",
    "tiers",
)
PLAIN_GENERATE = """
import json, sys
from nanovllm import LLM, SamplingParams
ways = [dict(temperature=0), dict(temperature=0.8), dict(top_k=20, top_p=0.9)]
with LLM("tiny-qwen3", max_model_len=256, device="cpu") as llm:
    outputs = llm.generate(["HAMLET"] * 3, [SamplingParams(max_tokens=8, **way) for way in ways], use_tqdm=False)
assert all(output.token_ids for output in outputs)
files = [getattr(module, "__file__", None) for name, module in sys.modules.items() if name.split(".")[0] == "nanovllm"]
print(json.dumps(files))
"""


def test_generate_needs_no_room(tmp_path):
    """Not one of them: it runs in a copy without their folders."""
    copy = tmp_path / "nanovllm"
    shutil.copytree(ROOT, copy, ignore=lambda folder, names: FOLDERS_OF_ROOMS if Path(folder) == ROOT else ())
    files = [Path(file) for file in json.loads(run_with_copy(PLAIN_GENERATE, tmp_path))]
    assert len(files) > 30 and all(file.is_relative_to(copy) for file in files)


def test_code_lines():
    source = '"""A docstring."""\n\n# a comment\ndef f(x):\n    """More."""\n    return (\n        x\n    )\n'
    assert code_lines(source) == 4
    assert code_lines(source + 'print("""\n\n# no comment\n""")\n') == 8


def test_no_line_is_exempt_from_the_formatter():
    files = [*ROOT.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]
    assert len(files) > 500 and not [file for file in files if re.search("# fmt: (skip|off)", file.read_text())]
