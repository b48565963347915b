"""The files of a model and its tokenizer: in a folder, in this package, or on the Hugging Face hub."""

import json
from pathlib import Path

BUNDLED = Path(__file__).parent.parent / "assets"
TOKENIZER_FILES = ("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",)  # one of these is enough
JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")


def find_model(model: str, revision: str | None = None, with_weights: bool = True) -> Path:
    """The absolute folder of `model`. A hub id is downloaded, with the hub client's progress bar.

    `revision` is a branch, tag or commit on the hub. FileNotFoundError, with advice, if there is no such folder and it
    can't be downloaded.
    """
    folder = _find("model", model, revision, with_weights)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model={model!r}: the folder holds no config.json")
    return folder


def find_tokenizer(tokenizer: str | None, model_folder: Path) -> Path:
    """The absolute folder of `tokenizer`, by default the model's. FileNotFoundError if it has no tokenizer."""
    folder = model_folder if tokenizer is None else _find("tokenizer", tokenizer, None, with_weights=False)
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES):
        wanted = ", or ".join(" and ".join(names) for names in TOKENIZER_FILES)
        raise FileNotFoundError(f"{folder}: holds no tokenizer ({wanted}); `tokenizer=` takes another folder or hub id")
    return folder


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


def read_json(file: Path) -> dict:
    """The JSON object in `file`. ValueError with the file's name for anything else."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:  # the syntax or the encoding is wrong
        from nanovllm.utils.download import broken_file  # its words are rarely needed

        raise broken_file(file, f"is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object, not a {type(content).__name__}")
    return content


def _find(setting: str, name: str, revision: str | None, with_weights: bool) -> Path:
    if not isinstance(name, (str, Path)):
        raise TypeError(f"{setting}={name!r}: must be a folder, a hub id, or the name of a bundled model")
    name = str(name)
    if name in [file.parent.name for file in BUNDLED.glob("*/config.json")]:
        return BUNDLED / name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()  # the working directory may change, and other processes read it too
    from nanovllm.utils.download import download  # a local model does without the hub's client

    return download(setting, name, revision, with_weights)
