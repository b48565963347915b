"""Reads the settings for embeddings, scores or classes from a checkpoint."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.utils.checks import check_choice, check_int, read_json

if TYPE_CHECKING:
    from nanovllm.models import ModelConfig

CLASSIFIER = "ForSequenceClassification"
# names of sentence-transformers -> which hidden states become the vector
POOLING_MODES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
OLD_MODE_PREFIX = "pooling_mode_"  # `pooling_mode_lasttoken: true` is an older form of `pooling_mode: "lasttoken"`
ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
PROBLEM_ACTIVATIONS = {"regression": "identity", "multi_label_classification": "sigmoid"}
ANSWERS = ("no", "yes")  # Qwen3-Reranker's answers: irrelevant, relevant


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Says how an engine computes a vector from a text, for the tasks "embed", "score" and "classify".

    num_values: the number of values that a step computes for a text (the hidden size, or the number of logits).
    mode: which hidden state becomes the vector: the last token's ("last"), the first token's ("cls"), or the mean of
        all tokens' states ("mean").
    normalize: whether embeddings are divided by their Euclidean norm by default.
    activation: the function that maps logits to scores or probabilities: "sigmoid", "softmax" or "identity".
    labels: the names of the classes, or () for embeddings.
    token_ids: the ids of the tokens whose logits become a score, as (irrelevant, relevant) or (relevant,). The tuple is
        empty if the checkpoint has a classification head, or if the task is "embed".
    prompts: a dict that maps names to prefixes of texts. The dict comes from `config_sentence_transformers.json`.
    default_prompt_name: the name of the prefix that is used if the caller gives no name.
    dimensions: the sizes to which embeddings may be shortened. The value () means any size.
    default_dimensions: the size to which embeddings are shortened by default, or None.
    max_tokens: the maximum number of tokens of a text, or None for no limit. Longer texts are cut.
    """

    num_values: int
    mode: str = "last"
    normalize: bool = True
    activation: str = "identity"
    labels: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    dimensions: tuple[int, ...] = ()
    default_dimensions: int | None = None
    max_tokens: int | None = None


def find_pooling_task(folder: Path) -> str:
    """Return the task of a checkpoint that does not generate text: "embed", "score" or "classify"."""
    raw = read_json(file := folder / "config.json")
    if _is_classifier(raw):
        return "score" if len(_labels(raw, file)) == 1 else "classify"
    return "score" if "LogitScore" in _modules(folder) else "embed"


def read_pooling_config(folder: Path, tokenizer: Path, task: str, model: "ModelConfig") -> PoolingConfig:
    """Read a checkpoint's settings for `task`.

    If a setting is not supported, raises a ValueError that names the file.
    """
    file = folder / "config.json"
    raw = read_json(file)
    # with "vision", text attends to earlier tokens only
    if (raw.get("use_bidirectional_attention") or "vision") != "vision":
        raise ValueError(f"{file}: attention to later tokens is not supported")
    modules = _modules(folder)
    saved = _read_saved(saved_file := folder / "config_sentence_transformers.json")
    if task == "embed":
        fields = _read_embedding(folder, modules, raw) | _prompts(saved, saved_file)
        if (size := saved.get("truncate_dim")) is not None:
            size = check_int(f"{saved_file}: truncate_dim", size, low=1, high=model.hidden_size)
        return PoolingConfig(model.hidden_size, default_dimensions=size, **fields)
    paths = (raw.get("sentence_transformers") or {}).get("activation_fn"), saved.get("activation_fn")
    path = next(filter(None, (*paths, raw.get("sbert_ce_default_activation_function"))), "")
    if name := str(path).rpartition(".")[2]:
        check_choice(f"{file}: activation_fn", name, ACTIVATIONS)
    if _is_classifier(raw):
        labels = _labels(raw, file)
        if task == "score" and len(labels) != 1:
            raise ValueError(f"{file}: has {len(labels)} labels: the task 'score' needs one; set task='classify'")
        default = PROBLEM_ACTIVATIONS.get(str(raw.get("problem_type")), "sigmoid" if len(labels) == 1 else "softmax")
        return PoolingConfig(len(labels), activation=ACTIVATIONS.get(name, default), labels=labels)
    if task == "classify":
        raise ValueError(f"{file}: architectures={raw.get('architectures')}: the task 'classify' needs a {CLASSIFIER}")
    ids = _answer_ids(tokenizer, modules, model.vocab_size)
    activation = ACTIVATIONS.get(name, "sigmoid")
    return PoolingConfig(len(ids), activation=activation, labels=("relevant",), token_ids=ids)


def _read_saved(file: Path) -> dict:
    saved = read_json(file) if file.is_file() else {}
    prompts = saved.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{file}: prompts={prompts!r:.80}: must be an object with texts")
    return saved


def _prompts(saved: dict, file: Path) -> dict[str, Any]:
    names = {"query": "", "document": ""} | (saved.get("prompts") or {})  # as in sentence-transformers
    if (default := saved.get("default_prompt_name")) is not None:
        check_choice(f"{file}: default_prompt_name", default, names)
    return {"prompts": {name: text for name, text in names.items() if text}, "default_prompt_name": default}


def _read_embedding(folder: Path, modules: dict[str, Path], raw: dict) -> dict[str, Any]:
    """Return the fields of a PoolingConfig that the modules of sentence-transformers define."""
    sizes = raw.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"{folder / 'config.json'}: matryoshka_dimensions={sizes!r:.80}: must be a list of numbers")
    fields: dict[str, Any] = {"dimensions": tuple(sizes)}
    if not modules:
        return fields
    for name in modules:
        check_choice(f"{folder / 'modules.json'}: module", name, ("Transformer", "Pooling", "Normalize"))
    if (file := modules.get("Transformer", folder) / "sentence_bert_config.json").is_file():
        settings = read_json(file)
        if settings.get("do_lower_case"):
            raise ValueError(f"{file}: do_lower_case=true: is not supported")
        if (length := settings.get("max_seq_length")) is not None:
            fields["max_tokens"] = check_int(f"{file}: max_seq_length", length, low=1)
    mode = "mean"
    if "Pooling" in modules:
        file = modules["Pooling"] / "config.json"
        pooling = read_json(file)
        old = [name for name, value in pooling.items() if name.startswith(OLD_MODE_PREFIX) and value is True]
        modes = pooling.get("pooling_mode") or [name.removeprefix(OLD_MODE_PREFIX) for name in old] or "mean"
        modes = [modes] if isinstance(modes, str) else modes
        if not isinstance(modes, list) or not all(isinstance(name, str) for name in modes):
            raise ValueError(f"{file}: pooling_mode={modes!r:.80}: must be a string or a list of strings")
        mode = "+".join(name.removesuffix("_tokens").removesuffix("_token") for name in modes)
        check_choice(f"{file}: pooling_mode", mode, POOLING_MODES)
        if mode != "lasttoken" and pooling.get("include_prompt") is False:
            raise ValueError(f"{file}: include_prompt=false: must be true with pooling_mode {mode!r}")
    return fields | {"mode": POOLING_MODES[mode], "normalize": "Normalize" in modules}


def _answer_ids(tokenizer: Path, modules: dict[str, Path], vocab_size: int) -> tuple[int, ...]:
    """Return the ids of two tokens that mean "irrelevant" and "relevant", or only the id of the second token."""
    if "LogitScore" in modules:
        entries = read_json(file := modules["LogitScore"] / "config.json")
        found = [entries.get("false_token_id"), entries.get("true_token_id")]
        ids = [token_id for token_id in found if token_id is not None]
    else:
        file = tokenizer / ("tokenizer.json" if (tokenizer / "tokenizer.json").is_file() else "vocab.json")
        vocab = read_json(file)
        vocab = vocab["model"]["vocab"] if "model" in vocab else vocab
        if missing := [answer for answer in ANSWERS if answer not in vocab]:
            raise ValueError(f"{file}: has no token {missing[0]!r}, which the task 'score' needs in a language model")
        ids = [vocab[answer] for answer in ANSWERS]
    if not ids or not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
        raise ValueError(f"{file}: token ids {ids} of answers: must be in 0 to {vocab_size - 1}")
    return tuple(ids)


def _is_classifier(raw: dict) -> bool:
    return str((raw.get("architectures") or [""])[0]).endswith(CLASSIFIER)


def _labels(raw: dict, file: Path) -> tuple[str, ...]:
    """Return the names of the classes. As in transformers, the default is two classes."""
    names = raw.get("id2label") or {i: f"LABEL_{i}" for i in range(raw.get("num_labels") or 2)}
    try:
        return tuple(str(names[key]) for key in sorted(names, key=int))  # the file sorts its keys as texts
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: id2label={names!r:.80}: must be an object with a name for each number") from error


def _modules(folder: Path) -> dict[str, Path]:
    """Return a dict that maps the class of each module in `modules.json` to the module's folder."""
    file = folder / "modules.json"
    try:
        modules = json.loads(file.read_bytes()) if file.is_file() else []
        return {module["type"].rpartition(".")[2]: folder / module.get("path", "") for module in modules}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file}: must be a list of objects with a 'type' ({error!r})") from error
