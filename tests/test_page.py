"""The recording of steps, and the page that shows it: frames against the engine's own state, the file, the stream."""

import asyncio
import json
import os
import random
import re
import shutil
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from browser import CHROMIUM, open_browser
from common import TINY, step_error
from simulation import SimulatedEngine

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.serve.frames import View
from nanovllm.serve.metrics import COUNTERS
from nanovllm.serve.page import content_security_policy, render_page
from nanovllm.serve.trace import MAX_WAITING, StepRecorder, sequence_name, trace

BOTH_WAYS = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
SMALL = dict(dtype="float32", device="cpu", kvcache_block_size=16)


def check_view(view: View, llm: LLM) -> None:
    """What a viewer has added up is the engine's own state."""
    scheduler, manager = llm.scheduler, llm.scheduler.block_manager
    holding = {sequence_name(s): s for s in (*scheduler.prefilling.values(), *scheduler.running.values())}
    assert {name: seq.table for name, seq in view.seqs.items() if seq.status == "running"} == {
        name: seq.block_table for name, seq in holding.items()
    }
    assert view.cached == {block.block_id for block in manager.blocks if not block.ref_count and block.hash != -1}
    waiting = [sequence_name(seq) for seq in scheduler.waiting]
    assert view.waiting == [len(waiting), *waiting[:MAX_WAITING]]
    live = {sequence_name(seq): seq for group in scheduler.live.values() for seq in group.values()}
    assert {*waiting[:MAX_WAITING], *holding} <= view.seqs.keys() <= live.keys()
    for name, shown in view.seqs.items():
        seq = live[name]
        assert (shown.prompt, shown.max_tokens) == (seq.num_prompt_tokens, seq.max_num_tokens)
        if not seq.pauses_after_token:
            assert shown.tokens == len(seq.token_ids)
        was_preempted = seq.status is SequenceStatus.WAITING and seq.was_admitted
        assert (shown.status == "preempted") == was_preempted or len(waiting) > MAX_WAITING
    counts = scheduler.totals
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
    return prompt, SamplingParams(max_tokens=rng.choice([1, 2, 20, 30]), n=n, seed=rng.randrange(99), ignore_eos=True)


@BOTH_WAYS
def test_frames_add_up_to_the_state_of_the_engine(small_model, async_scheduling):
    """A random run with prefix hits, preemptions, several answers, chunks, aborts and a cleared cache."""
    rng = random.Random(1)
    limits = dict(num_kvcache_blocks=13, max_num_batched_tokens=48, max_num_mixed_tokens=40, max_num_seqs=8)
    with LLM(small_model, async_scheduling=async_scheduling, **limits, **SMALL) as llm:
        recorder = StepRecorder(llm, max_frames=20)
        recorder.start()
        checker = Checker(llm, recorder)
        for num_requests in (40, 1, 6, 12):
            ids = [llm.add_request(*random_request(rng)) for _ in range(num_requests)]
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
            if num_requests == 1:
                llm.reset_prefix_cache()
        recorder.stop()
        checker.check()
        assert not recorder.is_recording
    assert llm.scheduler.num_preemptions >= 3 and llm.stats()["prefix_hit_rate"] > 0.1
    reasons = [reason for frame in checker.frames for _, reason in frame.get("released", ())]
    assert {"length", "abort", "preempted", "hidden"} <= {*reasons}
    assert sum(frame["step"] > 0 and "ms" in frame for frame in checker.frames) == checker.frames[-1]["step"]


def test_beams_of_a_search_are_shown():
    with LLM("tiny-qwen3", num_kvcache_blocks=12, **SMALL) as llm:
        recorder = StepRecorder(llm)
        recorder.start()
        checker = Checker(llm, recorder)
        llm.add_request([7] * 30, SamplingParams(max_tokens=30, ignore_eos=True))
        llm.beam_search([[5] * 40, [6] * 30], BeamSearchParams(beam_width=3, max_tokens=12))
        recorder.stop()
        checker.check()
    names = {name for frame in checker.frames for name in frame.get("admitted", ())}
    assert "0" in names and len({name for name in names if name.startswith("1.")}) >= 3


class Clockwork(SimulatedEngine):
    """With as much of an LLM around it as a recorder looks at."""

    def __init__(self, num_seqs: int, num_blocks: int):
        sizes = dict(max_num_seqs=512, max_num_batched_tokens=16384)
        super().__init__("fcfs", num_blocks, block_size=16, max_num_mixed_tokens=2048, max_len=2000, **sizes)
        self.engine_thread = SimpleNamespace(call=lambda work: work())
        self.core = SimpleNamespace(scheduler=self.scheduler, on_step=[])
        self.config = SimpleNamespace(
            model="clockwork",
            device="none",
            kvcache_block_size=16,
            kv_cache_dtype="auto",
            swap_space=0,
            swap_dir=None,
            num_block_tables=1,
            cache_window=0,
            model_config=SimpleNamespace(vision=None),
            **sizes,
        )
        for i in range(num_seqs):
            self.add([i] * 60, max_tokens=50, ignore_eos=True)

    def step(self) -> None:
        step = super().step()
        for hook in self.core.on_step:
            hook(step, None)


def test_a_step_that_changes_little_makes_a_small_frame():
    engine = Clockwork(num_seqs=256, num_blocks=20_000)
    recorder = StepRecorder(engine)
    recorder.start()
    for _ in range(20):
        engine.step()
    frames, _ = recorder.frames_since(0)
    assert len(frames[2]["decodes"]) == 256 and "decodes" not in frames[3]
    sizes = [len(json.dumps(frame)) for frame in frames[4:] if "tables" not in frame]
    assert len(sizes) >= 10 and max(sizes) < 150


def test_readers_have_their_own_pace():
    """A reader that falls behind begins again with a key frame, and what is kept has a bound."""
    engine = Clockwork(num_seqs=5, num_blocks=100)
    recorder = StepRecorder(engine, max_frames=10)
    recorder.start()
    (first,), last = recorder.frames_since(0)
    assert first["key"]["num_blocks"] == 100 and recorder.frames_since(last) == ([], last)
    for _ in range(8):
        engine.step()
    frames, fast = recorder.frames_since(last)
    assert [frame["step"] for frame in frames] == [*range(1, 9)]
    text, _ = recorder.json_since(last)
    assert json.loads(text) == frames and recorder.json_since(last)[0] is text  # encoded once
    for _ in range(8):
        engine.step()
    frames, now = recorder.frames_since(last)
    assert "key" in frames[0] and [frame["step"] for frame in frames] == [*range(6, 17)]
    assert [frame["step"] for frame in recorder.frames_since(fast)[0]] == [*range(9, 17)]
    view = View.from_key_frame(frames[0])
    for frame in frames[1:]:
        view.apply(frame)
    check_view(view, engine)
    assert recorder.json_since(now) == ("", now)
    recorder.stop()
    recorder.start()
    assert "key" in recorder.frames_since(now)[0][0]  # another recording


def test_beams_that_an_error_drops_are_no_longer_shown():
    engine = Clockwork(num_seqs=0, num_blocks=20)
    scheduler = engine.scheduler
    recorder = StepRecorder(engine)
    recorder.start()
    beam = engine.add([5] * 20, max_tokens=5)
    beam.pauses_after_token, beam.token_limit = True, 0
    engine.step()
    scheduler.preempt(beam)
    recorder.refresh()
    frames, last = recorder.frames_since(0)
    assert frames[-1]["released"] == [["0.0", "preempted"]]
    scheduler.reset()
    recorder.refresh()
    assert recorder.frames_since(last)[0][-1]["released"] == [["0.0", "hidden"]]


def test_hook_errors():
    """A hook's error is one of the step; a recorder's own ends the recording, and no request."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with LLM("tiny-qwen3", num_kvcache_blocks=12, **SMALL) as llm:

        def fail(step, result):
            raise ZeroDivisionError("in a hook")

        llm.core.on_step.append(fail)
        with step_error(ZeroDivisionError):
            llm.generate([5, 6], params, use_tqdm=False)
        llm.core.on_step.remove(fail)
        recorder = StepRecorder(llm)
        recorder.start()
        recorder._update_tables = fail
        assert len(llm.generate([5, 6], params, use_tqdm=False)[0].token_ids) == 3
        assert not recorder.is_recording and not llm.core.on_step


# -- the file ----------------------------------------------------------------------------------------------------------


def recorded_frames(page: str) -> list[dict]:
    (text,) = re.findall(r'<script id="recording" type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_trace_writes_one_file(tmp_path):
    folder = tmp_path / "<!--<script>"  # where a model may be, and which must not end up as markup
    shutil.copytree(TINY, folder)
    path = tmp_path / "run.html"
    with LLM(str(folder), num_kvcache_blocks=12, **SMALL) as llm:
        with trace(llm, path):
            llm.generate([[5] * 40, [5] * 45], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert not llm.core.on_step
        page = path.read_text()
        assert page.count("<!--") == 0 and "\\u003c!--\\u003cscript>" in page
        first, *frames = recorded_frames(page)
        assert first["key"]["model"] == "<!--<script>" and [frame["step"] for frame in frames] == [*range(1, 21)]
        view = View.from_key_frame(first)
        for frame in frames:
            view.apply(frame)
        check_view(view, llm)
        assert view.counts[1] == 32 and frames[0]["chunks"] == [["0", 0, 40], ["1", 32, 45]]
        with pytest.raises(FileNotFoundError, match="no such folder"), trace(llm, tmp_path / "missing" / "run.html"):
            pass
        with pytest.raises(KeyError), trace(llm, tmp_path / "failed.html", max_steps=5):
            llm.generate([[5] * 40] * 2, SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
            raise KeyError
    first, *frames = recorded_frames((tmp_path / "failed.html").read_text())
    assert [frame["step"] for frame in frames] == [*range(16, 21)]


def test_tiers_of_the_cache(tmp_path):
    """Host memory and files: what they contain, and what each step has moved."""
    rng, path = random.Random(0), tmp_path / "run.html"
    requests = [[i] * 60 + [rng.randrange(256, 2040) for _ in range(40)] for i in range(5)] * 3
    tiers = dict(swap_space=0.003, swap_dir=str(tmp_path), num_kvcache_blocks=12, max_num_seqs=2)
    with LLM("tiny-qwen3", **tiers, **SMALL) as llm, trace(llm, path):
        llm.generate(requests, SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        stats = llm.stats()
        found = stats["tiers"]
        assert 10 < found["host_rows_used"] <= found["host_rows"] and found["disk_files"] > 5
    first, *frames = recorded_frames(path.read_text())
    assert first["key"]["host_rows"] == found["host_rows"] and first["key"]["swap_dir"]
    moves = [frame["tiers"] for frame in frames if "tiers" in frame]
    assert len(moves) > 10 and all([*totals] == sorted(totals) for totals in [*zip(*moves)][1:3])
    view = View.from_key_frame(first)
    for frame in frames:
        view.apply(frame)
    names = "host_rows_used", "stored_blocks", "loaded_blocks", "disk_files", "disk_blocks"
    assert view.tiers[1:3] == [found[name] for name in names[1:3]] and min(view.tiers[:4]) > 5
    assert View.from_key_frame(view.key_frame()) == view
    stats["tiers"] |= {"disk_blocks": 3, "lost_copies": 4}
    assert [COUNTERS[name][1](stats) for name in ("disk_blocks", "lost_copies")] == [3, 4]


def test_page_is_closed_to_the_outside():
    """One file: no address but its own server's, nothing inline that its policy does not name, no markup from data."""
    page = render_page()
    assert '"Content-Security-Policy"' in page and "connect-src 'self'" in page
    assert "connect-src" not in render_page([])
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|localStorage|sessionSto", page)
    assert not re.findall(r'\son\w+="|\sstyle="|javascript:', page)
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}" in content_security_policy(is_live=True)
    assert "unsafe" not in page.split("</head>")[0]


def test_pictures_can_be_added_if_the_model_takes_images():
    """The page learns this from a key frame. It offers the formats that the engine reads, and may show them."""
    reader, page = pytest.importorskip("nanovllm.vision.image_reader"), render_page()
    (accepted,) = re.findall(r'<input id="files" type="file" multiple accept="([^"]*)"[^>]* hidden>', page)
    assert accepted.split(",") == [f"image/{kind.lower()}" for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    assert {kind.removeprefix("image/").upper() for kind in accepted.split(",")} == {*reader.WEB_FORMATS}
    assert re.search(r'<button id="attach" type="button"[^>]* hidden>', page)  # until the key frame has arrived
    assert 'byId("attach").hidden = !engine.takes_images' in page
    assert "img-src data:;" in content_security_policy(is_live=True)
    for vision in (None, object()):
        engine = Clockwork(num_seqs=1, num_blocks=100)
        engine.config.model_config.vision = vision
        recorder = StepRecorder(engine)
        recorder.start()
        engine.step()
        assert recorder.frames_since(0)[0][0]["key"]["takes_images"] == (vision is not None)


# -- the stream --------------------------------------------------------------------------------------------------------


class Server:
    """The page on a free port, with as much of OpenAI's API around an engine as its chat uses."""

    def __init__(self, llm: LLM):
        import uvicorn
        from fastapi import Depends, FastAPI, HTTPException, Request
        from fastapi.responses import StreamingResponse

        from nanovllm.serve.engine_calls import EngineCalls
        from nanovllm.serve.view import view_router

        self.llm, self.key, self.is_closing = llm, None, False

        def authorize(request: Request) -> None:
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                raise HTTPException(401)

        calls = EngineCalls(llm, MagicMock())  # nobody asks for the sizes of steps

        async def call(name: str, *arguments: Any) -> Any:
            return await asyncio.to_thread(getattr(calls, name), *arguments)

        app = FastAPI()
        app.include_router(view_router(call, authorize, lambda: self.is_closing))

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": "tiny"}]}

        @app.post("/v1/chat/completions", dependencies=[Depends(authorize)])
        async def complete(request: Request) -> StreamingResponse:
            body = await request.json()
            max_tokens, n = body["max_completion_tokens"], body["n"]
            params = SamplingParams(temperature=0, max_tokens=max_tokens, n=n, ignore_eos=True)
            answer = self.answer(llm.stream([body["messages"]], params))
            return StreamingResponse(answer, media_type="text/event-stream")

        config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    async def answer(self, events: Iterator) -> Any:
        try:
            while (event := await asyncio.to_thread(next, events, None)) is not None:
                choice = {"delta": {"content": event.text}, "finish_reason": event.finish_reason}
                yield f"data: {json.dumps({'choices': [{'index': event.output_index, **choice}]})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            await asyncio.to_thread(events.close)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/"

    def __enter__(self) -> "Server":
        self.thread.start()
        while not self.server.started:
            sleep(0.01)
        return self

    def __exit__(self, *exception) -> None:
        self.is_closing = self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive(), "streams do not end"


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    with LLM("tiny-qwen3", num_kvcache_blocks=200, max_num_seqs=16, **SMALL) as llm, Server(llm) as server:
        yield server


def events(lines: Iterator[str]) -> Iterator[list[dict]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def wait_for(condition) -> None:
    end = monotonic() + 20
    while not condition():
        assert monotonic() < end
        sleep(0.01)


def test_stream_of_frames(server):
    httpx = pytest.importorskip("httpx")
    llm, url = server.llm, f"{server.address}view/events"
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert not llm.core.on_step  # nothing is recorded without a stream
    with httpx.Client(timeout=20) as client, client.stream("GET", url) as one, client.stream("GET", url) as other:
        assert one.headers["content-type"].startswith("text/event-stream")
        streams = [events(response.iter_lines()) for response in (one, other)]
        views = [View.from_key_frame(next(stream)[0]) for stream in streams]
        llm.generate([[5] * 40] * 3, params, use_tqdm=False)
        for view, stream in zip(views, streams):
            while view.step < 20:
                for frame in next(stream):
                    view.apply(frame)
            check_view(view, llm)
        assert len(llm.core.on_step) == 1
        # an aborted request leaves the page although no step follows
        aborted = llm.stream([[5] * 40], params)
        next(aborted)
        aborted.close()
        for view, stream in zip(views, streams):
            while view.step == 20 or view.seqs:
                for frame in next(stream):
                    view.apply(frame)
            check_view(view, llm)
    wait_for(lambda: not llm.core.on_step)
    server.key = "secret"
    assert httpx.get(url).status_code == 401 and httpx.get(server.address).status_code == 200
    server.key = None


def test_streams_of_frames_are_few(server):
    """Many idle ones would take the event loop's time from other clients."""
    httpx = pytest.importorskip("httpx")
    from nanovllm.serve.view import MAX_STREAMS

    url = f"{server.address}view/events"
    with ExitStack() as stack, httpx.Client(timeout=20, limits=httpx.Limits(max_connections=50)) as client:
        streams = [stack.enter_context(client.stream("GET", url)) for _ in range(MAX_STREAMS)]
        lines = [stream.iter_lines() for stream in streams]
        assert all(next(each).startswith("data: ") for each in lines)
        answer = client.get(url)
        assert answer.status_code == 503 and "16 pages show the engine already" in answer.text
        streams[0].close()
        wait_for(lambda: open_again(client, url))
    wait_for(lambda: not server.llm.core.on_step)


def open_again(client, url: str) -> bool:
    with client.stream("GET", url) as stream:
        return stream.status_code == 200


def test_page_response(server):
    httpx = pytest.importorskip("httpx")
    response = httpx.get(server.address)
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy and "default-src 'none'" in policy and "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


# -- a real browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    pytest.importorskip("websockets")
    with open_browser() as page:
        yield page


@pytest.mark.browser
def test_page_in_a_browser(server, browser, tmp_path):
    """It chats, and shows the blocks of the answer; it can be paused, and moved through by keyboard."""
    server.key = "secret"
    browser.set_window(1280, 800, prefers_color_scheme="light")
    browser.open(server.address)
    browser.wait_for("!byId('key-box').hidden")  # it asks for the key
    controls = "[...document.querySelectorAll('input, textarea, select, button, canvas[tabindex], ul')]"
    unnamed = "(node) => !(node.ariaLabel || node.labels?.length || node.textContent.trim())"
    assert browser.run(f"{controls}.filter({unnamed}).map((node) => node.id)") == []
    browser.run("byId('key').focus()")
    browser.call("Input.insertText", text="secret")
    browser.press("Tab")
    browser.wait_for("byId('status').dataset.state === 'live' && player.view !== null")
    browser.wait_for("byId('blocks-count').textContent.startsWith('200: 0 held')")
    untouched, num_tokens = browser.run("[byId('grid').toDataURL(), player.view.counts[2]]")
    browser.run("byId('answers').value = '4'; byId('max-tokens').value = '60'; byId('message').focus()")
    browser.call("Input.insertText", text="What is <b>17</b> + 25?")
    browser.press("Enter", text="\r")
    browser.wait_for("player.view.numHeld > 0")
    browser.wait_for("byId('send').textContent === 'Send'")
    assert browser.run("document.querySelectorAll('#log b').length") == 0
    assert "<b>17</b>" in browser.run("document.querySelector('.from-user .text').textContent")
    answer = browser.run("document.querySelector('.from-model .text').textContent")
    assert len(answer) > 10 and browser.run("document.querySelectorAll('.from-model .answer').length") == 4
    browser.wait_for("player.view.step >= 60 && player.view.numHeld === 0")
    assert browser.run("byId('grid').toDataURL()") != untouched
    assert browser.run("player.view.counts[2]") == num_tokens + 4 * 60
    # back through the steps by keyboard: what was held is held again, and the page stays there
    browser.run("document.activeElement.blur(); follow()")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    assert browser.run("byId('status').textContent") == "paused" and browser.run("player.view.numHeld") > 0
    browser.wait_for("byId('narration').getAttribute('aria-live') === 'polite'")
    step = browser.run("player.view.step")
    browser.press("ArrowRight")
    assert browser.run("player.view.step") == step + 1
    browser.press("End")
    browser.wait_for("byId('status').textContent === 'live'")
    # what is kept has a bound, and can still be moved through; while it is paused, the page keeps what it shows
    frames = (
        "Array.from({length: 500}, (_, i) => ({step: 1000 + batch * 500 + i, time: 100 + batch * 5 + i / 100, ms: 9}))"
    )
    browser.run(f"for (let batch = 0; batch < 14; batch++) receive({frames})")
    assert 4000 < browser.run("player.end") <= 6000
    assert browser.run("show(0), player.view.step") < browser.run("show(player.end), player.view.step") == 7999
    browser.run("receive([{key: player.view.engine, step: 0, time: 0}])")
    assert browser.run("player.view.step") == 7999 and browser.run("stream === null")
    server.key = None
    assert [problem for problem in browser.problems if "401" not in problem] == []


@pytest.mark.browser
def test_recording_in_a_browser(browser, tmp_path):
    """The script adds up frames as frames.py does; a seek to any step, in any order, gives the same state."""
    path, rng = tmp_path / "run.html", random.Random(4)
    with LLM("tiny-qwen3", num_kvcache_blocks=20, max_num_mixed_tokens=64, **SMALL) as llm, trace(llm, path):
        requests = [random_request(rng) for _ in range(12)]
        for request in requests:
            llm.add_request(*request)
        while not llm.is_finished():
            llm.step()
    first, *frames = recorded_frames(path.read_text())
    view, states = View.from_key_frame(first), []
    for frame in [None, *frames]:
        if frame:
            view.apply(frame)
        seqs = {name: [s.status, s.prompt, s.tokens, s.computed, s.table] for name, s in view.seqs.items()}
        states.append(json.loads(json.dumps([view.step, seqs, sorted(view.cached), view.waiting, view.counts])))
    assert len(states) > 60
    num_problems = len(browser.problems)
    browser.set_window(390, 844, prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    browser.open(path.as_uri())
    browser.run(
        "const stateAt = (index) => { show(index); const v = player.view; return structuredClone([v.step,"
        " Object.fromEntries([...v.seqs].map(([n, s]) => [n, [s.status, s.prompt, s.tokens, s.computed, s.table]])),"
        " [...v.cached].sort((a, b) => a - b), v.waiting, v.counts]); }; 0"
    )
    order = [*range(len(states)), *rng.sample(range(len(states)), 40), *range(len(states) - 1, -1, -1)]
    assert browser.run(f"({order}).map(stateAt)") == [states[i] for i in order]
    assert "recording of" in browser.run("byId('status').textContent")
    assert browser.run("byId('chat').hidden && byId('follow').hidden")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out on a phone
    colors = "() => { show(40); draw(); return [...player.view.seqs.values()].map((seq) => seq.color).join(); }"
    assert browser.run(f"({colors})()") == browser.run(f"(show(60), ({colors})())")
    browser.press("Home")
    browser.press(" ")
    browser.wait_for("player.index > 0 || !playing")
    assert browser.problems[num_problems:] == []


@pytest.mark.browser
def test_a_steady_rate_is_a_straight_line(browser, tmp_path):
    """However steps fall into the bins of a curve."""
    path = tmp_path / "run.html"
    engine = dict(model="m", device="cpu", num_blocks=10, block_size=16, kv_cache_dtype="auto", max_num_seqs=4)
    state = dict(seqs=[], waiting=[0], counts=[0, 0, 0, 0], decodes=["0"])
    frames = [{"step": i, "time": 0.03 * i, "ms": 30.0} for i in range(1, 200)]
    path.write_text(render_page([{"key": engine, "step": 0, "time": 0} | state, *frames]))
    browser.set_window(1440, 900, prefers_color_scheme="light")
    browser.open(path.as_uri())
    browser.run("drawn = {}; drawCurve = (curve, values) => (drawn[curve.title] = values); lastCurves = 0; draw()")
    rates = browser.run("drawn['Output tokens/s']")
    assert len(rates) > 60 and rates == pytest.approx([1 / 0.03] * len(rates), rel=0.05)
    assert browser.run("drawn['Time of a step']") == pytest.approx([30.0] * len(rates))


@pytest.mark.browser
def test_thousands_of_blocks_in_a_browser(browser, tmp_path):
    """What is held has cells that can be seen, and what is not is folded; a band says what is in it."""
    engine, path = Clockwork(num_seqs=6, num_blocks=5000), tmp_path / "run.html"
    recorder = StepRecorder(engine)
    recorder.start()
    for _ in range(50):
        engine.step()
    path.write_text(render_page(recorder.frames_since(0)[0]))
    browser.set_window(1440, 900, prefers_color_scheme="light")
    browser.open(path.as_uri())
    browser.run("show(20), draw()")
    num_held = browser.run("player.view.numHeld")
    sizes = browser.run("[...player.view.seqs.values()].flatMap((seq) => seq.table.map((id) => placeOf(id)[2]))")
    assert num_held >= 24 and min(sizes) >= 20
    heights = browser.run("grid.bands.map((band) => [band.isOpen, band.height])")
    total = sum(height for _, height in heights)
    assert total == pytest.approx(browser.run("grid.height")) and browser.run("grid.height") < 450
    assert sum(height for is_open, height in heights if is_open) / total > 10 * num_held / 5000
    browser.run("byId('grid').focus(), grid.cursor = 4000, draw()")
    assert re.fullmatch(r"Blocks \d+ to 4,999: \d+ cached, [\d,]+ free", browser.run("byId('block-info').textContent"))
    browser.run("byId('grid').blur(), show(player.end), draw()")  # nothing is held: one band
    assert browser.run("grid.bands.map((band) => band.isOpen)") == [False]
    assert browser.run("grid.bands[0].text").endswith(" free")


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 400])
def test_accessibility_by_axe(server, browser, scheme, width):
    if not (source := os.environ.get("AXE_CORE")):
        pytest.skip("AXE_CORE is the path of axe.min.js, from `npm pack axe-core`")
    browser.set_window(width, 850, prefers_color_scheme=scheme)
    browser.open(server.address)
    browser.wait_for("player.view !== null && byId('status').dataset.state === 'live'")
    browser.run(f"{Path(source).read_text()}; 0")
    browser.run("byId('answers').value = '4'; byId('message').value = 'To be, or not to be'; send(); 0")
    browser.wait_for("player.view.numHeld > 0")
    violations = "axe.run().then(({violations}) => violations.map(({id, impact, nodes}) =>"
    violations += " [id, impact, ...nodes.map((node) => node.target.join(' '))]))"
    assert browser.run(violations) == []
    browser.wait_for("byId('send').textContent === 'Send'")
    text = "# Title\n\n```python\nx = 1\n```\n- a `b`\n\n| a |\n|---|\n| 1 |\n\n> [c](https://example.org)"
    browser.run(f"turns[1].answers[1] = {json.dumps(text)}; byId('settings').open = true; renderLog(); edit(0)")
    browser.run("byId('max-tokens').value = 0; readSettings(); 0")
    assert browser.run(violations) == []
    browser.run("byId('max-tokens').value = 256; readSettings(); byId('clear').click()")
    assert browser.run(violations) == []


@pytest.mark.browser
def test_nothing_moves_when_the_page_is_paused(server, browser):
    """Neither at 1440 nor at 400 pixels; and what can be pressed is large enough for a finger."""
    places = (
        "['facts', 'status', 'step-title', 'blocks-title', 'sequences-title', 'curves', 'play', 'slider', 'follow']"
        ".map((id) => { const {x, y} = byId(id).getBoundingClientRect(); return id === 'status' ? y : [x, y]; })"
    )
    for width in (1440, 400):
        browser.set_window(width, 850, prefers_color_scheme="light")
        browser.open(server.address)
        browser.wait_for("player.view !== null && byId('status').dataset.state === 'live'")
        browser.wait_for("CURVES.every((curve) => curve.value.textContent === 'idle')")
        server.llm.generate([[5] * 40] * 3, SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        browser.wait_for("player.view.step >= 20 && player.view.numHeld === 0")
        browser.run("draw()")
        before = browser.run(places)
        browser.run("byId('play').click(), draw()")
        assert browser.run("byId('status').textContent") == "paused" and browser.run(places) == before
        controls = "[...document.querySelectorAll('button, select, input, textarea, summary, #running li')]"
        small = ".filter((node) => node.offsetParent && Math.min(node.offsetWidth, node.offsetHeight) < 24)"
        assert browser.run(f"{controls}{small}.map((node) => node.id || node.textContent)") == []
        assert browser.run("byId('slider').offsetWidth") >= 200
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
@pytest.mark.parametrize("width", [1440, 1366, 1100, 900, 400])
def test_nothing_moves_while_sequences_come_and_go(browser, tmp_path, width):
    """Whether none or 64 run, whether some wait, and whatever numbers stand beside the curves."""
    engine, path = Clockwork(num_seqs=64, num_blocks=200), tmp_path / "run.html"
    recorder = StepRecorder(engine)
    recorder.start()
    engine.run()
    path.write_text(render_page(recorder.frames_since(0)[0]))
    browser.set_window(width, 900, prefers_color_scheme="light")
    browser.open(path.as_uri())
    ids = ["blocks-title", "sequences-title", "curves"]
    states = [f"show(Math.round(player.end * {part})), draw()" for part in (0, 0.1, 0.4, 0.7, 1)]
    states += [f"CURVES.forEach((curve) => curve.value.textContent = '{text}')" for text in ("idle", "up to 1,888 ms")]
    shown = f"{ids}.map((id) => byId(id).getBoundingClientRect().y)"
    places = {(*browser.run(f"{state}; {shown}.concat(byId('curves').offsetHeight, grid.width)"),) for state in states}
    assert len(places) == 1
    numbers = "[...player.frames.keys()].map((i) => (player.seek(i), [player.view.waiting[0], player.view.seqs.size]))"
    waiting, alive = zip(*browser.run(numbers))
    assert max(waiting) > 12 and max(alive) == 64
    if width == 1440:
        assert browser.run("byId('engine').scrollHeight <= byId('engine').clientHeight")


@pytest.mark.browser
def test_a_window_without_width_breaks_nothing(browser, tmp_path):
    engine, path, num_problems = Clockwork(num_seqs=6, num_blocks=5000), tmp_path / "run.html", len(browser.problems)
    recorder = StepRecorder(engine)
    recorder.start()
    engine.step()
    path.write_text(render_page(recorder.frames_since(0)[0]))
    browser.set_window(1, 900, prefers_color_scheme="light")
    browser.open(path.as_uri())
    assert browser.run("draw(), byId('grid').parentElement.clientWidth") == 0
    browser.set_window(1440, 900, prefers_color_scheme="light")
    browser.wait_for("grid.width > 400 && grid.columns > 10")
    assert browser.problems[num_problems:] == []


@pytest.fixture(scope="module")
def whole_server():
    """The server of the command line, with the cache that it gives to the bundled model; its address."""
    pytest.importorskip("fastapi")
    from nanovllm.serve import AsyncLLM
    from nanovllm.serve.address import listening_socket
    from nanovllm.serve.cli import SMALL_CACHE
    from nanovllm.serve.server import make_server
    from nanovllm.serve.settings import ServerSettings

    settings = ServerSettings(port=0)
    llm = AsyncLLM("tiny-qwen3", device="cpu", dtype="float32", **SMALL_CACHE)
    server = make_server(llm, settings, "tiny-qwen3")
    with listening_socket(settings) as listener:
        listener.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(20)
    llm.exit()


@pytest.mark.browser
def test_demo_load_in_a_browser(whole_server, browser):
    """A dozen prompts at once, which share a prefix and of which some are preempted; it can be stopped."""
    browser.set_window(1440, 900, prefers_color_scheme="light")
    browser.open(whole_server)
    browser.wait_for("player.view !== null")
    assert "3.7 M parameters, for demonstration" in browser.run("byId('facts').textContent")
    browser.run("byId('demo').click()")
    browser.wait_for("player.view.numHeld > 20")
    assert browser.run("byId('demo').textContent").startswith("Stop the demo")
    browser.wait_for("demo === null", seconds=120)
    found = re.match(
        r"15 answers with 4,\d+ tokens in \d+ s, and (\d+) preemptions?\.", browser.run("byId('demo-note').textContent")
    )
    assert found and int(found[1]) >= 1
    assert browser.run("player.view.counts[1]") > 200  # tokens of prompts, found in the cache
    browser.run("byId('demo').click()")
    browser.wait_for("player.view.numHeld > 0")
    browser.run("byId('demo').click()")
    browser.wait_for("demo === null && player.view.numHeld === 0")
    assert browser.run("byId('demo-note').textContent") == "Stopped."


@pytest.mark.browser
def test_chat_in_a_browser(whole_server, browser):
    num_problems = len(browser.problems)
    answers = "[...document.querySelectorAll('.from-model:last-child .answer .text')].map((node) => node.textContent)"
    browser.set_window(1440, 900, prefers_color_scheme="light")
    browser.open(whole_server)
    browser.wait_for("document.querySelectorAll('.tries button').length === 4 && model === null")
    # a prompt that is proposed is answered, and answered well
    browser.run("byId('temperature').value = 0; document.querySelector('.tries button').click()")
    browser.wait_for("turns.length === 2 && pending === null")
    assert browser.run(answers) == ["925"]
    about = browser.run("document.querySelector('.from-model .meta').textContent")
    assert re.fullmatch(r"4 tokens, [\d.,]+ tokens/s, first text after [\d.,]+ ms", about)
    # what is not valid is refused with a word
    for field, value, word in (
        ("max-tokens", "0", "Max tokens: must be a whole number from 1 to 2,048."),
        ("max-tokens", "2.5", "Max tokens: must be a whole number from 1 to 2,048."),
        ("max-tokens", "", "Max tokens: must be a whole number from 1 to 2,048."),
        ("temperature", "3", "Temperature: must be a number from 0 to 2."),
        ("top-p", "0", "Top-p: must be a number from 0.01 to 1."),
    ):
        browser.run(f"was = byId('{field}').value; byId('{field}').value = '{value}'; send('Hello'); 0")
        assert browser.run("byId('problem').textContent") == word
        assert browser.run("document.activeElement.id") == field and browser.run("turns.length") == 2
        browser.run(f"byId('{field}').value = was; readSettings(); 0")
    assert browser.run("byId('problem').textContent") == ""
    # an edit replaces the message, and what follows it
    browser.run("document.querySelector('.from-user .actions button').click()")
    assert browser.run("byId('message').value") == "What is 348 + 577?"
    browser.run("byId('message').value = 'Sort: 9, 3, 71, 20'; byId('answers').value = 4; byId('form').requestSubmit()")
    browser.wait_for("turns.length === 2 && pending === null && turns[0].text.startsWith('Sort')")
    assert "4 of 4 answers complete, 52 tokens, " in browser.run("turns[1].about")
    assert browser.run(answers) == ["3, 9, 20, 71"] * 4
    assert "the answers share 1 full block of 16" in browser.run("turns[1].about")
    browser.run("document.querySelectorAll('.from-model [aria-pressed]')[2].click()")
    assert browser.run("[turns[1].chosen, document.activeElement.textContent]") == [2, "Chosen"]
    # a short prompt shares nothing, and the page says why
    browser.run("byId('answers').value = 2; turns = []; send('Who are you?'); 0")
    browser.wait_for("turns.length === 2 && pending === null")
    assert "less than a block of 16, so the answers share no block" in browser.run("turns[1].about")
    assert "3.7 million parameters" in browser.run(answers)[0]
    # while answers are generated, the tokens of all of them are counted: a chunk has the number of its own
    chunk = "{choices: [{index, delta: {content: 'x'}}], usage: {completion_tokens: n}}"
    chunks = f"[5, 7].forEach((n, index) => onChunk({chunk}))"
    wait = "await new Promise((go) => setTimeout(go, 300))"
    meta = "shown = document.querySelector('.from-model:last-child .meta').textContent"
    browser.run(f"real = request; request = async (path, body, signal, onChunk) => {{ {chunks}; {wait}; {meta}; }}; 0")
    browser.run("regenerate()")
    browser.run("request = real; 0")
    assert browser.run("shown").startswith("0 of 2 answers complete, 12 tokens, ")
    browser.run("document.querySelector('.last button').click()")  # regenerate
    browser.wait_for("pending !== null && document.querySelector('.last') === null")
    browser.wait_for("turns.length === 2 && pending === null")
    # a further message leaves the nodes of the conversation as they are, or a screen reader would read it again
    browser.run("first = [...log.children]; send('What is 1 + 2?'); 0")
    browser.wait_for("turns.length === 4 && pending === null")
    assert browser.run("first.every((node, i) => node === log.children[i]) && log.childElementCount === 4")
    assert browser.run("document.querySelectorAll('.last').length") == 1
    # it is kept over a reload; the newest message stays in view
    browser.run("byId('system').value = 'Be brief.'; save(); reloaded = false")
    browser.call("Page.reload")
    browser.wait_for("typeof reloaded === 'undefined' && document.readyState === 'complete'")
    browser.wait_for("turns.length === 4 && player.view !== null")
    assert browser.run("['system', 'answers', 'temperature'].map((id) => byId(id).value)") == ["Be brief.", "2", "0"]
    assert browser.run("messages().map(({role}) => role)") == ["system", *["user", "assistant"] * 2]
    browser.run("turns = Array.from({length: 20}, () => turns).flat(); renderLog()")
    browser.wait_for("isAtEnd && log.scrollTop > 500")
    browser.set_window(1440, 600, prefers_color_scheme="light")
    browser.wait_for("log.scrollHeight - log.scrollTop - log.clientHeight < 24")
    # a new beginning has the hints again
    browser.run("byId('clear').click()")
    assert browser.run("document.querySelectorAll('.tries button').length") == 4 and not browser.run("turns.length")
    assert browser.problems[num_problems:] == []


@pytest.mark.browser
def test_pictures_in_a_browser(whole_server, browser):
    """They are added, shown, removed, sent as data URLs, and edited; other files are refused."""
    num_problems = len(browser.problems)
    shown = "[...byId('pictures').querySelectorAll('img')].map((node) => node.alt)"
    file = "(name, type) => new File([new Uint8Array([71, 73, 70])], name, {type})"
    browser.set_window(1440, 900, prefers_color_scheme="light")
    browser.open(whole_server)
    browser.wait_for("player.view !== null")
    assert browser.run("byId('attach').hidden && byId('files').hidden")  # the model takes no images
    browser.run(f"byId('attach').hidden = false; make = {file}; 0")
    browser.run("attach([make('a.gif', 'image/gif'), make('b.png', 'image/png')])")
    assert browser.run(shown) == ["a.gif", "b.png"]
    browser.run("attach([make('c.txt', 'text/plain')])")
    assert browser.run("byId('problem').textContent") == "c.txt: must be a PNG, JPEG, WebP or GIF file."
    browser.run("byId('pictures').querySelector('[aria-label=\"Remove a.gif\"]').click()")
    assert browser.run(shown) == ["b.png"] and browser.run("document.activeElement.id") == "attach"
    event = "{preventDefault() { prevented = true; }}"
    for types, is_taken in ((["Files"], True), (["Files", "text/plain"], False), (["text/plain"], False)):
        data = f"{{types: {json.dumps(types)}, files: [make('d.webp', 'image/webp')]}}"
        browser.run(f"prevented = false; receiveFiles({event}, {data}); 0")
        assert browser.run("prevented") == is_taken
    browser.wait_for("pictures.length === 2")
    body = "sent = body.messages.at(-1).content"
    browser.run(f"request = async (path, body, signal, onChunk) => {{ {body}; }}; send('What is this?')")
    assert browser.run("sent") == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,R0lG"}},
        {"type": "image_url", "image_url": {"url": "data:image/webp;base64,R0lG"}},
        {"type": "text", "text": "What is this?"},
    ]
    assert browser.run(shown) == [] and browser.run("document.querySelectorAll('.from-user img').length") == 2
    browser.run("edit(0)")
    assert browser.run(shown) == ["b.png", "d.webp"]
    browser.run("byId('clear').click(); send('Hi')")
    assert browser.run("sent") == "Hi" and browser.run("document.querySelectorAll('img').length") == 0
    browser.run("sent = null; send('')")
    assert browser.run("sent") is None  # neither text nor a picture
    browser.run("byId('clear').click(); attach([make('e.gif', 'image/gif')])")
    browser.wait_for("pictures.length === 1")
    browser.run("send('')")
    assert browser.run("sent") == [{"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lG"}}]
    browser.run("byId('clear').click()")
    assert browser.problems[num_problems:] == []


@pytest.mark.browser
def test_markup_of_answers(server, browser):
    """Some Markdown, made of nodes of the page's own; nothing else in an answer is markup."""
    browser.set_window(1440, 900, prefers_color_scheme="light")
    browser.open(server.address)

    def render(text: str) -> str:
        return browser.run(f"element('div', {{}}, ...markdown({json.dumps(text)})).innerHTML")

    assert render("a **b** and *c* and `d*e*`") == ("<p>a <strong>b</strong> and <em>c</em> and <code>d*e*</code></p>")
    assert render("2 * 3 * 4\nnext") == "<p>2 * 3 * 4\nnext</p>"
    assert render("# Title\n\n> said\n> so") == "<h3>Title</h3><blockquote><p>said\nso</p></blockquote>"
    assert render("3. x\n4. y").startswith('<ol><li value="3"') and "<ul><li" in render("- x\n  - y")
    assert render("| a | b |\n|---|---|\n| 1 | 2 |") == (
        "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>"
    )
    code = render("```python\nif a < b:\n    pass\n```\nafter")
    assert "<code>if a &lt; b:\n    pass</code>" in code and "python" in code and code.endswith("<p>after</p>")
    assert "<code>open" in render("```\nopen")  # while it is generated
    assert '<a href="https://example.org/x" target="_blank" rel="noopener noreferrer">y</a>' in render(
        "[y](https://example.org/x)"
    )
    for hostile in ("<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "**<script>alert(1)</script>**"):
        html = render(hostile)
        assert not re.search(r"<(img|script|a)\b", html), html
    browser.run("began = performance.now()")
    for hostile in ("`" * 20_000, "*" * 20_000, "[" * 20_000, "> " * 20_000, "|" * 20_000, "- " * 20_000, "a`" * 9000):
        render(hostile)
    assert browser.run("performance.now() - began") < 5000
