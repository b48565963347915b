"""Beam search against transformers' own, on random models in float32."""

from functools import cache
from itertools import count

import pytest
import torch
from common import TINY, with_end_ids

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.features.beam_search import BeamRequest

QUESTIONS = ["What is 17 + 25?", "Sort: 9, 3, 71, 20", "introduce yourself", "Who wrote it?"]
VERSE = "HAMLET.\nTo be, or not to be"


@pytest.fixture(scope="module")
def prompts(chat, tokenizer) -> list[list[int]]:
    return [*map(chat, QUESTIONS), tokenizer.encode(VERSE), tokenizer.encode("KING RICHARD.\nNow is the")]


@pytest.fixture(scope="module")
def random_model(two_layer_model, tmp_path_factory) -> str:
    """Beams end at any length."""
    return with_end_ids(two_layer_model, tmp_path_factory.mktemp("random"), 8)


@pytest.fixture(scope="module")
def reference():
    from transformers import Qwen3ForCausalLM

    load = cache(lambda folder: Qwen3ForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval())

    def search(folder: str, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
        out = load(folder).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            output_scores=True,
            return_dict_in_generate=True,
        )
        found = []
        for ids, beams, score in zip(out.sequences, out.beam_indices, out.sequences_scores):
            found.append((ids[len(prompt) :][: (beams >= 0).sum()].tolist(), score.item()))
        return found

    return search


@pytest.mark.parametrize(
    "model, width, length_penalty",
    [("random", 2, 1.0), ("bundled", 3, 0.0), ("random", 4, 1.2), ("random", 5, 1.0), ("random", 5, -0.5)],
)
def test_sequences_and_scores_are_transformers(
    make_llm, random_model, prompts, reference, model, width, length_penalty
):
    """All prompts at once, with ends at several lengths. Small blocks, so that beams share full ones and copy some.

    The bundled model has fewer end ids than beams, the random one many more.
    """
    folder, params = TINY if model == "bundled" else random_model, BeamSearchParams(width, 16, length_penalty)
    llm = make_llm(folder, kvcache_block_size=16, async_scheduling=width == 4)
    results = llm.beam_search(prompts, params)
    lengths = set()
    for prompt, result in zip(prompts, results):
        expected = reference(folder, prompt, params)
        assert result["prompt_token_ids"] == prompt
        assert [output["token_ids"] for output in result["outputs"]] == [ids for ids, _ in expected]
        assert [output["score"] for output in result["outputs"]] == pytest.approx(
            [s for _, s in expected], rel=1e-5, abs=1e-4
        )
        assert result["outputs"][0]["text"] == llm.tokenizer.decode(expected[0][0], skip_special_tokens=True)
        lengths |= {len(ids) for ids, _ in expected}
    assert len(lengths) > 2 and (max(lengths) == 16 or length_penalty < 0)
    stats = llm.stats()
    assert stats["tokens"]["in"] == sum(map(len, prompts)), "a prompt was computed again"
    assert stats["preemptions"] == stats["blocks"]["used"] == 0


@pytest.fixture(scope="module")
def alone(two_layer_model, prompts) -> tuple[list[list[list[int]]], list[list[int]]]:
    """The beams of each prompt, and the greedy answers to the first two, where there is space for all of them."""
    with LLM(two_layer_model, dtype="float32", device="cpu") as llm:
        beams = [[beam.token_ids for beam in x.outputs] for x in llm.beam_search(prompts, BeamSearchParams(4, 12))]
        greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        return beams, [x.token_ids for x in llm.generate(prompts[:2], greedy, use_tqdm=False)]


@pytest.mark.parametrize(
    "settings, async_scheduling",
    [
        (dict(num_kvcache_blocks=14), False),
        (dict(num_kvcache_blocks=14), True),
        (dict(num_kvcache_blocks=14, enable_prefix_caching=False), True),
        (dict(max_num_seqs=3), False),
        (dict(max_num_batched_tokens=7), True),
    ],
    ids=str,
)
def test_beams_are_the_same_everywhere(make_llm, two_layer_model, prompts, alone, settings, async_scheduling):
    """Where blocks, rows or a step's tokens do not suffice for all beams, and beside other requests."""
    params, (expected, expected_greedy) = BeamSearchParams(4, 12), alone
    llm = make_llm(two_layer_model, kvcache_block_size=16, async_scheduling=async_scheduling, **settings)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ids = [llm.add_request(prompt, greedy) for prompt in prompts[:2]]
    assert [[beam.token_ids for beam in x.outputs] for x in llm.beam_search(prompts, params)] == expected
    answers = {}
    while not llm.is_finished():
        answers |= {answer.request_id: answer.token_ids for answer in llm.step().finished}
    assert [answers[i] for i in ids] == expected_greedy
    stats = llm.stats()
    assert stats["blocks"]["used"] == 0 and stats["requests"] == {"waiting": 0, "running": 0}
    assert len(llm.scheduler.free_req_indices) == llm.config.max_num_seqs


def test_one_beam_is_greedy(make_llm, prompts):
    llm = make_llm(kvcache_block_size=16)
    greedy = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    for answer, result in zip(greedy, llm.beam_search(prompts, BeamSearchParams(1, 12))):
        assert [output["token_ids"] for output in result["outputs"]] == [answer["token_ids"]]


def test_bounds(make_llm, prompts):
    """max_model_len ends a search, and what is wrong is said before anything is queued."""
    llm = make_llm(max_model_len=32)
    (result,) = llm.beam_search([7] * 28, BeamSearchParams(2, 100))
    assert max(len(output["token_ids"]) for output in result["outputs"]) <= 4
    assert llm.beam_search([], BeamSearchParams(2, 4)) == []
    with pytest.raises(ValueError, match="maximum context length is 32 tokens"):
        llm.beam_search([[7] * 32], BeamSearchParams(2, 4))
    assert llm.is_finished()


def test_search_after_an_error(make_llm, monkeypatch):
    """Raised when all beams have paused, and before the search chooses among them: the next search is right."""
    llm = make_llm(kvcache_block_size=16)
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    expected = [beam.token_ids for beam in llm.beam_search(VERSE, params)[0].outputs]
    advance, num_calls = BeamRequest.advance, count(1)

    def interrupted(self, scheduler):
        if next(num_calls) == 3:
            raise SystemExit
        advance(self, scheduler)

    monkeypatch.setattr(BeamRequest, "advance", interrupted)
    with pytest.raises(RuntimeError) as raised:
        llm.beam_search(VERSE, params)
    assert isinstance(raised.value.__cause__, SystemExit)
    assert [beam.token_ids for beam in llm.beam_search(VERSE, params)[0].outputs] == expected
