"""Loads a tokenizer."""

from pathlib import Path

from nanovllm.utils.hub import read_json

JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")


def load_tokenizer(folder: str):
    """transformers' tokenizer of `folder`. ValueError with the name of the broken file, if known, or of the folder."""
    for file in (Path(folder) / name for name in JSON_FILES):
        if file.exists():
            read_json(file)  # transformers' own errors do not say which file
    from transformers import AutoTokenizer  # only here: importing it takes seconds

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # a broken file can raise anything
        raise ValueError(f"{folder}: can't load the tokenizer ({type(error).__name__}: {error})") from error
