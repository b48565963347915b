"""Makes transformers 4 load tokenizers that transformers 5 saved."""

from pathlib import Path
from typing import Any

import transformers

TEMPLATES = "additional_chat_templates/*.jinja"  # named templates, in addition to the default one


def load_with_version_4(name: str, folder: str, config: dict[str, Any]) -> Any:
    """Load the tokenizer in `folder` with the class `name`.

    `config` is the content of the folder's tokenizer_config.json.
    """
    options: dict[str, Any] = {}
    if config.get("tokenizer_class") == "TokenizersBackend":
        name = "PreTrainedTokenizerFast"
    if isinstance(special := config.get("extra_special_tokens"), list):
        options = {"extra_special_tokens": {}, "additional_special_tokens": special}
    tokenizer = getattr(transformers, name).from_pretrained(folder, **options)
    if templates := {file.stem: file.read_text("utf-8") for file in Path(folder).glob(TEMPLATES)}:
        tokenizer.chat_template = {"default": tokenizer.chat_template} | templates
    return tokenizer
