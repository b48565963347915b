"""Reads the sampling parameters that a model recommends, which are used for requests without parameters."""

from pathlib import Path

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import read_json

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def recommended_params(folder: str, kind: type[SamplingParams]) -> SamplingParams:
    """Read `folder/generation_config.json`. Parameters that the file lacks have the defaults of `kind`."""
    file = Path(folder) / "generation_config.json"
    raw = read_json(file) if file.exists() else {}
    given = {name.replace("new_", ""): raw[name] for name in NAMES if raw.get(name) is not None}
    if raw.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return kind(**given)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{file}: {error}") from error
