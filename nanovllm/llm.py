"""The name that people import: the engine, and what can be said in its terms."""
import json
from functools import partial
from pathlib import Path

from nanovllm.engine.beam_search import beam_search
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.prompts import Prompt
from nanovllm.sampling_params import BeamSearchParams, SamplingParams, check_beams


class LLM(LLMEngine):
    """An engine for offline generation: `LLM(model, **settings).generate(prompts, sampling_params)`."""

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's `generation_config.json` recommends; ours where it says nothing."""
        file = Path(self.config.model) / "generation_config.json"
        raw = json.loads(file.read_text()) if file.exists() else {}
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
        given = {name.replace("new_", ""): raw[name] for name in names if raw.get(name) is not None}
        return SamplingParams(**given | ({"temperature": 0.0} if raw.get("do_sample") is False else {}))

    def chat(
        self, messages: list[dict] | list[list[dict]], sampling_params=None, use_tqdm: bool = True, **template_arguments
    ) -> list[dict]:
        """The answers of `generate` to one conversation or several, each a list of messages (`role`, `content`).

        `template_arguments` go to the tokenizer's chat template: `enable_thinking=False`, say, or `tools=[...]`. A
        conversation that the template can't render is a ValueError.
        """
        is_one = isinstance(messages, (list, tuple)) and all(isinstance(message, dict) for message in messages)
        conversations = [messages] if is_one and messages else messages
        arguments = {"add_generation_prompt": True} | template_arguments | {"tokenize": True, "return_dict": False}
        try:
            prompts = [self.tokenizer.apply_chat_template(list(c), **arguments) for c in conversations]
        except Exception as error:  # whatever a template may raise
            raise ValueError(f"messages={messages!r:.80}: the chat template refuses them ({error})") from error
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(self, prompts: Prompt | list[Prompt], params: BeamSearchParams) -> list[dict]:
        """The likeliest answers to each prompt that a search of `beam_width` finds, the best first.

        For each prompt a dict of `prompt_token_ids` and `outputs`, which have `text`, `token_ids` and `score`: the sum of
        log-probabilities over length to the power `length_penalty`. Errors are those of `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params={params!r}: must be a BeamSearchParams")
        ids = [group[0].token_ids for group in self._make_groups(prompts, None)]
        generate = partial(self.generate, use_tqdm=False)
        eos_token_ids = self.config.model_config.eos_token_ids
        check_beams(params, self.config.model_config.vocab_size)
        found = beam_search(generate, ids, params, self.config.max_model_len, eos_token_ids)
        text_of = partial(self.tokenizer.decode, skip_special_tokens=True)
        outputs = [[{"text": text_of(b.token_ids), "token_ids": [*b.token_ids], "score": b.score} for b in x] for x in found]
        return [{"prompt_token_ids": prompt, "outputs": beams} for prompt, beams in zip(ids, outputs)]
