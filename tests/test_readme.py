"""The README's experiments do what stands there."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
EXPERIMENTS = re.findall(r"```python\n(.*?)```", README.split("## Six experiments")[1].split("\n## ")[0], re.DOTALL)


@pytest.mark.parametrize("code", EXPERIMENTS)
def test_experiment(code, capsys):
    """Every line that is printed stands at the end, as a comment."""
    exec(code.replace('"tiny-qwen3"', '"tiny-qwen3", device="cpu"'), {})
    assert capsys.readouterr().out.splitlines() == [line[2:] for line in code.splitlines() if line.startswith("# ")]


def test_there_are_six():
    assert len(EXPERIMENTS) == 6
