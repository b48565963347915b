"""A tour of the engine, to be read from top to bottom: how a prompt becomes tokens, and which classes do it.

`LLM.generate` leaves all this to the engine's own thread. Here no thread runs: each step is made by hand, in its parts.
"""

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.build import build_engine
from nanovllm.engine.engine import Engine
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.utils.context import get_context, reset_context

SETTINGS = dict(device="cpu", dtype="float32", kvcache_block_size=16)
GREEDY = SamplingParams(temperature=0, max_tokens=12)  # always the likeliest token, so that the answers are known


def make_engine(**settings) -> Engine:
    """A scheduler with its block manager, a model runner with the model, and an output processor."""
    return build_engine(Config.create("tiny-qwen3", SETTINGS | settings))


def make_step(engine: Engine) -> ScheduledStep:
    """What `Engine.step` does: decide, compute and sample, append."""
    step = engine.scheduler.schedule()
    result = engine.model_runner.run(step).wait()
    engine.scheduler.postprocess(step, result)
    return step


def test_prompt_becomes_an_answer(chat, tokenizer):
    engine = make_engine(num_kvcache_blocks=8)
    scheduler, runner, block_manager = engine.scheduler, engine.model_runner, engine.scheduler.block_manager

    # A prompt becomes a Sequence, which has its token ids. It waits, and holds no cache blocks yet.
    seq = Sequence(chat("What is 17 + 25?"), GREEDY, max_len=64)
    scheduler.add(seq)
    assert len(seq) == 18 and seq.status is SequenceStatus.WAITING and seq.block_table == []

    # Prefill: the first step computes all 18 tokens of the prompt. Their keys and values need two blocks of 16.
    step = scheduler.schedule()
    assert step.kind == "prefill" and step.rows == [(seq, 0, 18)]
    assert seq.status is SequenceStatus.RUNNING and seq.block_table == [0, 1]
    assert [*block_manager.free_block_ids] == [2, 3, 4, 5, 6, 7]

    # The model knows no sequences, so the decision becomes arrays: what to compute, and in which slots to store it.
    input_ids, positions = runner.prepare_prefill(step.rows)
    assert input_ids.tolist() == seq.token_ids and get_context().cu_seqlens_q.tolist() == [0, 18]
    assert positions.tolist() == get_context().slot_mapping.tolist() == [*range(18)]  # block 0 has the slots 0 to 15
    reset_context()

    # The model runs, and the sampler takes a token from the logits of the last position: what follows the prompt.
    result = runner.run(step).wait()
    assert tokenizer.decode(result.token_ids) == "4"
    engine.scheduler.postprocess(step, result)
    assert seq.token_ids[18:] == result.token_ids

    # Decode: from now on a step computes one token, the last one, as the cache has the keys and values of the others.
    step = make_step(engine)
    assert step.kind == "decode" and step.rows == [(seq, 18, 19)]
    assert tokenizer.decode(seq.completion_token_ids) == "42"

    # The third token is the model's end-of-sequence id. So the sequence ends, and its blocks are free for others.
    make_step(engine)
    assert seq.last_token == tokenizer.eos_token_id and seq.is_finished and seq.finish_reason == "stop"
    assert seq.block_table == [] and len(block_manager.free_block_ids) == 8
    assert scheduler.schedule() is None  # nothing is left to compute

    # LLM adds what surrounds the steps: tokens from text, text from tokens, and a thread that makes steps to the end.
    with LLM("tiny-qwen3", **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": "What is 17 + 25?"}], GREEDY, use_tqdm=False)
    assert output.text == "42" and output.token_ids == seq.completion_token_ids


def test_same_beginning_is_computed_once(tokenizer):
    engine = make_engine(num_kvcache_blocks=8)
    scheduler, block_manager = engine.scheduler, engine.scheduler.block_manager
    speech = "HAMLET.\nTo be, or not to be: that is the question"
    endings = [".\nOPHELIA.\n", ".\nHORATIO.\n", "!\n"]
    prompts = [tokenizer.encode(speech + ending) for ending in endings]
    first, second, third = (Sequence(prompt, GREEDY, max_len=64) for prompt in prompts)

    # A full block is found by a hash of its tokens and of those before it. Both sequences refer to the block of their
    # first 16 tokens, which is computed for one of them. What follows differs, and lies in blocks of their own.
    scheduler.add(first)
    scheduler.add(second)
    assert make_step(engine).rows == [(first, 0, first.num_prompt_tokens), (second, 16, second.num_prompt_tokens)]
    assert first.block_table == [0, 1] and second.block_table == [0, 2] and block_manager.blocks[0].ref_count == 2
    assert block_manager.hash_to_block_id == {block_manager.compute_hash(first.token_ids[:16], block_manager.salt): 0}

    # A free block keeps its contents until it is allocated again, so a later prompt still finds it.
    while not scheduler.is_finished():
        make_step(engine)
    assert block_manager.blocks[0].ref_count == 0 and len(block_manager.free_block_ids) == 8
    scheduler.add(third)
    assert make_step(engine).rows == [(third, 16, third.num_prompt_tokens)] and third.num_cached_tokens == 16


def test_last_sequence_gives_way_when_blocks_run_out():
    # Two sequences of 15 + 12 tokens need two blocks each, and there are three. Without the prefix cache, what a
    # sequence had computed is lost with its blocks.
    prompts = [[5] * 15, [6] * 15]
    engine = make_engine(num_kvcache_blocks=3, enable_prefix_caching=False)
    scheduler = engine.scheduler
    first, second = (Sequence([*prompt], GREEDY, max_len=64) for prompt in prompts)
    scheduler.add(first)
    scheduler.add(second)
    make_step(engine)
    make_step(engine)
    assert (first.block_table, second.block_table) == ([0], [1])  # both are full now

    # Each needs another block. The one that came last is preempted: it waits, and the other one gets its block.
    assert make_step(engine).rows == [(first, 16, 17)] and first.block_table == [0, 1]
    assert second.status is SequenceStatus.WAITING and second.block_table == [] and scheduler.num_preemptions == 1
    while not first.is_finished:
        make_step(engine)

    # It is computed again from the tokens that it has, and its answer is the one that it gives when nobody disturbs it.
    assert make_step(engine).rows == [(second, 0, 17)]  # the prompt and two tokens
    while not scheduler.is_finished():
        make_step(engine)
    with LLM("tiny-qwen3", **SETTINGS) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [first.completion_token_ids, second.completion_token_ids] == [output.token_ids for output in outputs]
