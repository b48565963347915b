"""Reads the harmony format of gpt-oss, in which an answer is a sequence of messages.

The format is described at cookbook.openai.com/articles/openai-harmony. A message consists of `<|start|>`, a header,
`<|message|>`, a body, and one of `<|end|>`, `<|return|>` and `<|call|>`. The prompt ends with `<|start|>assistant`, so
an answer begins within a header. The header contains the name of a channel and, in a call, a recipient:

    <|channel|>analysis<|message|>Paris is meant.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The channel `analysis` is reasoning, `final` is the answer, and `commentary` is a call or the text before calls. Models
sometimes call functions in `analysis`, or omit the token that ends a message. If the end token is missing, `<|start|>`
ends the message.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.reasoning.formats import ReasoningFormat
from nanovllm.reasoning.stage import Reasoning, Stage, find_token_id

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = "<|end|>", "<|return|>", "<|call|>"
CONTROLS = START, "<|channel|>", "<|constrain|>", MESSAGE, *ENDS
MAX_HEADER = 64  # tokens; what follows them can't change the channel
CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")


def is_analysis(header: str) -> bool:
    """Return whether the message with this header is reasoning.

    A function call in the channel `analysis` is not reasoning.
    """
    channel = CHANNEL.search(header)
    return channel is not None and channel[1] == "analysis" and "to=functions." not in header


class HarmonyMarkers:
    """Holds the control tokens of a vocabulary. Other tokens that spell the text of a control token have no effect."""

    begin_id = None
    texts = CONTROLS

    def __init__(self, form: ReasoningFormat, tokenizer: Any, token_bytes: Mapping[int, bytes]):
        """`token_bytes` must include the special tokens."""
        self.token_bytes = token_bytes
        self.end_ids: list[int] = tokenizer.encode(form.end, add_special_tokens=False)
        self.controls = {find_token_id(tokenizer, text): text for text in CONTROLS}
        if None in self.controls:
            raise ValueError("reasoning_parser='openai_gptoss': the vocabulary lacks harmony's control tokens")

    def start(self, prompt_token_ids: list[int]) -> "HarmonyReasoning":
        """Return the state at the beginning of an answer. The last message of the prompt may be incomplete."""
        begin = len(prompt_token_ids)
        while begin and self.controls.get(prompt_token_ids[begin - 1]) != START:
            begin -= 1
        reasoning = HarmonyReasoning(self)
        reasoning.take(prompt_token_ids[begin:] if begin else [])
        reasoning.num_tokens = reasoning.num_thoughts = 0
        return reasoning


class HarmonyReasoning(Reasoning):
    """Tracks the reasoning of an answer. The reasoning ends with the header of the first message that is not analysis.

    header: the token ids of the current message's header. After the reasoning, `header` no longer changes.
    is_body: whether the header of the current message is complete.
    """

    def __init__(self, markers: HarmonyMarkers):
        super().__init__(markers, Stage.INSIDE)  # type: ignore[arg-type]
        self.header: tuple[int, ...] = ()
        self.is_body = False

    @property
    def header_text(self) -> str:
        return b"".join([self.markers.token_bytes[i] for i in self.header]).decode(errors="replace")

    def take(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if self.stage is Stage.ENDED:
                return
            control = self.markers.controls.get(token_id)
            self.num_tokens += 1
            if self.is_body:
                self.num_thoughts += 1
                if control in ENDS:
                    self.header, self.is_body = (), False
                elif control == START:  # the model forgot the end
                    self.header, self.is_body = (token_id,), False
            elif control == MESSAGE:
                self.is_body = True
                if not is_analysis(self.header_text):
                    self.stage = Stage.ENDED
            elif len(self.header) < MAX_HEADER:
                self.header += (token_id,)

    def forced_id(self, budget: int) -> int | None:
        """See `Reasoning.forced_id`.

        Return None if the model itself, and not this method, has begun the current header.
        """
        end_ids, num_over = self.markers.end_ids, self.num_thoughts - budget
        if self.is_body:
            return end_ids[0] if num_over >= 0 else None
        is_forced = num_over > 0 and len(self.header) + 1 < len(end_ids)
        return end_ids[len(self.header) + 1] if is_forced else None
