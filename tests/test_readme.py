"""What the READMEs say is true: experiments print what stands there, figures are those of the results file, links lead
somewhere.
"""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

import bench
from nanovllm import LLM, SamplingParams, SchedulingPolicy
from nanovllm.config import Config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = ["README.md", "nanovllm/engine/README.md", "nanovllm/kernels/README.md", "tests/README.md"]
DOCUMENTS += ["nanovllm/serve/README.md", "nanovllm/serve/replicas/README.md", "nanovllm/quantization/README.md"]
DOCUMENTS += ["nanovllm/structured_outputs/README.md", ".github/CONTRIBUTING.md"]


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The cells of the first table, without its header."""
    lines = text[text.index("| ---") :].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


EXPERIMENTS = re.findall(r"```python\n(.*?)```", section("Experiments"), re.DOTALL)
(TOP_K,) = (code for code in EXPERIMENTS if "top_k" in code)
CONTRIBUTING = (ROOT / ".github/CONTRIBUTING.md").read_text()
(FEATURE,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL)


def run(code: str, settings: str, capsys) -> None:
    """Every line that is printed stands at the end of the code, as a comment."""
    names = {"LLM": LLM, "SamplingParams": SamplingParams, "SchedulingPolicy": SchedulingPolicy}
    exec(code.replace('"tiny-qwen3"', f'"tiny-qwen3", device="cpu"{settings}'), names)
    assert capsys.readouterr().out.splitlines() == [line[2:] for line in code.splitlines() if line.startswith("# ")]


@pytest.mark.parametrize("code", EXPERIMENTS)
def test_experiment(code, capsys):
    run(code, "", capsys)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_top_1_gives_one_answer_in_every_dtype(dtype, capsys):
    """As in bfloat16, in which the experiment itself runs."""
    run(TOP_K, f", dtype={dtype!r}", capsys)


def test_own_feature(capsys):
    """The exercise of CONTRIBUTING.md; a fixture of conftest.py removes the feature."""
    run(FEATURE, "", capsys)


def test_there_are_seven():
    assert len(EXPERIMENTS) == 7


def test_performance_table_equals_the_results_file():
    results = json.loads((ROOT / ".github/performance.json").read_text())["results"]
    expected = [
        [
            f"{setup}, {bench.WORKLOADS[workload]}",
            *(f"{rates[engine]:,}" if engine in rates else "" for engine in ("nanovllm", "vllm", "original")),
        ]
        for setup, workloads in results.items()
        for workload, rates in workloads.items()
    ]
    assert table(section("Performance")) == expected


def test_figure_has_the_numbers_of_the_results_file():
    """It was drawn again after the last change of the results."""
    text = (ROOT / ".github/performance.svg").read_text()
    labels = set(re.findall(r">([\d,]+)<", text))
    results = json.loads((ROOT / ".github/performance.json").read_text())["results"]
    assert {
        f"{rate:,}" for workloads in results.values() for rates in workloads.values() for rate in rates.values()
    } <= labels


def test_settings_table_is_complete():
    settings = [row[0].strip("`") for row in table(section("Settings"))]
    assert sorted(settings) == sorted(field.name for field in fields(Config) if field.init and field.name != "model")


def test_guide_table_names_what_exists():
    """Every identifier on the side of this package stands in its source."""
    source = "\n".join(path.read_text() for path in (ROOT / "nanovllm").rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    engine = (ROOT / "nanovllm/engine/README.md").read_text().split("\n## Names of the guides\n")[1]
    rows = table(section("For readers of nano-vllm guides")) + table(engine)
    names = {
        name
        for _, here in rows
        for code in re.findall(r"`([^`]+)`", here)
        for name in re.findall(r"[A-Za-z_]\w+", code)
    }
    assert len(names) > 15 and names - words - {"generation_config", "json"} == set()


def test_reading_order_has_true_sizes():
    rows = [row for row in table(section("How a step works, and what to read first")) if row[0].startswith("`")]
    assert len(rows) >= 10
    for file, lines, _ in rows:
        true = len((ROOT / file.strip("`")).read_text().splitlines())
        assert abs(int(lines) - true) <= 0.25 * true + 10, (file, lines, true)


def test_every_test_file_is_described():
    described = set(re.findall(r"`(test_\w+\.py)`", (ROOT / "tests/README.md").read_text()))
    assert {path.name for path in (ROOT / "tests").glob("test_*.py")} <= described


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    """To files that exist, and to headings that their documents have."""
    path = ROOT / document
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), (document, link)
        headings = (
            [line.lstrip("# ") for line in target.read_text().splitlines() if line.startswith("#")] if anchor else []
        )
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, link
