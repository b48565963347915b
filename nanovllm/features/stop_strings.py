"""Implements stop strings, which may begin and end in the middle of a token."""

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from nanovllm.engine.features import Ends, StepFeature
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.requests.detokenizer import Detokenizer, TokenBytes
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.requests.input_processor import InputProcessor
    from nanovllm.requests.request import CompletionRequest


class StopStrings(StepFeature):
    @classmethod
    def attach(cls, request: "CompletionRequest", processor: "InputProcessor") -> None:
        for seq in request.group:
            detokenizer = StoppingDetokenizer(seq.token_ids, seq.num_prompt_tokens, request.token_bytes, seq.params)
            seq.feature_state["stop_strings"] = request.detokenizers[seq.index] = detokenizer
            seq.is_watched = True

    @classmethod
    def after_step(cls, step: ScheduledStep, arrived: Mapping[int, Sequence], ends: Ends, result: Any) -> None:
        for seq in arrived.values():
            if (detokenizer := seq.feature_state.get("stop_strings")) is None:
                continue
            ended_by_id = seq in ends and ends[seq][0] == "stop"  # the text might not include this id
            if ended_by_id and not seq.params.include_stop_str_in_output:
                continue
            reasoning = seq.feature_state.get("reasoning")
            if reasoning is not None and seq.num_completion_tokens <= reasoning.num_tokens:
                detokenizer.skip_token()
            elif (stop := detokenizer.cut_at_stop()) is not None:
                ends[seq] = "stop", stop


class StoppingDetokenizer(Detokenizer):
    """Decodes the text of an answer, and cuts it at a stop string."""

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, token_bytes: TokenBytes, params: SamplingParams):
        super().__init__(token_ids, num_prompt_tokens, token_bytes)
        self._stops, self._include_stop = params.stop or (), params.include_stop_str_in_output
        self._min_num_tokens = num_prompt_tokens + params.min_tokens
        self._window = ""  # the last characters of the text; a stop string may begin in them
        self._max_overlap = max(map(len, self._stops)) - 1

    def skip_token(self) -> None:
        """Decode the last token without looking for stop strings."""
        self.decode()
        self._window = ""

    def cut_at_stop(self) -> str | None:
        """Decode the last token.

        If the last token completes a stop string, cut the text at the stop string, and return the stop string. Stop
        strings within the first `min_tokens` tokens are ignored. If several stop strings match, the match that ends
        first is used. If two matches end at the same character, the stop string that was listed first is used.
        """
        piece, matches = self.decode(), []
        text = self._window + piece
        for stop in self._stops if len(self._token_ids) > self._min_num_tokens else ():
            if (begin := text.find(stop, max(0, len(self._window) + 1 - len(stop)))) >= 0:
                matches.append((begin + len(stop), begin, stop))
        self._window = text[len(text) - min(self._max_overlap, len(text)) :]
        if not matches:
            return None
        end, begin, stop = min(matches, key=itemgetter(0))
        num_cut = len(text) - (end if self._include_stop else begin)
        self._pieces = [self.text[: len(self.text) - num_cut]]
        self._pending = self._pending[: len(self._pending) - num_cut]
        self._decoder.reset()
        self._is_split = False
        return stop

    def take_text(self, num_hidden: int = 0, is_last: bool = False) -> str:
        """Return the text since the previous call. Hold back a suffix that might be the beginning of a stop string."""
        text = super().take_text(num_hidden, is_last)
        if is_last or self._include_stop:
            return text
        num_held_back = self._partial_stop(text)
        self._pending = text[len(text) - num_held_back :]
        return text[: len(text) - num_held_back]

    def _partial_stop(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while begin >= 0 and not stop.startswith(text[begin:]):
                begin = text.find(stop[0], begin + 1)
            if begin >= 0:
                longest = max(longest, len(text) - begin)
        return longest
