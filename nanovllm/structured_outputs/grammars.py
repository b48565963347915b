"""Compiles grammars with llguidance when requests with `structured_outputs` are created."""

import json
import threading
from collections import OrderedDict
from copy import copy
from typing import TYPE_CHECKING, Any

from nanovllm.engine.sequence import Sequence
from nanovllm.structured_outputs.constraint import Constraint
from nanovllm.structured_outputs.grammar import Grammar
from nanovllm.structured_outputs.json_schema import for_llguidance
from nanovllm.structured_outputs.masks import MaskQueue, MaskThreads
from nanovllm.structured_outputs.sandbox import CompileSandbox

if TYPE_CHECKING:
    from nanovllm.requests.input_processor import InputProcessor

MAX_CACHED_GRAMMARS = 128
# allow at most one space between parts of JSON, because some models would otherwise write white space forever
JSON_OPTIONS: Any = {"whitespace_pattern": " "}


class Grammars:
    """An LRU cache of an engine's compiled grammars. All methods are thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]):
        """tokenizer: a `tokenizers.Tokenizer` that nothing else uses, because this object modifies the tokenizer."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            message = f"structured_outputs: llguidance is not installed ({error}): pip install 'nano-vllm[serve]'"
            raise ValueError(message) from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except ValueError as error:
            raise ValueError(
                f"structured_outputs: llguidance can't use the tokenizer of this model ({error})"
            ) from error
        added, is_special = tokenizer.get_added_tokens_decoder(), self._tokenizer.is_special_token
        special_tokens = {i: added[i].content for i in added if i < vocab_size and is_special(i)}
        self._sandbox = CompileSandbox(vocab_size, special_tokens)
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()  # by text; the most recently used grammar is last
        self._lock = threading.Lock()
        self.threads = MaskThreads()

    def close(self) -> None:
        self._sandbox.close()
        self.threads.close()

    def grammar(self, spec: dict[str, Any]) -> Grammar:
        """Return the compiled grammar for a `structured_outputs` value.

        Raises ValueError if llguidance refuses the value.
        """
        ((kind, content),) = spec.items()
        try:
            text = _grammar_of(kind, content)
            with self._lock:
                if (cached := self._grammars.get(text)) is not None:
                    self._grammars.move_to_end(text)
                    return cached
            if error := self._sandbox.error_of(text):
                raise ValueError(error)
            grammar = Grammar(self._tokenizer, text)
        except ValueError as refusal:
            reason = " ".join(str(refusal).partition("<backtrace>")[0].split())[:400]
            raise ValueError(f"structured_outputs[{kind!r}]={content!r:.80}: {reason}") from None
        with self._lock:
            self._grammars[text] = grammar
            while len(self._grammars) > MAX_CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar


def _grammar_of(kind: str, content: Any) -> str:
    """Convert a `structured_outputs` value to a grammar in llguidance's format."""
    from llguidance import LLMatcher

    if kind == "regex":
        return LLMatcher.grammar_from_regex(content)
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(content)
    if kind == "choice":
        # one terminal for all choices, because llguidance accepts at most 2,000 choices as rules
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, content)))
    schema = '{"type": "object"}' if kind == "json_object" else for_llguidance(content)
    return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)


_lock = threading.Lock()  # held for seconds at the first structured request of an engine


def constrain(group: list[Sequence], processor: "InputProcessor") -> None:
    """Attach a constraint to each sequence of a request.

    Raises ValueError if llguidance is missing or refuses the grammar, or if no first token is allowed. Also raises
    ValueError if there is a reasoning budget, but no reasoning parser.
    """
    params, model = group[0].params, processor.config.model_config
    if params.thinking_token_budget is not None and params.reasoning_parser is None:
        raise ValueError(f"thinking_token_budget={params.thinking_token_budget}: needs a reasoning_parser")
    grammar = queue = None
    if params.structured_outputs is not None:
        with _lock:
            if "grammars" not in processor.helpers:
                with processor.tokenizer_lock:
                    tokenizer = copy(processor.tokenizer.backend_tokenizer)
                processor.helpers["grammars"] = Grammars(tokenizer, model.vocab_size, model.eos_token_ids)
                processor.cleanup.callback(processor.helpers["grammars"].close)
        grammars = processor.helpers["grammars"]
        grammar = grammars.grammar(params.structured_outputs)
        queue = MaskQueue(grammars.threads, grammar)
    constraints = [Constraint(seq, grammar, queue, model.vocab_size, model.eos_token_ids) for seq in group]
    for seq, constraint in zip(group, constraints):
        seq.token_mask = constraint
    first_constraint, *other_constraints = constraints
    if first_constraint.update([], first_constraint.reasoning) is not None:
        raise ValueError(f"{first_constraint.error}, not even a first one")
    for constraint in other_constraints:
        constraint.next_mask = first_constraint.next_mask  # all sequences of the request start in the same state
