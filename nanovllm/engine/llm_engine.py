"""Requests in, text out: the facade over scheduler and model runner."""
import secrets
import struct
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral

import xxhash

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import Vocabulary
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.outputs import ProgressBar, StepOutput, answer_of, event_of
from nanovllm.engine.prompts import Prompt, as_list, as_prompts
from nanovllm.engine.sampled import SampledTokens
from nanovllm.engine.scheduler import ScheduledStep, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.worker import Workers
from nanovllm.sampling_params import SamplingParams, bad_word_token_ids, check_request
from nanovllm.utils.checks import check_int
from nanovllm.utils.stopwatch import Stopwatch


class LLMEngine:
    """Generates for many requests at once.

    `generate` does it all and `stream` shows it as it comes; `add_request`, `step`, `abort` and `is_finished` are the
    loop for those who want to hold it. With `async_scheduling` a step's tokens reach the host one turn late, while the
    next step runs. An engine is a context manager, and `exit` frees its memory. `startup_seconds` says where the time
    of its start went.
    """

    def __init__(self, model: str, **settings):
        """`settings` are the fields of `nanovllm.config.Config`, which states their defaults and errors.

        With several ranks, RuntimeError where one does not come to its start.
        """
        startup = Stopwatch()
        self.config = Config.create(model, settings)
        startup.lap("settings")
        self.model_runner: ModelRunner | None = None
        self.workers = Workers(self.config)
        weakref.finalize(self, self.workers.exit)
        with ThreadPoolExecutor(1) as pool:  # transformers takes seconds to import, and others work meanwhile
            tokenizer = pool.submit(_load_tokenizer, self.config.model)
            try:
                tp = self.workers.connect()
                startup.lap("ranks")
                self.model_runner = ModelRunner(self.config, startup, tp)
                self.workers.wait_until_started()
                self.tokenizer = tokenizer.result()
                self._vocabularies = [Vocabulary(self.tokenizer, skip) for skip in (False, True)]
            except BaseException as error:
                self._close_after(error)
                raise
        startup.lap("tokenizer")  # what was still to wait for
        self.startup_seconds = startup.seconds
        block_manager = BlockManager(
            self.model_runner.num_kvcache_blocks, self.config.kvcache_block_size, self.config.enable_prefix_caching
        )
        bounds = self.config.max_num_seqs, self.config.max_num_batched_tokens
        self.scheduler = Scheduler(block_manager, *bounds, self.config.model_config.eos_token_ids)
        self._num_requests = 0
        self._in_flight: tuple[ScheduledStep, SampledTokens] | None = None
        self._aborted: list[Sequence] = []  # of which the next step tells

    def generate(
        self, prompts: Prompt | list[Prompt], sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[dict]:  # fmt: skip
        """Answers to one prompt or many, in their order.

        A prompt is a string or a list of token ids; `sampling_params` one for all, or one for each. An answer has
        `request_id`, `prompt_token_ids` and `num_cached_tokens` of them, `text`, `token_ids` (the end-of-sequence id
        included), `finish_reason` ("stop", "length" or "abort"), `stop_reason` (the string or id of `stop` or
        `stop_token_ids`), `timing` (seconds from arrival to the end of "queue", "first_token" and "finish"), and where
        asked for `logprobs` (for each token a dict from ids to log-probabilities) and `prompt_logprobs` (None for the
        first). With n > 1, what differs is in a list `outputs` of n dicts.

        Nothing is queued unless every prompt is good: ValueError or TypeError else, as of `add_request`. Ctrl-C and
        errors drop this call's requests and leave the engine ready for the next.
        """
        groups = self._make_groups(prompts, sampling_params)
        answers: dict[int, dict] = {}
        try:
            for group in groups:
                self.scheduler.add(*group)
            with ProgressBar(len(groups), disable=not use_tqdm) as bar:
                while len(answers) < len(groups):
                    output = self.step()
                    bar.show(output)
                    answers |= {answer["request_id"]: answer for answer in output.finished}
        except BaseException:
            self._drop_everything()
            raise
        return [answers[group[0].request_id] for group in groups]

    def stream(
        self, prompts: Prompt | list[Prompt], sampling_params: SamplingParams | list[SamplingParams] | None = None
    ) -> Iterator[dict]:
        """The answers of `generate` piece by piece, as they come from many requests at once.

        An event has `index` (of the prompt), `output_index` (with n > 1), `request_id`, `text` and `token_ids` (what is
        new; text that may yet be cut off as a stop string is held back), `finish_reason` and `stop_reason` (None until
        the last), and `logprobs` where asked for. Requests of `add_request` in the middle of it come with the index None.
        Errors are those of `generate`; leaving the loop aborts what is left.
        """
        return self._stream(self._make_groups(prompts, sampling_params))

    def _stream(self, groups: list[list[Sequence]]) -> Iterator[dict]:
        self._check_idle()  # again: other requests may have come since the stream was made
        index_of = {group[0].request_id: i for i, group in enumerate(groups)}
        try:
            for group in groups:
                self.scheduler.add(*group)
            while not self.is_finished():
                for seq, token_ids in self.step().arrived:
                    yield {"index": index_of.get(seq.request_id), **event_of(seq, token_ids)}
        finally:
            for request_id in index_of:
                self.scheduler.abort(request_id)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a request, and return its id.

        Raises before anything is queued: ValueError for an empty prompt, one that is not shorter than
        `max_model_len`, or a token id outside the vocabulary; TypeError for something else than text or ids.
        """
        self._check_open()
        group = self._make_group(prompt, sampling_params)
        self.scheduler.add(*group)
        return group[0].request_id

    def abort(self, request_id: int) -> None:
        """End a request, whose blocks are free for the next step; that step brings what there is of its answer.

        One that has ended already stays as it is. ValueError for an id that `add_request` never returned.
        """
        check_int("request_id", request_id, low=0, high=self._num_requests - 1)
        self._aborted += self.scheduler.abort(request_id)

    def step(self) -> StepOutput:
        """One turn of the loop: queue the next step, and take in what has been computed.

        If it raises, every request is dropped; the engine can go on with new ones. With several ranks it can go on after
        Ctrl-C alone: any other error closes it, and that of another rank, or its end, is a RuntimeError that says which.
        """
        self._check_open()
        try:
            scheduled = self.scheduler.schedule()
            launched = (scheduled, self.workers.launch(self.model_runner, scheduled)) if scheduled else None
            if self.config.async_scheduling:
                launched, self._in_flight = self._in_flight, launched
            return self._take_in(launched)
        except BaseException as error:
            if self.workers.processes and isinstance(error, Exception):
                self._close_after(error)
            else:
                self._drop_everything()
            raise

    def is_finished(self) -> bool:
        """Whether nothing is left to do, or to tell."""
        return self.scheduler.is_finished() and not self._aborted

    def stats(self) -> dict:
        """What goes on, and what went on since the start.

        `requests` waiting and running, with n > 1 each answer for itself; `blocks` used, cached (free, and to be found as
        a prefix) and free; `prefix_hit_rate`, of the prompts' tokens; `preemptions`; `tokens` in and out; `steps` by kind.
        """
        return self.scheduler.stats()

    def _take_in(self, launched: tuple[ScheduledStep, SampledTokens] | None) -> StepOutput:
        ended, self._aborted = self._aborted, []
        output = StepOutput([], [(seq, []) for seq in ended])
        if launched:
            step, sampled = launched[0], launched[1].wait()
            live = [(seq, [i]) for seq, i in zip(step.sampled, sampled.token_ids) if seq.finish_reason is None]
            ended += self.scheduler.postprocess(step, *sampled)
            num_tokens = (step.num_tokens, 0) if step.is_prefill else (0, len(live))
            output = StepOutput([], output.arrived + live, *num_tokens)
        groups = {seq.request_id: seq.group for seq in ended}.values()
        output.finished.extend(answer_of(group) for group in groups if all(seq.finish_reason for seq in group))
        return output

    def _make_groups(self, prompts, sampling_params) -> list[list[Sequence]]:
        """The sequences of many requests, once all is checked that can be wrong with them."""
        self._check_idle()
        prompts = as_prompts(prompts)
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: give one, or as many")
        return [self._make_group(*request) for request in zip(prompts, sampling_params)]

    def _make_group(self, prompt: Prompt, params: SamplingParams | None) -> list[Sequence]:
        """The sequences of a request, which has its number with that; checks all that can be wrong with it."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r}: must be a SamplingParams")
        token_ids = self._token_ids(prompt)
        if not token_ids:
            raise ValueError("prompt: is empty; it must hold at least 1 token")
        bound = self.config.max_model_len
        if len(token_ids) >= bound:
            raise ValueError(f"prompt: has {len(token_ids)} tokens; it must be shorter than max_model_len={bound}")
        vocab_size, eos_token_ids = self.config.model_config.vocab_size, self.config.model_config.eos_token_ids
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"prompt: token id {token_id} is outside of the vocabulary (0 to {vocab_size - 1})")
        bad_words = bad_word_token_ids(self.tokenizer, params.bad_words, vocab_size)
        check_request(params, vocab_size, eos_token_ids, 100, bad_words)
        request_id, vocabulary = self._num_requests, self._vocabularies[params.skip_special_tokens]
        self._num_requests += 1
        seed = self._noise_seed(params, request_id)
        seeds = [seed, *(xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, i)) for i in range(1, params.n))]
        group = [Sequence(request_id, [*token_ids], params, s, bound, vocabulary, i) for i, s in enumerate(seeds)]
        for seq in group:
            seq.group, seq.bad_words = group, bad_words
        return group

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids = as_list(prompt)
        kinds = None if ids is None else set(map(type, ids))
        if kinds is None or any(kind is bool or not issubclass(kind, Integral) for kind in kinds):
            raise TypeError(f"prompt={prompt!r:.80}: must be a string or a list of token ids")
        return ids if kinds == {int} else [int(i) for i in ids]

    def _noise_seed(self, params: SamplingParams, request_id: int) -> int:
        if params.seed is not None:
            return params.seed
        if self.config.seed is not None:
            return xxhash.xxh3_64_intdigest(struct.pack("<QQ", self.config.seed, request_id))
        return secrets.randbits(64)

    def _drop_everything(self) -> None:
        if self.model_runner is not None:
            self.model_runner.recover()  # what was queued still reads the host's buffers
            self._in_flight = None
            self._aborted = []
            self.scheduler.abort_all()

    def _close_after(self, error: BaseException) -> None:
        """Close the engine; raises the cause of `error` where that is another."""
        cause, has_runner = self.workers.give_up(error), self.model_runner is not None
        self._close()
        if not has_runner:  # it would have done this
            self.workers.tp.close()
        if cause is not error:
            raise cause from error

    def _close(self) -> None:
        self.workers.exit()
        if self.model_runner is not None:
            self.model_runner.exit()
            self.model_runner = None

    def exit(self) -> None:
        """Drop what is unfinished and free the device's memory; an engine that was left can't be used again."""
        self._drop_everything()
        self._close()

    def _check_idle(self) -> None:
        self._check_open()
        if not self.is_finished():
            raise RuntimeError("requests from add_request or stream are unfinished; call step() until is_finished()")

    def _check_open(self) -> None:
        if self.model_runner is None:
            raise RuntimeError("this engine was closed by exit()")

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.exit()


def _load_tokenizer(model: str):
    from transformers import AutoTokenizer  # here, so that the package imports without it

    return AutoTokenizer.from_pretrained(model)
