"""Write the tables of settings in `nanovllm/docs/` from docstrings: `python tests/scripts/settings_tables.py`."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

from nanovllm.config import Config
from nanovllm.features.beam_params import BeamSearchParams
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.settings import ServerSettings
from nanovllm.utils.flags import descriptions

DOCS = Path(__file__).parents[2] / "nanovllm/docs"
# each page has a mark, `<!-- Config -->` for example, before each of its tables
PAGES = {
    DOCS / "settings.md": (Config,),
    DOCS / "requests.md": (SamplingParams, BeamSearchParams),
    DOCS / "serving.md": (ServerSettings,),
}


def table(settings: type) -> str:
    """Return a table with a row for each field: its name, its default, and its description in the class's docstring."""
    texts = descriptions(settings)
    rows = []
    for field in fields(settings):
        if field.init:
            default = "required" if field.default is MISSING else f"`{field.default!r}`"
            rows.append(f"| `{field.name}` | {default} | {_cell(texts[field.name])} |")
    return "\n".join(["| name | default | meaning |", "| --- | --- | --- |", *rows])


def with_tables(page: Path) -> str:
    """Return the text of a page with new tables."""
    text = page.read_text()
    for settings in PAGES[page]:
        mark = f"<!-- {settings.__name__} -->\n"
        before, after = text.split(mark)
        after = re.sub(r"^\n(\|.*\n)+", "", after)  # the old table
        text = f"{before}{mark}\n{table(settings)}\n{after}"
    return text


def _cell(text: str) -> str:
    """Escape text for a table cell. Text that looks like an HTML tag stays text."""
    return text.removesuffix(".").replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page))
