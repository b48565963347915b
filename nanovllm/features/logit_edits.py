"""Edits logits in the same way as vLLM: `logit_bias`, penalties, bad words, allowed token ids and `min_tokens`.

On the device, each request has a row of numeric parameters (see kernels/sampling/sampling_columns.py). The tables
`EditTables` store the parameters that are lists. `penalize` applies all edits. `penalize` is one kernel on CUDA, and
plain PyTorch on other devices.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.engine.features import Arrays, StepFeature
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels import operation
from nanovllm.kernels.sampling.sampling_columns import EDITS
from nanovllm.layers.sampler import SamplingRows
from nanovllm.sampling_params import SamplingParams, check_token_ids
from nanovllm.utils.checks import check_int

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.requests.input_processor import InputProcessor
    from nanovllm.requests.request import CompletionRequest

MAX_BIASES = 512  # per request: token ids of logit_bias, and stop ids that min_tokens bans
MAX_BAD_WORDS = 128  # token sequences per request; a word has two, with and without a leading space
MAX_BAD_WORD_TOKENS = 16
MAX_PENALTY_PROGRAMS = 128  # programs of the penalty kernel; each counts every token id in its own scratch memory


@dataclass(frozen=True, slots=True)
class Edits:
    biases: tuple[tuple[int, float], ...]  # token ids and biases; -inf for stop ids, which come last
    bad_words: tuple[tuple[int, ...], ...]  # token ids
    allowed_mask: np.ndarray | None  # of token ids, as `mask_of` returns it


class TokenMask:
    """Says which token ids may come next in a sequence.

    A feature with `masks_tokens` assigns a TokenMask to `seq.token_mask`.

    Each mask is an array like those that `mask_of` returns. The masks of a TokenMask replace the mask of
    `allowed_token_ids`, so they must allow only ids that `allowed_mask` allows.
    """

    def __init__(self, seq: Sequence, vocab_size: int):
        """Raises ValueError if another feature masks the tokens of `seq`, or if the feature lacks `masks_tokens`."""
        if seq.token_mask is not None:
            names = " and ".join(type(mask).__name__ for mask in (seq.token_mask, self))
            raise ValueError(f"{names}: only one of them can mask the tokens of a request")
        if (edits := seq.feature_state.get("logit_edits")) is None:
            raise ValueError(f"{type(self).__name__}: the feature that makes it must set masks_tokens = True")
        self.allowed_mask = all_ids(vocab_size) if edits.allowed_mask is None else edits.allowed_mask
        self.next_mask = self.allowed_mask  # a new mask is a new array: the device gets it because it is another object
        self.sent_mask: np.ndarray | None = None  # the mask that the device has
        self.draft_masks: list[np.ndarray] = []  # the mask after each draft of the next step
        seq.columns["has_allowed_ids"], seq.is_watched = 1, True

    def draft(self, drafts: list[int], num_drafts: int) -> list[int]:
        """Return up to `num_drafts` draft tokens, and set `draft_masks`.

        Each returned draft must be allowed after the drafts before it. `drafts` contains proposed tokens, and -1 where
        no token is proposed. This base class returns no drafts.
        """
        return []


class LogitEdits(StepFeature):
    """Edits logits, and applies token masks. Filters such as top-p are in layers/sampler.py."""

    @classmethod
    def attach(cls, request: "CompletionRequest", processor: "InputProcessor") -> None:
        params, model = request.params, processor.config.model_config
        with processor.tokenizer_lock:
            bad_words = bad_word_token_ids(processor.tokenizer, params.bad_words or (), model.vocab_size)
        check_edits(params, model.vocab_size, model.eos_token_ids, bad_words)
        biases, stops = params.logit_bias or {}, sorted(early_stops(params, model.eos_token_ids))
        allowed = params.allowed_token_ids
        mask = None if allowed is None else mask_of(allowed, model.vocab_size)
        edits = Edits((*biases.items(), *((token_id, -np.inf) for token_id in stops)), bad_words, mask)
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        num_prompt_tokens = request.group[0].num_prompt_tokens
        columns = dict(
            zip(("presence_penalty", "frequency_penalty", "repetition_penalty"), penalties),
            num_prompt_tokens=num_prompt_tokens,
            min_len=num_prompt_tokens + params.min_tokens,
            has_allowed_ids=mask is not None,
            is_penalized=penalties != (0, 0, 1),
            num_biases=len(biases),
            num_stops=len(stops),
            num_bad_words=len(bad_words),
        )
        for seq in request.group:
            seq.feature_state["logit_edits"] = edits
            seq.columns |= columns

    @classmethod
    def prepare(cls, step: ScheduledStep) -> Arrays | None:
        """Return the table rows of new requests, and new token masks."""
        new = [(seq.req_index, edits) for seq in step.new_seqs if (edits := seq.feature_state.get("logit_edits"))]
        biases = [(i * MAX_BIASES + j, *bias) for i, edits in new for j, bias in enumerate(edits.biases)]
        bad_words = [(i * MAX_BAD_WORDS + j, word) for i, edits in new for j, word in enumerate(edits.bad_words)]
        masks = {i: edits.allowed_mask for i, edits in new if edits.allowed_mask is not None}
        for seq in map(step.sampled_seqs.__getitem__, step.watched):
            mask = seq.token_mask
            if mask is not None and (mask.next_mask is not mask.sent_mask or seq in step.new_seqs):
                masks[seq.req_index] = mask.sent_mask = mask.next_mask  # it already includes allowed_token_ids
        arrays: dict[str, Any] = {}
        if biases:
            entries, ids, values = zip(*biases)
            bits = np.array(values, np.float32).view(np.int32)
            arrays |= dict(bias_entries=np.array(entries), bias_ids=np.array(ids), bias_bits=bits)
        if bad_words:
            padded = np.full((len(bad_words), MAX_BAD_WORD_TOKENS), -1)
            for row, (_, word) in zip(padded, bad_words):
                row[-len(word) :] = word
            arrays |= dict(bad_word_entries=np.array([entry for entry, _ in bad_words]), bad_words=padded)
        if masks:
            arrays |= dict(mask_indices=np.array([*masks]), masks=[*masks.values()])
        return arrays if new or arrays else None

    @classmethod
    def max_words(cls, config: "Config") -> int:
        per_request = 3 * MAX_BIASES + MAX_BAD_WORDS * (1 + MAX_BAD_WORD_TOKENS) + 1
        return config.max_num_seqs * (per_request + mask_width(config.model_config.vocab_size)) + 7 * 4

    def __init__(self, runner: "ModelRunner"):
        config, drafting = runner.config, runner.config.speculative_config
        num_masks = config.tokens_per_row if drafting and drafting.drafts_with_masks else 1
        self.tables = EditTables.zeros(config.max_num_seqs, config.model_config.vocab_size, num_masks, runner.device)

    def upload(self, arrays: Arrays) -> None:
        self.tables.write(arrays)

    def edit_logits(self, logits: torch.Tensor, rows: SamplingRows) -> None:
        penalize(logits, rows, self.tables)


class EditTables(NamedTuple):
    """Stores the list parameters of all requests, such as bad words.

    The first index of each table is the request index. The last request index is reserved for padding rows of CUDA
    graphs.
    """

    bias_ids: torch.Tensor  # [requests, MAX_BIASES] int32: `num_biases` ids of logit_bias, then `num_stops` stop ids
    biases: torch.Tensor  # [requests, MAX_BIASES] float32, -inf for stop ids
    allowed_masks: torch.Tensor  # [requests, masks, ceil(vocabulary / 32)] int32: a bit per id; needs has_allowed_ids
    bad_words: torch.Tensor  # [requests, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS] int32, left-padded with -1
    token_counts: torch.Tensor  # [MAX_PENALTY_PROGRAMS, vocabulary] int32, scratch: zeros before and after `penalize`

    @classmethod
    def zeros(cls, num_requests: int, vocab_size: int, num_masks: int, device: torch.device) -> "EditTables":
        """Allocate the tables.

        Each request has `num_masks` masks, because each draft of a step may need a separate mask.
        """
        make = lambda *shape, dtype=torch.int32: torch.zeros(shape, dtype=dtype, device=device)
        n = num_requests + 1
        return cls(
            bias_ids=make(n, MAX_BIASES),
            biases=make(n, MAX_BIASES, dtype=torch.float32),
            allowed_masks=make(n, num_masks, mask_width(vocab_size)),
            bad_words=make(n, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
            token_counts=make(min(num_requests, MAX_PENALTY_PROGRAMS), vocab_size),
        )

    def write(self, arrays: Arrays) -> None:
        """Write rows into the tables.

        `bias_entries` and `bad_word_entries` contain indices into a table whose first two dimensions are flattened.
        `mask_indices` contains request indices. A new mask replaces all masks of its request. `bias_bits` contains
        float32 biases as int32.
        """
        if "bias_entries" in arrays:
            self.bias_ids.view(-1)[arrays["bias_entries"]] = arrays["bias_ids"]
            self.biases.view(-1)[arrays["bias_entries"]] = arrays["bias_bits"].view(torch.float32)
        if "bad_word_entries" in arrays:
            self.bad_words.flatten(0, 1)[arrays["bad_word_entries"]] = arrays["bad_words"]
        if "masks" in arrays:
            self.allowed_masks[arrays["mask_indices"]] = arrays["masks"][:, None]


def mask_width(vocab_size: int) -> int:
    """Return the number of int32 words that hold one bit for each token id."""
    return -(-vocab_size // 32)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return an int32 mask [mask_width] in which the bits of `token_ids` are set."""
    bits = np.zeros(32 * mask_width(vocab_size), np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


@cache
def all_ids(vocab_size: int) -> np.ndarray:
    """Return the mask that allows every token id. It cannot be edited."""
    mask = mask_of(range(vocab_size), vocab_size)
    mask.flags.writeable = False
    return mask


@operation
def penalize(logits: torch.Tensor, rows: SamplingRows, tables: EditTables) -> None:
    """Add biases, apply penalties and ban tokens. Edits logits [S, vocabulary] in place.

    As in vLLM and transformers, the repetition penalty applies to every token id in the prompt or the output. A
    positive logit is divided by the penalty, and any other logit is multiplied by the penalty. As in vLLM, frequency
    and presence penalties apply only to output tokens. The logits of ids that are not allowed become -inf. The logit of
    a bad word's last token becomes -inf if the output ends with the word's earlier tokens.
    """
    edits = rows.params[:, EDITS]
    for row in edits.any(1).nonzero().flatten().tolist() if edits.any() else ():
        _penalize_row(logits[row], rows, tables, row)
    if (has_mask := rows.column("has_allowed_ids")).any():
        masked = has_mask.nonzero().flatten()
        num_masks = tables.allowed_masks.shape[1]
        # [S, masks]: the request indices of the preceding rows, and last that of the row itself
        last = F.pad(rows.req_indices, (num_masks - 1, 0), value=-1).unfold(0, num_masks, 1)
        places = (last == rows.req_indices[:, None]).sum(1) - 1  # the position of each row among its request's rows
        masks = tables.allowed_masks[rows.req_indices[masked], places[masked]].view(torch.uint8).unsqueeze(-1)
        is_allowed = (masks & (1 << torch.arange(8, device=masks.device)).to(torch.uint8)).flatten(1).bool()
        logits[masked] = logits[masked].where(is_allowed[:, : logits.shape[1]], -torch.inf)


def _penalize_row(logits: torch.Tensor, rows: SamplingRows, tables: EditTables, row: int) -> None:
    """Apply all edits of `penalize` to one row of logits [vocabulary], except for the mask of allowed ids."""
    param = lambda name: rows.column(name)[row].item()
    req_index, num_tokens = rows.req_indices[row], int(rows.positions[row]) + 1
    token_ids = rows.token_ids[rows.block_tables[row]].flatten()[:num_tokens]
    output_ids = token_ids[param("num_prompt_tokens") :]

    # in the table, stop ids with biases of -inf follow the ids of logit_bias
    num_biases = param("num_biases") + (param("num_stops") if num_tokens < param("min_len") else 0)
    logits[:] = logits.float().index_add(
        0, tables.bias_ids[req_index, :num_biases], tables.biases[req_index, :num_biases]
    )

    if param("is_penalized"):
        x, repetition = logits.float(), param("repetition_penalty")
        is_seen = token_ids.bincount(minlength=len(x)) > 0
        counts = output_ids.bincount(minlength=len(x)).float()
        x = x.where(~is_seen, torch.where(x > 0, x / repetition, x * repetition))
        logits[:] = x - param("frequency_penalty") * counts - param("presence_penalty") * (counts > 0).float()

    if num_bad_words := param("num_bad_words"):
        words = tables.bad_words[req_index, :num_bad_words]
        starts, last_ids = words[:, :-1], words[:, -1]
        recent = output_ids[-starts.shape[1] :]
        recent = F.pad(recent, (starts.shape[1] - len(recent), 0), value=-2)  # -2 is no token id
        is_next = ((starts == -1) | (starts == recent)).all(1)  # the output ends with all but the last id of the word
        logits[last_ids[is_next].long()] = -torch.inf


def early_stops(params: SamplingParams, eos_token_ids: frozenset[int]) -> set[int]:
    """Return the stop ids to ban until `min_tokens` tokens have been generated, or none if `min_tokens` is 0."""
    if not params.min_tokens:
        return set()
    return {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}


def check_edits(
    params: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int], bad_words: tuple[tuple[int, ...], ...] = ()
) -> None:
    """Raise ValueError if the parameters do not fit the model. `bad_words` comes from `bad_word_token_ids`."""
    for name in ("logit_bias", "allowed_token_ids"):
        check_token_ids(name, getattr(params, name), vocab_size)
    early_stop_ids = early_stops(params, eos_token_ids)
    num_biases = "logit_bias, stop_token_ids and the model's eos ids with min_tokens: their number"
    check_int(num_biases, len(params.logit_bias or ()) + len(early_stop_ids), 0, MAX_BIASES)
    banned = early_stop_ids | {word[0] for word in bad_words if len(word) == 1}
    if (ids := params.allowed_token_ids) and banned.issuperset(ids):
        raise ValueError(f"allowed_token_ids={ids!r:.80}: bad_words and min_tokens must leave at least 1 of them")


def bad_word_token_ids(tokenizer, words: Iterable[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Tokenize each word with and without a leading space, and return the distinct token sequences.

    Raises ValueError if there are more than `MAX_BAD_WORDS` sequences, or if a token id is outside the vocabulary.
    Raises ValueError if a sequence is empty or has more than `MAX_BAD_WORD_TOKENS` tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}  # an ordered set
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            check_int(f"bad_words: the number of tokens of {text!r:.80}", len(ids), 1, MAX_BAD_WORD_TOKENS)
            if max(ids) >= vocab_size:
                raise ValueError(f"bad_words: token id {max(ids)} of {text!r:.80} is out of vocabulary")
            sequences[ids] = None
    check_int("bad_words: the number of words, with and without a space before them,", len(sequences), 0, MAX_BAD_WORDS)
    return tuple(sequences)
