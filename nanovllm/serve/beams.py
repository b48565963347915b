"""Serves API requests with beam search. The beams become the answers to the prompt, best first."""

from dataclasses import replace
from time import time

from nanovllm.engine.outputs import CompletionOutput, OutputKind, RequestOutput
from nanovllm.features.beam_params import BeamSearchParams
from nanovllm.features.beam_search import BeamRequest, beam_requests
from nanovllm.requests.input_processor import InputProcessor
from nanovllm.requests.request import TokensPrompt


class BeamCompletion(BeamRequest):
    """A beam search.

    The output of a beam search has `n` answers, but the server's limits count the search as one answer.
    """

    @property
    def params(self) -> BeamSearchParams:
        return self._params

    def output(self) -> RequestOutput:  # type: ignore[override]
        search = super().output()
        answers = []
        for i, beam in enumerate(search.outputs):
            reason = "stop" if beam.token_ids[-1] in self._eos_token_ids else "length"
            answers.append(CompletionOutput(i, beam.text, beam.token_ids, beam.cumulative_logprob, None, reason, None))
        metrics, num_cached_tokens = replace(self.metrics(), finished_time=time()), self._root.num_cached_tokens
        prompt, ids = search.prompt, search.prompt_token_ids
        return RequestOutput(search.request_id, prompt, ids, answers, search.finished, num_cached_tokens, None, metrics)


def beam_completion(
    processor: InputProcessor, prompt: TokensPrompt, params: BeamSearchParams, priority: int, kind: OutputKind
) -> BeamRequest:
    return beam_requests(processor, prompt, params, [priority], kind, BeamCompletion)[0]
