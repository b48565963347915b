"""What the documents say is true: code runs and prints what stands there, figures are those of the results file, names
exist, links lead somewhere. And they are short.
"""

import ast
import codeop
import inspect
import json
import re
import runpy
import shlex
import sys
import textwrap
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from common import generate_by_steps
from settings_tables import PAGES, with_tables

from nanovllm import LLM, SamplingParams, SchedulingPolicy, attention
from nanovllm.benchmarks.arguments import make_parser
from nanovllm.benchmarks.throughput import WORKLOADS
from nanovllm.config import Config
from nanovllm.engine.engine import Engine
from nanovllm.layers.attention import Attention, AttentionSpec
from nanovllm.serve import cli
from nanovllm.utils.context import get_context

ROOT = Path(__file__).parents[1]
PATHS = [ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md", ROOT / "tests/README.md"]
PATHS += sorted((ROOT / "nanovllm").rglob("*.md"))
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PATHS}
README = DOCUMENTS["README.md"]
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "nanovllm").rglob("*.py")))
WORDS = {*re.findall(r"\w+", SOURCE)}
FOLDERS = [*(ROOT / "nanovllm").glob("**/"), ROOT, ROOT / "tests"]


def page(name: str) -> str:
    return DOCUMENTS[f"nanovllm/docs/{name}.md"]


def table(text: str) -> list[list[str]]:
    """The cells of the first table, without its header."""
    lines = text[text.index("| ---") :].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


# -- code --------------------------------------------------------------------------------------------------------------

NOT_PROGRAMS = ".github/CONTRIBUTING.md", *(f"nanovllm/docs/{name}.md" for name in ("experiments", "tour", "training"))
EXPERIMENTS = blocks(page("experiments"))
FEATURE, HOST_FEATURE, BACKEND, STATE = blocks(DOCUMENTS[".github/CONTRIBUTING.md"])
PROGRAMS = {
    f"{document}:{i}": code
    for document, text in DOCUMENTS.items()
    if document not in NOT_PROGRAMS
    for i, code in enumerate(blocks(text))
    if 'LLM("tiny-qwen3"' in code
}


def run(code: str, capsys, names: dict | None = None) -> None:
    """Output that stands in the code, as comments, is what the code prints; or one line of it is an example.

    names: of the session in which it runs, by default a new one.
    """
    if names is None:
        names = {"LLM": LLM, "SamplingParams": SamplingParams, "SchedulingPolicy": SchedulingPolicy}
    if 'device="cpu"' not in code:
        code = code.replace('LLM("tiny-qwen3"', 'LLM("tiny-qwen3", device="cpu"')
    exec(code, names)
    expected = [line[2:] for line in code.splitlines() if line.startswith("# ")]
    if expected:
        pairs = zip_longest(expected, capsys.readouterr().out.splitlines(), fillvalue="nothing")
        assert [line if line.startswith("for example: ") else printed for line, printed in pairs] == expected


@pytest.mark.parametrize("code", EXPERIMENTS)
def test_experiment(code, capsys):
    assert "\n# " in code
    run(code, capsys)


def test_there_are_seven():
    assert len(EXPERIMENTS) == 7


def test_tour(capsys):
    """Its blocks are pasted into one session, which begins with nothing."""
    session, codes = {}, blocks(page("tour"))
    assert len(codes) >= 7 and len([line for line in codes[0].splitlines() if line and line[0] != "#"]) <= 12
    for code in codes:
        assert "\n# " in code
        run(code, capsys, session)


NOT_PASTED = "CONTRIBUTING.md", "concepts.md", "training.md"  # programs of their own, and quotes
PASTED = {name: text for name, text in DOCUMENTS.items() if not name.endswith(NOT_PASTED)}


@pytest.mark.parametrize("document", PASTED)
def test_code_can_be_pasted(document):
    """Into the prompt of Python 3.12 and before, where an empty line alone ends a compound statement."""
    for code in blocks(PASTED[document]):
        statement: list[str] = []
        for line in (*code.splitlines(), ""):
            statement.append(line)
            try:
                is_complete = codeop.compile_command("\n".join(statement), symbol="single") is not None
            except SyntaxError as error:
                raise AssertionError(f"an empty line is missing, or one too many: {statement}") from error
            statement = [] if is_complete else statement
        assert "".join(statement) == ""


@pytest.mark.parametrize("code", [FEATURE, HOST_FEATURE], ids=["device", "host"])
def test_own_feature(capsys, code):
    """The exercises of CONTRIBUTING.md; a fixture of common.py removes the features."""
    run(code, capsys)


@pytest.mark.parametrize("window", [None, 7])
def test_own_backend(capsys, monkeypatch, make_llm, window):
    """It computes what the plain backend does, also for chunks of prompts beside decodes, and with a window."""
    monkeypatch.setattr(attention, "BACKENDS", attention.BACKENDS.copy())
    run(BACKEND, capsys)
    assert capsys.readouterr().out.strip()
    spec = lambda layer: AttentionSpec(layer.num_kv_heads, layer.head_dim, window)
    monkeypatch.setattr(Attention, "cache_spec", spec)
    prompts = ["List the primes up to 17.", "HAMLET.", "Who are you? " * 20]
    texts = []
    for backend in ("one by one", "sdpa"):
        llm = make_llm(attention_backend=backend, max_num_batched_tokens=16)
        requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)) for prompt in prompts]
        texts.append([output.outputs[0].text for output in generate_by_steps(llm, requests)])
        assert llm.stats()["steps"]["mixed"] > 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program, capsys, tmp_path, monkeypatch):
    if program.startswith("nanovllm/docs/serving.md"):
        pytest.importorskip("fastapi")
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    run(PROGRAMS[program], capsys)


CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", README, re.DOTALL)).split("$ ")[1:]
COMMANDS = {command: shown for command, _, shown in (text.partition("\n") for text in CONSOLE) if "pip" not in command}


def test_installation_of_the_readme():
    """Two commands are the first that one sees. The second is run here; .ci/run installs by the first."""
    first, example = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)[0].splitlines()
    assert "```" not in README.split(first)[0].removesuffix("```sh\n")
    assert first == "python3 -m venv .venv && source .venv/bin/activate && pip install -e '.[serve]'"
    assert example == "python example.py" and (ROOT / "example.py").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_readme(command, capsys, monkeypatch):
    """What it shows is printed, in that order; dots stand for other lines. Commands run in this process."""
    program, *arguments = shlex.split(command)
    lines = [line for line in COMMANDS[command].splitlines() if line not in ("", "...")]
    assert lines
    if command.startswith("nanovllm serve"):
        pytest.importorskip("fastapi")
        from nanovllm.serve.address import ServerSettings, announce

        announce(ServerSettings(), *arguments[1:], MagicMock(**{"getsockname.return_value": ("127.0.0.1", 8000)}))
    elif program == "nanovllm":
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert not end.value.code
    else:
        monkeypatch.setattr(sys, "argv", arguments)
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line in lines] == lines


def test_programs_were_found():
    assert len(COMMANDS) == 2
    assert len(PROGRAMS) >= 5 and {"README.md:0", "nanovllm/docs/how-a-request-is-served.md:0"} <= PROGRAMS.keys()


# -- figures -----------------------------------------------------------------------------------------------------------

RESULTS = json.loads((ROOT / ".github/performance.json").read_text())["results"]


def test_performance_table_equals_the_results_file():
    expected = [
        [
            f"{setup}, {WORKLOADS[workload]}",
            *(f"{rates[engine]:,}" if engine in rates else "" for engine in ("nanovllm", "vllm", "original")),
        ]
        for setup, workloads in RESULTS.items()
        for workload, rates in workloads.items()
    ]
    assert table(page("performance")) == expected


NOISE = 1.04  # machines of the same kind differ by that much


def test_speed_table_equals_the_results_file():
    """The README has this package and vLLM, the higher number in bold."""
    expected, flat = [], " ".join(README.split())
    for setup, workloads in RESULTS.items():
        cells = [(rates["nanovllm"], rates["vllm"]) for rates in workloads.values()]
        assert list(workloads) == list(WORKLOADS)
        bold = [[f"**{rate:,}**" if rate == max(cell) else f"{rate:,}" for rate in cell] for cell in cells]
        expected.append([setup, *map(" / ".join, bold)])
    assert table(section(README, "Speed")) == expected
    ratios = [rates["nanovllm"] / rates["vllm"] for workloads in RESULTS.values() for rates in workloads.values()]
    num_ahead = sum(ratio > NOISE for ratio in ratios)
    assert min(ratios) > 1 / NOISE and len(ratios) - num_ahead == 2
    assert f"faster than vLLM 0.26 in {num_ahead} of the {len(ratios)} measurements" in flat
    assert "about equal in the other two" in flat


def test_figure_has_the_numbers_of_the_results_file():
    """It was drawn again after the last change of the results."""
    text = (ROOT / ".github/performance.svg").read_text()
    labels = set(re.findall(r">([\d,]+)<", text))
    assert {
        f"{rate:,}" for workloads in RESULTS.values() for rates in workloads.values() for rate in rates.values()
    } <= labels


def test_arguments_of_the_benchmark_exist():
    """Every flag in a command with `bench.py`, or `nanovllm bench`."""
    known = make_parser().format_help()
    commands = re.findall(r"bench(?:\.py)?((?:\s+[^\s`]+)*)", "\n".join(DOCUMENTS.values()))
    flags = {flag for arguments in commands for flag in re.findall(r"\s(--[\w-]+)", arguments)}
    assert len(flags) > 8 and flags <= set(re.findall(r"--[\w-]+", known))


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_those_of_the_docstrings(path):
    """If not: `python tests/scripts/settings_tables.py`."""
    assert path.read_text() == with_tables(path)


def test_settings_table_is_complete():
    settings = [row[0].strip("`") for row in table(page("settings"))]
    assert settings == [field.name for field in fields(Config) if field.init]


def test_guide_table_names_what_exists():
    """Each table is of a file of the guides, or a folder, in their order. Every identifier on the side of this package
    stands in its source.
    """
    files = re.findall(r"^## (\S+)$", page("names"), re.MULTILINE)
    assert len(files) > 10 and files == sorted(files) and all((ROOT / "nanovllm" / file).exists() for file in files)
    rows = [row for file in files for row in table(section(page("names"), file))]
    rest = section(page("names"), "What works differently")
    codes = [code for text in (*(here for _, here in rows), rest) for code in re.findall(r"`([^`]+)`", text)]
    names = {name for code in codes for name in re.findall(r"[A-Za-z_]\w+", code)}
    assert len(rows) + rest.count("\n- ") <= 44
    assert len(names) > 30 and names - WORDS - {"generation_config", "json"} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_classes_that_are_named_exist(document):
    """Files like `batches/batch.py`, in the folder of the document, the package, the repository or tests/; attributes
    like `Batch.positions`.
    """
    text = DOCUMENTS[document]
    if document == "nanovllm/docs/names.md":  # the other side of its tables is another project's
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    folders = [(ROOT / document).parent, *FOLDERS]
    files = set(re.findall(r"`([\w/*]+\.py)`", text)) - {"modeling_*.py"}  # transformers'
    assert [file for file in files if not any(any(folder.glob(file)) for folder in folders)] == []
    names = {word for name in re.findall(r"`([A-Z]\w*[a-z]\w*\.\w+)`", text) for word in name.split(".")}
    assert names - WORDS == set()


def test_pages_that_messages_and_helps_name_exist():
    """By the path in a clone, from where the commands run."""
    texts = "".join(file.read_text() for file in (ROOT / "nanovllm").rglob("*.py"))
    pages = {*re.findall(r"[\w./]*docs/[\w-]+\.md", texts)}
    assert len(pages) > 8 and [page for page in pages if not (ROOT / page).is_file()] == []


def test_readme_shows_the_step_as_it_is():
    assert (
        textwrap.dedent(inspect.getsource(Engine.step)).strip()
        == blocks(section(README, "How a step works"))[0].strip()
    )


def definitions(file: Path) -> set[str]:
    """Names of classes and functions; `Class.name` of methods, fields, and attributes that methods set."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef):
                    found.add(f"{node.name}.{part.name}")
                elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    found.add(f"{node.name}.{part.id}")
                elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    found.add(f"{node.name}.{part.attr}")
    return found


STAGES = re.split(r"^\d\. ", page("how-a-request-is-served").split("\n## ")[0], flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.split("**")[1])
def test_stage_of_a_request_names_what_exists(stage):
    """Each function, class and attribute is defined in one of the files of the stage, and each file has one of them."""
    text, files = stage.split("Files: ")
    names = {name for name in re.findall(r"`([^`]+)`", text) if len(name) > 1}
    found = {file: definitions(ROOT / "nanovllm" / file) for file in re.findall(r"`([^`]+)`", files)}
    assert len(names) >= 3 and names <= set().union(*found.values()), names - set().union(*found.values())
    inherited = {"llm.py"}  # LLM has nothing of its own there but its name
    assert [file for file, defined in found.items() if not defined & names and file not in inherited] == []


def test_there_are_eight_stages():
    assert len(STAGES) == 8


def test_first_step_in_numbers():
    """The page's call makes the tokens, tensors and texts that stand there: in its first two steps, and at its end."""
    numbers = section(page("how-a-request-is-served"), "The first step in numbers").replace("`", "")
    found, ends = [], []

    def watch(owner, name, describe):
        call = getattr(owner, name)

        def watched(*arguments):
            result = call(*arguments)
            found.extend(describe(result))
            return result

        setattr(owner, name, watched)

    def inputs(result):
        context = get_context()
        yield from (f"{name} {x.tolist()}" for name, x in zip(("input_ids", "positions"), result))
        yield from (f"{name} {getattr(context, name).tolist()}" for name in ("slot_mapping", "context_lens"))
        if context.is_prefill:
            yield f"block_tables {context.block_tables.tolist()}"

    def shape(name, x):
        return f"{name} {tuple(x.shape)}"

    def tokens(step, result):
        found.append(" and ".join(str(seq.token_ids) for seq in step.sampled_seqs))
        ends.append(len(found))

    with LLM("tiny-qwen3", device="cpu", dtype="float32") as llm:
        runner = llm.core.model_runner
        watch(runner, "prepare_prefill", inputs)
        watch(runner, "prepare_decode", inputs)
        watch(runner, "run_model", lambda x: [shape("hidden states", x)])
        watch(runner, "sampler_input", lambda x: [shape("hidden states", x[0]), f"positions {x.positions.tolist()}"])
        watch(runner.model, "compute_logits", lambda x: [shape("logits", x)])
        watch(runner, "sample", lambda x: [f"token_ids {x.tolist()}"])
        llm.core.on_step.append(tokens)
        outputs = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    expected = [*found[: ends[0]], *found[ends[0] : ends[0] + 4], found[-1]]
    expected.append(" and ".join(repr(output.text) for output in outputs))
    assert len(ends) == 3 and len(expected) == 17 and [part for part in expected if part not in numbers] == []


def test_messages_of_errors_are_those_of_the_code():
    """What stands between the dots of a quoted message is in the source."""
    quoted = [cell for cell, _ in table(section(page("troubleshooting"), "The engine does not start"))]
    messages = [message for cell in quoted for message in re.findall(r"^`([^`]+)`$", cell)]
    parts = {part.strip(" ,:=") for message in messages for part in message.split("...")}
    assert len(messages) >= 8 and [part for part in parts if part not in SOURCE] == []


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_reading_order_has_true_sizes():
    rows = [row for row in table(page("what-to-read")) if row[0].startswith("`")]
    assert len(rows) >= 10
    sizes = {file: len((ROOT / file.strip("`")).read_text().splitlines()) for file, _, _ in rows}
    for file, lines, _ in rows:
        assert abs(int(lines) - sizes[file]) <= 0.25 * sizes[file] + 10, (file, lines, sizes[file])
    assert len(rows) == 12 and "these twelve files" in page("what-to-read") and "twelve files" in README
    (total,) = re.findall(r"about ([\d,]+) lines with comments", page("what-to-read"))
    assert f"with about {total} lines" in " ".join(README.split())
    assert abs(int(total.replace(",", "")) - sum(sizes.values())) <= 0.05 * sum(sizes.values())


def lines_of(text: str) -> list[str]:
    """Those that are not empty, without their indentation."""
    return [line.strip() for line in text.splitlines() if line.strip()]


CONCEPTS = page("concepts").split("\n## ")[1:-1]  # the last is the glossary


@pytest.mark.parametrize("concept", CONCEPTS, ids=lambda text: text.partition("\n")[0])
def test_code_of_a_concept_is_quoted(concept):
    """Its lines follow each other in the file that is named above them."""
    quotes = re.findall(r"\n`([^`\n]+\.py)`\n\n```python\n(.*?)```", concept, re.DOTALL)
    assert len(quotes) == concept.count("```python") == 1
    for file, code in quotes:
        source, quoted = lines_of((ROOT / "nanovllm" / file).read_text()), lines_of(code)
        assert quoted in [source[i : i + len(quoted)] for i in range(len(source))]


def test_concepts_are_short():
    assert len(CONCEPTS) >= 14
    words = {
        concept.partition("\n")[0]: len(re.sub(r"```.*?```", "", concept, flags=re.DOTALL).split())
        for concept in CONCEPTS
    }
    assert {name: number for name, number in words.items() if not 50 <= number <= 160} == {}


# -- links -------------------------------------------------------------------------------------------------------------


def links(document: str) -> list[tuple[Path, str]]:
    """Files and anchors that a document links to."""
    text, path = re.sub(r"```.*?```", "", DOCUMENTS[document], flags=re.DOTALL), ROOT / document
    found = [link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    return [((path.parent / file).resolve() if file else path, anchor) for file, _, anchor in found]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    """To files that exist, and to headings that their documents have."""
    for target, anchor in links(document):
        assert target.exists(), (document, target)
        text = re.sub(r"```.*?```", "", target.read_text(), flags=re.DOTALL) if anchor else ""
        headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, (document, target, anchor)


def test_every_page_is_in_the_index():
    """The README leads to the index, and the index to every page and to the README of every folder."""
    index = "nanovllm/docs/README.md"
    assert ROOT / index in dict(links("README.md"))
    linked = {target.relative_to(ROOT).as_posix() for target, _ in links(index)} | {index}
    assert {document for document in DOCUMENTS if not document.startswith("nanovllm/assets/")} <= linked


def test_every_test_file_is_described():
    described = set(re.findall(r"`(test_\w+\.py)`", DOCUMENTS["tests/README.md"]))
    assert {path.name for path in (ROOT / "tests").glob("test_*.py")} <= described


def test_scripts_are_described_and_exist():
    scripts = {path.name for path in (ROOT / "tests/scripts").glob("*.py")}
    described = set(re.findall(r"scripts/(\w+\.py)", DOCUMENTS["tests/README.md"]))
    named = set(re.findall(r"tests/(?:scripts/)?((?!test_|conftest|common)\w+\.py)", "\n".join(DOCUMENTS.values())))
    assert named <= scripts == described
