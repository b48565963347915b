"""Downloads models from the Hugging Face hub, and describes broken files."""

import re
from difflib import get_close_matches
from pathlib import Path

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
PLAIN_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
# the same weights in formats of Mistral and OpenAI, which transformers does not read
DUPLICATES = ["consolidated*", "original/*"]
ADVICE = {  # by the name of the hub client's error
    "RepositoryNotFoundError": "the hub has no such model, or it is private: check the name, or run `hf auth login`",
    "GatedRepoError": "the model is gated: accept its conditions on its page on the hub, then run `hf auth login`",
    "RevisionNotFoundError": "the model on the hub has no such revision",
    "": "the hub can't be reached: without a network, pass the folder of a downloaded checkpoint, or use the bundled "
    "'tiny-qwen3'",
}
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def download(setting: str, hub_id: str, revision: str | None, with_weights: bool, bundled: list[str]) -> Path:
    """Return the folder that contains the files of a hub id. Download them if needed.

    If the download fails, raises a FileNotFoundError with advice. If the id is similar to a name in `bundled`, the id
    is treated as a typo, and nothing is downloaded.
    """
    if not HUB_ID.fullmatch(hub_id):
        raise FileNotFoundError(f"{setting}={hub_id!r}: no such folder")
    if meant := get_close_matches(hub_id, bundled, n=1):
        raise FileNotFoundError(f"{setting}={hub_id!r}: no such folder; did you mean {meant[0]!r}?")
    from huggingface_hub import snapshot_download

    patterns = PLAIN_FILES + ["*.safetensors"] * with_weights
    try:
        folder = snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=DUPLICATES)
        return Path(folder).absolute()
    except Exception as error:  # offline, unknown name, no access: the client's errors have no common base
        advice = ADVICE.get(type(error).__name__, ADVICE[""])
        raise FileNotFoundError(
            f"{setting}={hub_id!r}: no such folder, and {advice}\n({type(error).__name__}: {error})"
        ) from error


def broken_file(file: Path, problem: str) -> ValueError:
    """Return the error for a file with the given problem. If the file is a git-lfs pointer, the error says so."""
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            problem = "is a git-lfs pointer, not the file itself; `git lfs pull` fetches it"
    return ValueError(f"{file}: {problem}")
