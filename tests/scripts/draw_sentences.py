"""Draw random sentences from the documents and docstrings, for a reader who marks those that must be read twice.

python tests/scripts/draw_sentences.py --seed 1 --number 30
"""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md", ROOT / "tests/README.md"]
DOCUMENTS += sorted((ROOT / "nanovllm").rglob("*.md"))


def sentences(text: str) -> list[str]:
    """Those of running text: code blocks, tables and headings are left out."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = ["" if line.lstrip().startswith(("|", "#", "!")) else line for line in text.splitlines()]
    # an item of a list, and the description of a parameter, are paragraphs
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |\n(?=\w+(?:, \w+)*: )", "\n".join(lines))
    parts = [part for text in paragraphs for part in re.split(r"(?<=[.?!])\s+(?=[A-Z`*\[])", " ".join(text.split()))]
    return [part for part in parts if len(part.split()) > 4]


def docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=30, help="sentences of each kind")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    files = sorted((ROOT / "nanovllm").rglob("*.py"))
    kinds = {
        "documents": [(file, x) for file in DOCUMENTS for x in sentences(file.read_text())],
        "docstrings": [(file, x) for file in files for text in docstrings(file) for x in sentences(text)],
    }
    for kind, found in kinds.items():
        print(f"{kind}: {args.number} of {len(found):,} sentences")
        for i, (file, sentence) in enumerate(rng.sample(found, args.number), 1):
            print(f"{i:3}. {sentence}  ({file.relative_to(ROOT)})")


if __name__ == "__main__":
    main()
