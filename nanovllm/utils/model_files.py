"""Finds the folders of models and tokenizers, without PyTorch."""

from pathlib import Path

from nanovllm.utils.checks import read_json
from nanovllm.utils.download import HUB_ID, download
from nanovllm.utils.families import find_model_type
from nanovllm.utils.refusals import no_config

BUNDLED = Path(__file__).parent.parent / "assets"
TOKENIZER_FILES = ("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",)  # one group is enough


def find_model(model: str, revision: str | None = None, with_weights: bool = True) -> Path:
    """Return the absolute path of `model`'s folder, which may be downloaded, or raise a FileNotFoundError."""
    folder = _find("model", model, revision, with_weights)
    if not (folder / "config.json").is_file():
        raise no_config(model, folder)
    return folder


def check_model(model: str, revision: str | None = None) -> None:
    """Raise the errors of `find_model` and `find_model_type`. Commands call this function before they import PyTorch.

    A hub id "owner/name" is not checked, because it is looked up on the hub when the model is loaded.
    """
    if "/" in model and HUB_ID.fullmatch(model) and not Path(model).is_dir():
        return
    file = find_model(model, revision, with_weights=False) / "config.json"
    if not (raw := read_json(file)).get("text_config"):  # otherwise, the family must be imported
        find_model_type(raw, file)


def find_tokenizer(tokenizer: str | None, model_folder: Path) -> Path:
    """Return the absolute path of `tokenizer`'s folder, by default the model's, or raise a FileNotFoundError."""
    folder = model_folder if tokenizer is None else _find("tokenizer", tokenizer, None, with_weights=False)
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES):
        wanted = ", or ".join(" and ".join(names) for names in TOKENIZER_FILES)
        raise FileNotFoundError(f"{folder}: holds no tokenizer ({wanted}); `tokenizer=` takes another folder or hub id")
    return folder


def _find(setting: str, name: str, revision: str | None, with_weights: bool) -> Path:
    if not isinstance(name, (str, Path)):
        raise TypeError(f"{setting}={name!r}: must be a folder, a hub id, or the name of a bundled model")
    name = str(name)
    if name in (bundled := [folder.name for folder in BUNDLED.iterdir()]):
        return BUNDLED / name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()  # because the working directory may change
    return download(setting, name, revision, with_weights, bundled)
