"""The part of a batch that says how new requests are sampled; see RequestTable, which keeps it on the device."""

from typing import Any, NamedTuple

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.sampling_columns import COLUMNS
from nanovllm.layers.logits import column, seeds
from nanovllm.sampling_params import MAX_BAD_WORDS, MAX_BIASES, SamplingParams


class NewRequest(NamedTuple):
    """The input of `sampling_columns.Column.value`."""

    params: SamplingParams
    num_prompt_tokens: int
    num_bad_words: int
    num_stops: int  # token ids that would end the request before it has min_tokens


def fill_new_requests(batch: Any, seqs: list[Sequence], stop_ids: list[list[int]]) -> None:
    """Fill a host Batch's arrays of parameters, biases and bad words.

    stop_ids: of each sequence, the token ids that must not end it before it has min_tokens.
    """
    new = [NewRequest(s.params, s.num_prompt_tokens, len(s.bad_words), len(ids)) for s, ids in zip(seqs, stop_ids)]
    batch.params[:] = 0
    for name, _, value in COLUMNS:
        column(batch.params, name)[:] = [value(request) for request in new]
    seeds(batch.params)[:] = np.array([seq.noise_seed for seq in seqs], np.uint64).view(np.int32).reshape(-1, 2)

    biases = []  # of each request its own, and then -inf for its stop ids
    for seq, stops in zip(seqs, stop_ids):
        entries = [*(seq.params.logit_bias or {}).items(), *((token_id, -np.inf) for token_id in stops)]
        biases += [(seq.req_index * MAX_BIASES + i, *entry) for i, entry in enumerate(entries)]
    if biases:
        batch.bias_slots[:], batch.bias_ids[:], batch.bias_bits.view(np.float32)[:] = zip(*biases)

    bad_words = [(seq.req_index * MAX_BAD_WORDS + i, word) for seq in seqs for i, word in enumerate(seq.bad_words)]
    batch.bad_words[:] = -1
    for i, (slot, word) in enumerate(bad_words):
        batch.bad_word_slots[i] = slot
        batch.bad_words[i, -len(word) :] = word
