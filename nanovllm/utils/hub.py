"""Where the files of a model and its tokenizer are: a folder, the package itself, or the Hugging Face hub."""

import json
import re
from pathlib import Path

BUNDLED = Path(__file__).parent.parent / "assets"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PLAIN_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))  # any of these will do
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def find_model(model: str, revision: str | None = None, with_weights: bool = True) -> Path:
    """The absolute folder of `model`, fetched from the hub (with its progress bar) where it is a hub id.

    `revision` is a branch, tag or commit on the hub. Raises FileNotFoundError, with what to do, where there is no such
    folder and it can't be fetched.
    """
    folder = _find("model", model, revision, PLAIN_FILES + ["*.safetensors"] * with_weights)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model={model!r}: the folder holds no config.json")
    return folder


def find_tokenizer(tokenizer: str | None, model_folder: Path) -> Path:
    """The absolute folder of `tokenizer`, by default the model's; FileNotFoundError where no tokenizer is in it."""
    folder = model_folder if tokenizer is None else _find("tokenizer", tokenizer, None, PLAIN_FILES)
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES):
        wanted = ", or ".join(" and ".join(names) for names in TOKENIZER_FILES)
        raise FileNotFoundError(f"{folder}: holds no tokenizer ({wanted}); `tokenizer=` takes another folder or hub id")
    return folder


def read_json(file: Path) -> dict:
    """The JSON object in `file`; ValueError that names the file where there is none."""
    refuse_lfs_pointer(file)
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:  # of the syntax or the encoding
        raise ValueError(f"{file}: is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object, not a {type(content).__name__}")
    return content


def refuse_lfs_pointer(file: Path) -> None:
    """ValueError where a clone without git-lfs left a pointer in the place of the file."""
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{file}: is a git-lfs pointer, not the file itself; `git lfs pull` fetches it")


def _find(setting: str, name: str, revision: str | None, patterns: list[str]) -> Path:
    if not isinstance(name, (str, Path)):
        raise TypeError(f"{setting}={name!r}: must be a folder, a hub id, or the name of a bundled model")
    name = str(name)
    if (BUNDLED / name / "config.json").is_file() and HUB_ID.fullmatch(name):
        return BUNDLED / name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()  # it is read again later, and in other processes; symbolic links stay as they are
    if not HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"{setting}={name!r}: no such folder")
    from huggingface_hub import snapshot_download  # only here: a local model needs no hub client

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns)).absolute()
    except Exception as error:  # the client's errors have no common base: offline, unknown name, no access
        raise FileNotFoundError(
            f"{setting}={name!r}: no such folder, and the hub did not give it ({type(error).__name__}: {error}). "
            f"Without a network pass the folder of a downloaded checkpoint, or use the bundled 'tiny-qwen3'."
        ) from error
