"""Where a model's files are: a folder, the package itself, or the Hugging Face hub."""
import re
from pathlib import Path

BUNDLED = Path(__file__).parent.parent / "assets"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]


def find_model(model: str) -> Path:
    """The folder of `model`, fetched from the hub (with its progress bar) where it is a hub id.

    Raises FileNotFoundError, with what to do, where there is no such folder and it can't be fetched.
    """
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model={model!r}: must be a folder, a hub id, or the name of a bundled model")
    model = str(model)
    if (BUNDLED / model / "config.json").is_file() and HUB_ID.fullmatch(model):
        return BUNDLED / model
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"model={model!r}: the folder holds no config.json")
        return folder
    if not HUB_ID.fullmatch(model):
        raise FileNotFoundError(f"model={model!r}: no such folder")
    from huggingface_hub import snapshot_download  # only here: a local model needs no hub client

    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except Exception as error:  # the client's errors have no common base: offline, unknown name, no access
        raise FileNotFoundError(
            f"model={model!r}: no such folder, and the hub did not give it ({type(error).__name__}: {error}). "
            f"Without a network pass the folder of a downloaded checkpoint, or use the bundled 'tiny-qwen3'."
        ) from error
