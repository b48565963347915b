"""Fetches models from the Hugging Face hub. This file is imported when one is needed."""

from pathlib import Path

PLAIN_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
DUPLICATES = ["consolidated*"]  # Mistral's own format, beside the files that transformers reads


def download(setting: str, hub_id: str, revision: str | None, with_weights: bool) -> Path:
    """The folder with the files of a hub id, which are fetched if they are not there. FileNotFoundError with advice."""
    from huggingface_hub import snapshot_download

    patterns = PLAIN_FILES + ["*.safetensors"] * with_weights
    try:
        folder = snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=DUPLICATES)
        return Path(folder).absolute()
    except Exception as error:  # offline, unknown name, no access: the client's errors have no common base
        raise FileNotFoundError(
            f"{setting}={hub_id!r}: no such folder, and the hub did not give it ({type(error).__name__}: {error}). "
            f"Without a network pass the folder of a downloaded checkpoint, or use the bundled 'tiny-qwen3'."
        ) from error
