"""Defines the setting `speculative_config`, and checks it before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanovllm.utils.checks import check_choice, check_fields, check_int, check_real, checked, parse_json, read_json

if TYPE_CHECKING:
    from nanovllm.config import Config

METHODS = ("ngram", "suffix", "draft_model", "eagle3", "mtp")
WITH_MODEL = ("draft_model", "eagle3")


def check_rates(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise TypeError(f"{name}={value!r}: must be a list of numbers")
    rates = tuple(check_real(f"{name}: a rate", rate, 0.0, 1.0) for rate in value)
    if list(rates) != sorted(rates, reverse=True):
        raise ValueError(f"{name}={value!r}: must not rise")
    return rates


class StepCost(NamedTuple):
    """The times of steps with different numbers of rows, in an arbitrary unit. Other times are interpolated."""

    rows: tuple[int, ...]
    times: tuple[float, ...]  # of steps with these numbers of rows; on a CPU, rows of drafts count, too
    drafting: tuple[float, ...] = ()  # on CUDA: of steps with all drafts, for these numbers of sequences

    def of(self, num_seqs: int, num_drafts: int = 0) -> float:
        if num_drafts and self.drafting:  # CUDA graphs have rows for all drafts
            return float(np.interp(num_seqs, self.rows, self.drafting))
        return float(np.interp(num_seqs * (1 + num_drafts), self.rows, self.times))


# measured with the bundled model. The unit is the time of one more row. A step with a single row uses simpler GEMMs
ON_CPU = StepCost((1, 2, 2**20), (24, 34, 2**20))


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The settings for drafting tokens. The settings have the same names as in vLLM.

    method: "ngram", "suffix", "eagle3", "mtp" or "draft_model". The default is "draft_model" if there is a `model`.
    num_speculative_tokens: the maximum number of drafts per sequence and step. `num_speculative_tokens` must be given
        for all methods except "suffix". The default for "suffix" is `suffix_decoding_max_tree_depth`, or
        `kvcache_block_size - 1` if that is smaller.
    prompt_lookup_min, prompt_lookup_max: for "ngram", the lengths in tokens of the shortest and the longest n-gram to
        look up. Longer n-grams are tried first.
    suffix_decoding_max_tree_depth: for "suffix", the length in tokens of the longest context to look up.
    suffix_decoding_max_cached_requests: for "suffix", how many earlier requests are remembered. If 0, the drafts of a
        request come only from the request itself.
    suffix_decoding_max_spec_factor: for "suffix", the maximum number of drafts per token of the matched context.
    suffix_decoding_min_token_prob: for "suffix", drafting stops before the joint probability of the drafts falls below
        this value. The probability is estimated from counts of occurrences.
    model: for "draft_model" and "eagle3", the draft model or the head, given in the same way as the engine's `model`.
    revision: the revision of `model`.
    draft_tensor_parallel_size: must be 1, because each rank has the whole draft model.
    disable_by_batch_size: no tokens are drafted while more than this many sequences are running. `None` selects a
        default that depends on the method and the device.
    rejection_sample_method: "strict" or "synthetic". "synthetic" is for measurements: drafts are accepted at given
        rates, so the generated text is meaningless.
    synthetic_acceptance_rates: for "synthetic", entry i is the probability that the first i drafts are all accepted.
    """

    method: str | None = None
    num_speculative_tokens: int | None = checked(None, check_int, low=1)
    prompt_lookup_min: int | None = checked(None, check_int, low=1, high=64)
    prompt_lookup_max: int | None = checked(None, check_int, low=1, high=64)
    suffix_decoding_max_tree_depth: int = checked(24, check_int, low=1, high=1024)
    suffix_decoding_max_cached_requests: int = checked(10000, check_int, low=0)
    suffix_decoding_max_spec_factor: float = checked(1.0, check_real, low=0.0)
    suffix_decoding_min_token_prob: float = checked(0.1, check_real, low=0.0, high=1.0)
    model: str | None = None
    revision: str | None = None
    draft_tensor_parallel_size: int | None = checked(None, check_int, low=1, high=1)
    disable_by_batch_size: int | None = checked(None, check_int, low=1)
    rejection_sample_method: str = checked("strict", check_choice, choices=("strict", "synthetic"))
    synthetic_acceptance_rates: tuple[float, ...] | None = checked(None, check_rates)
    draft_model_config: Any = None  # a ModelConfig, of "draft_model" and "mtp"; an Eagle3Config, of "eagle3"
    drafts_with_masks: bool = False  # whether sequences with token masks have drafts
    step_cost: StepCost = ON_CPU  # on CUDA, it is measured when the engine starts

    @property
    def is_synthetic(self) -> bool:
        return self.rejection_sample_method == "synthetic"


# by the beginning of a setting's name: the methods that have this setting
OWNERS = {
    "prompt_lookup_": ("ngram",),
    "suffix_decoding_": ("suffix",),
    "model": WITH_MODEL,
    "revision": WITH_MODEL,
    "draft_tensor_parallel_size": WITH_MODEL,
}
KEYS = [field.name for field in fields(SpeculativeConfig)][:-3]  # the last three are computed


def given_values(given: Any) -> dict[str, Any]:
    """Return the items of `given` whose values are not None. `given` is a dict or the JSON text of a dict."""
    given = parse_json("speculative_config", given)
    if not isinstance(given, Mapping):
        raise TypeError(f"speculative_config={given!r:.80}: must be a dict, or JSON of one")
    return {name: value for name, value in given.items() if value is not None}


def read_speculative_config(config: "Config") -> SpeculativeConfig:
    """Check and resolve `config.speculative_config`, which is a dict or its JSON text.

    Errors state the key, the value and what is allowed.
    """
    given = config.speculative_config
    if isinstance(given, SpeculativeConfig):
        return given
    values = given_values(given)
    for name in values:
        if name not in KEYS:
            raise TypeError(f"speculative_config: unknown key {name!r}: must be one of {', '.join(KEYS)}")
    method = values.setdefault("method", "draft_model" if "model" in values else None)
    if method not in METHODS:
        raise ValueError(f"speculative_config: method={method!r}: must be one of {_names(METHODS)}")
    for prefix, owners in OWNERS.items():
        for name in values:
            if method not in owners and name.startswith(prefix):
                raise ValueError(f"speculative_config: {name}={values[name]!r}: is only for method {_names(owners)}")
    settings = SpeculativeConfig(**values)
    try:
        check_fields(settings)
        _resolve(settings, config)
    except (TypeError, ValueError, FileNotFoundError) as error:
        raise type(error)(f"speculative_config: {error}") from error
    return settings


def _resolve(settings: SpeculativeConfig, config: "Config") -> None:
    set_ = lambda name, value: object.__setattr__(settings, name, value)
    if settings.method == "ngram":
        given_min, given_max = settings.prompt_lookup_min, settings.prompt_lookup_max
        set_("prompt_lookup_min", given_min or min(2, given_max or 2))
        set_("prompt_lookup_max", given_max or max(5, given_min or 5))
        check_int("prompt_lookup_min", settings.prompt_lookup_min, 1, settings.prompt_lookup_max)
    if settings.num_speculative_tokens is None:
        if settings.method != "suffix":
            raise ValueError(f"num_speculative_tokens=None: must be given for method {settings.method!r}")
        set_("num_speculative_tokens", min(settings.suffix_decoding_max_tree_depth, config.kvcache_block_size - 1))
    block_size = config.kvcache_block_size
    bound = f"num_speculative_tokens, less than kvcache_block_size={block_size},"
    k = check_int(bound, settings.num_speculative_tokens, 1, block_size - 1)
    on_host, on_cpu = settings.method in ("ngram", "suffix"), config.device == "cpu"
    set_("drafts_with_masks", on_host)
    set_("disable_by_batch_size", settings.disable_by_batch_size or (16 if on_host or on_cpu else 64))
    rates = settings.synthetic_acceptance_rates
    if settings.is_synthetic != (rates is not None):
        bound = "must be given with rejection_sample_method='synthetic', and only then"
        raise ValueError(f"synthetic_acceptance_rates={rates!r}: {bound}")
    if rates is not None and len(rates) != k:
        raise ValueError(f"synthetic_acceptance_rates={rates!r}: must have num_speculative_tokens={k} rates")
    if settings.method in WITH_MODEL and settings.model is None:
        raise ValueError(f"model=None: must be given for method {settings.method!r}")
    if not on_host:
        _resolve_model(settings, config, set_)


def _resolve_model(settings: SpeculativeConfig, config: "Config", set_: Any) -> None:
    from nanovllm.attention import check_head_dim
    from nanovllm.spec_decode.head_checkpoint import check_mtp, read_eagle3_config
    from nanovllm.utils.model_files import find_model

    draft_config, with_weights = config.model_config, config.load_format != "dummy"
    folder = find_model(settings.model or config.model, settings.revision, with_weights)
    if settings.method == "mtp":
        check_mtp(folder, draft_config, with_weights)
        used = replace(
            draft_config.hybrid, unused_parts=tuple(x for x in draft_config.hybrid.unused_parts if x != "MTP")
        )
        config.resolve(model_config=replace(draft_config, hybrid=used))
        draft_config = replace(draft_config, quantization=None)  # the head is dequantized while it is loaded
    elif settings.method == "eagle3":
        draft_config = read_eagle3_config(folder, draft_config, config.dtype, with_weights)
    else:
        draft_config = _read_draft_model_config(settings, config, folder)
    check_head_dim(getattr(draft_config, "layer", draft_config).head_dim, config.device, config.attention_backend)
    set_("model", str(folder))
    set_("draft_model_config", draft_config)


def _read_draft_model_config(settings: SpeculativeConfig, config: "Config", folder: Path) -> Any:
    from nanovllm.models import ModelConfig

    draft, target = ModelConfig.read(folder), config.model_config
    if draft.vocab_size != target.vocab_size:
        bound = f"must have {target.vocab_size:,}, as {config.model}"
        raise ValueError(f"model={settings.model!r}: has a vocabulary of {draft.vocab_size:,} ids; {bound}")
    files = folder / "tokenizer.json", Path(config.tokenizer) / "tokenizer.json"
    if all(file.is_file() for file in files) and _vocabulary(files[0]) != _vocabulary(files[1]):
        raise ValueError(f"model={settings.model!r}: its tokenizer has another vocabulary than {files[1]}")
    if draft.max_position_embeddings < config.max_model_len:
        bound = f"must have at least max_model_len={config.max_model_len:,}"
        raise ValueError(f"model={settings.model!r}: has {draft.max_position_embeddings:,} positions; {bound}")
    return replace(draft, dtype=config.dtype)


def _vocabulary(file: Path) -> Any:
    model = read_json(file).get("model")
    return model.get("vocab") if isinstance(model, dict) else None


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))
