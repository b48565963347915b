"""The recording of steps, and the page that shows it: frames against the engine's own state, the file, the stream."""

import json
import random
from contextlib import contextmanager

import pytest

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.serve.frames import View
from nanovllm.serve.trace import MAX_WAITING, StepRecorder, sequence_name

BOTH_WAYS = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
SMALL = dict(dtype="float32", device="cpu", kvcache_block_size=16)


def check_view(view: View, llm: LLM) -> None:
    """What a viewer has added up is the engine's own state."""
    scheduler, manager = llm.scheduler, llm.scheduler.block_manager
    holding = {sequence_name(s): s for s in (*scheduler.prefilling.values(), *scheduler.running.values())}
    assert {name: seq.table for name, seq in view.seqs.items() if seq.status == "running"} == {
        name: seq.block_table for name, seq in holding.items()
    }
    assert view.cached == {block.block_id for block in manager.blocks if not block.ref_count and block.hash is not None}
    waiting = [sequence_name(seq) for seq in scheduler.waiting]
    assert view.waiting == [len(waiting), *waiting[:MAX_WAITING]]
    live = {sequence_name(seq): seq for group in scheduler.live.values() for seq in group.values()}
    assert {*waiting[:MAX_WAITING], *holding} <= view.seqs.keys() <= live.keys()
    for name, shown in view.seqs.items():
        seq = live[name]
        assert (shown.prompt, shown.max_tokens) == (seq.num_prompt_tokens, seq.max_num_tokens)
        if not seq.is_beam:
            assert shown.tokens == len(seq.token_ids)
        was_preempted = seq.status is SequenceStatus.WAITING and seq.was_admitted
        assert (shown.status == "preempted") == was_preempted or len(waiting) > MAX_WAITING
    counts = scheduler.counts
    assert view.counts[:3] == [counts["prompt_tokens"], counts["cached_tokens"], counts["output_tokens"]]
    assert view.counts[3] == scheduler.num_preemptions


class Checker:
    """Reads the frames after each step as a viewer does, through JSON, and compares."""

    def __init__(self, llm: LLM, recorder: StepRecorder):
        self.llm, self.recorder, self.last, self.view = llm, recorder, 0, None
        self.frames = []
        llm.core.on_step.append(lambda step, result: self.check())

    def check(self) -> None:
        text, self.last = self.recorder.json_since(self.last)
        for frame in json.loads(text) if text else ():
            self.frames.append(frame)
            if "key" in frame:
                self.view = View.from_key_frame(frame)
            else:
                self.view.apply(frame)
        check_view(self.view, self.llm)


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    stem = [7 + rng.randrange(3)] * 40
    prompt = stem[: rng.choice([0, 20, 40])] + [rng.randrange(256, 2040) for _ in range(rng.choice([1, 5, 16, 70]))]
    n = rng.choice([1, 1, 1, 3])
    return prompt, SamplingParams(max_tokens=rng.choice([1, 2, 20, 40]), n=n, seed=rng.randrange(99), ignore_eos=True)


@BOTH_WAYS
def test_frames_add_up_to_the_state_of_the_engine(async_scheduling):
    """A random run with prefix hits, preemptions, several answers, chunks, aborts and a cleared cache."""
    rng = random.Random(1)
    limits = dict(num_kvcache_blocks=18, max_num_batched_tokens=48, max_num_mixed_tokens=40, max_num_seqs=8)
    with LLM("tiny-qwen3", async_scheduling=async_scheduling, **limits, **SMALL) as llm:
        recorder = StepRecorder(llm, max_frames=20)
        recorder.start()
        checker = Checker(llm, recorder)
        for _ in range(6):
            ids = [llm.add_request(*random_request(rng)) for _ in range(rng.choice([1, 8, 50]))]
            while not llm.is_finished():
                if rng.random() < 0.1:
                    llm.abort(rng.choice(ids))
                    recorder.refresh()
                    checker.check()
                llm.step()
            llm.abort(llm.add_request([5] * 100))
            recorder.refresh()
            checker.check()
            assert recorder.is_idle
            if rng.random() < 0.5:
                llm.reset_prefix_cache()
        recorder.stop()
        checker.check()
        assert not recorder.is_recording
    assert llm.scheduler.num_preemptions > 5 and llm.stats()["prefix_hit_rate"] > 0.1
    reasons = [reason for frame in checker.frames for _, reason in frame.get("released", ())]
    assert {"length", "abort", "preempted", "hidden"} <= {*reasons}
    assert sum(frame["step"] > 0 and "ms" in frame for frame in checker.frames) == checker.frames[-1]["step"]
