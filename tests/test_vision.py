"""Images in prompts: small random models that transformers has made, in all schedules, and what callers may send."""

import asyncio
import base64
import ctypes
import gc
import io
import json
import random
import resource
import shutil
import socket
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier, Event, Thread, current_thread
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from common import TINY, assert_close, each_dtype, generate_by_steps, randn, runs_as_on_cuda
from test_models import V5
from test_states import poison

from nanovllm import LLM, BeamSearchParams, LoRARequest, SamplingParams
from nanovllm.cuda.buffers import make_buffers
from nanovllm.engine.scheduler import Scheduler
from nanovllm.fused import fuse
from nanovllm.fused.decoder import FusedDecoderLayer
from nanovllm.kernels.launch import gpu_features
from nanovllm.models import ModelConfig, make_model
from nanovllm.requests.read_prompts import image_prompt_reader
from nanovllm.utils.loader import load_model
from nanovllm.utils.replace import replace_methods, subclass
from nanovllm.vision import image_prompts, image_sources, image_urls
from nanovllm.vision.image_budget import cost_of_image
from nanovllm.vision.image_reader import ImageReader
from nanovllm.vision.image_store import ImageStore, largest_pack
from nanovllm.vision.prompt_images import PromptImage, PromptImages, images_in, images_of
from nanovllm.vision.tower import VisionTower, add_layer_norm, linear_gelu, patch_attention, rotate_patches
from nanovllm.vision.vision_runner import VisionRunner

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers.models.qwen3_vl", reason="transformers before 4.57 does not have Qwen3-VL")

START, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
SPECIAL = START, END, PAD, "<|video_pad|>"
FIRST_ID = 2048  # of SPECIAL
PAD_ID = FIRST_ID + 2
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
VISION = dict(depth=3, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=64, patch_size=4)
VISION |= dict(num_position_embeddings=36, spatial_merge_size=2, temporal_patch_size=2)
PIXELS = dict(min_pixels=64, max_pixels=2**14)
ROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_interleaved": True}
TEXT = dict(vocab_size=2056, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24)
HYBRID = DELTA | dict(layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=64)
VL_ROPE = ROPE | {"mrope_section": [7, 5, 4]}
HYBRID_ROPE = ROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25}
# family of transformers, entries of the text model, and of the vision tower
CASES = {
    "qwen3_vl": (
        "Qwen3VL",
        dict(head_dim=32, intermediate_size=96, rope_parameters=VL_ROPE),
        {"deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        dict(head_dim=32, intermediate_size=96, rope_parameters=VL_ROPE, **EXPERTS),
        {"deepstack_visual_indexes": [1]},
    ),
    "qwen3_5": ("Qwen3_5", dict(intermediate_size=96, rope_parameters=HYBRID_ROPE, **HYBRID), {}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        dict(rope_parameters=HYBRID_ROPE, shared_expert_intermediate_size=24, **EXPERTS, **HYBRID),
        {},
    ),
}
CASES = {name: case for name, case in CASES.items() if hasattr(transformers, f"{case[0]}Config")}  # with this version
DENSE = [name for name in ("qwen3_vl", "qwen3_5") if name in CASES]
SETTINGS = dict(max_model_len=352, kvcache_block_size=16, num_kvcache_blocks=150, max_num_seqs=8)
SETTINGS |= dict(mm_processor_kwargs=PIXELS)
SCHEDULES = {
    "at once": {},
    "chunks": dict(max_num_batched_tokens=40, max_num_mixed_tokens=23),
    "preemptions": dict(num_kvcache_blocks=11, max_model_len=176),
    "one at a time": dict(max_num_seqs=1, num_kvcache_blocks=24),
    "without prefix cache": dict(enable_prefix_caching=False),
}


def make_checkpoint(folder: Path, name: str) -> tuple[str, torch.nn.Module]:
    """Save a model with random weights, and the bundled tokenizer with tokens for images."""
    family, text, vision = CASES[name]
    ids = dict(vision_start_token_id=FIRST_ID, vision_end_token_id=FIRST_ID + 1)
    ids |= dict(image_token_id=PAD_ID, video_token_id=FIRST_ID + 3)
    text = TEXT | dict(num_hidden_layers=3, eos_token_id=2047) | text
    if not V5:
        rope = dict(text.pop("rope_parameters"))
        text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=VISION | vision, **ids)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    generator = torch.Generator().manual_seed(len(name))
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed_tokens" in parameter_name or "lm_head" in parameter_name:
            parameter.copy_(0.3 * noise)
        elif parameter_name.endswith("A_log"):
            parameter.copy_(1.5 * noise - 2)
        elif parameter.dim() > 1:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        else:
            parameter.add_(0.3 * noise)
    model.save_pretrained(folder)
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    tokenizer = json.loads(Path(TINY, "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [plain | {"id": FIRST_ID + i, "content": x} for i, x in enumerate(SPECIAL)]
    settings = json.loads(Path(TINY, "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    for file, content in (("tokenizer", tokenizer), ("tokenizer_config", settings)):
        (folder / f"{file}.json").write_text(json.dumps(content))
    return str(folder), model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return cache(lambda name: make_checkpoint(tmp_path_factory.mktemp("vision") / name, name))


@pytest.fixture
def make_vision(make_llm, checkpoint):
    def make(name: str = "qwen3_vl", **settings):
        llm = make_llm(checkpoint(name)[0], **SETTINGS | settings)
        return poison(llm) if llm.config.num_states else llm

    return make


def picture(width: int, height: int, seed: int = 0) -> "Image.Image":
    """A smooth random image, so that scaling keeps some of it."""
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def with_images(rng: random.Random, *images, before: int = 3, between: int = 2, after: int = 5) -> dict:
    """A prompt of random tokens around images."""
    ids = lambda n: [rng.randrange(5, 2000) for _ in range(n)]
    token_ids = ids(before)
    for _ in images:
        token_ids += [FIRST_ID, PAD_ID, FIRST_ID + 1, *ids(between)]
    return {"prompt_token_ids": token_ids + ids(after), "multi_modal_data": {"image": [*images]}}


def has_hopper() -> bool:
    return find_spec("triton") is not None and gpu_features.has_hopper_kernels()


def tensor_of(image: PromptImage) -> torch.Tensor:
    return torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(8 * image.rows, 8 * image.columns, 3)


def patches_of(image: torch.Tensor) -> torch.Tensor:
    """The inputs of transformers' tower: two frames of patches, in the order of squares of two by two patches."""
    patches = [
        image[8 * row + i : 8 * row + i + 4, 8 * column + j : 8 * column + j + 4].permute(2, 0, 1)
        for row in range(len(image) // 8)
        for column in range(image.shape[1] // 8)
        for i in (0, 4)
        for j in (0, 4)
    ]
    pixels = (torch.stack(patches).float() / 255 - 0.5) / 0.5
    return pixels.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)


class Reference:
    """Log-probabilities by transformers' model, for the prompts that our processor has made."""

    computed: ClassVar[dict] = {}  # most answers are the same in all tests

    def __init__(self, model: torch.nn.Module, llm):
        self.model, self.llm = model, llm

    def logprobs(self, prompt, token_ids: list[int]) -> torch.Tensor:
        _, expanded, images = self.llm.input_processor.tokenize(prompt)
        assert token_ids[: len(expanded)] == expanded
        key = self.model, *token_ids, *((x.pixels, x.rows, x.columns) for x in (images.images if images else ()))
        if key not in self.computed:
            self.computed[key] = self._compute(token_ids, images)
        return self.computed[key]

    def _compute(self, token_ids: list[int], images: PromptImages | None) -> torch.Tensor:
        return self.model(**self._inputs(token_ids, images)).logits[0].log_softmax(-1)

    def _inputs(self, token_ids: list[int], images: PromptImages | None) -> dict:
        inputs = {"input_ids": torch.tensor([token_ids])}
        if images is not None:
            inputs |= self.pixels(images)
            inputs |= {"mm_token_type_ids": (inputs["input_ids"] == PAD_ID).int()} if V5 else {}
            self.model.model.rope_deltas = None
        return inputs

    def beams(
        self, token_ids: list[int], images: PromptImages | None, params: BeamSearchParams
    ) -> list[tuple[list[int], float]]:
        """The tokens and the score of each beam that transformers' generate finds."""
        inputs, width = self._inputs(token_ids, images), params.beam_width
        lengths = dict(max_new_tokens=params.max_tokens, length_penalty=params.length_penalty)
        beams = dict(do_sample=False, num_beams=width, num_return_sequences=width, pad_token_id=0)
        beams |= dict(eos_token_id=99999, output_scores=True, return_dict_in_generate=True)  # no beam ends early
        out = self.model.generate(**inputs, **beams, **lengths)
        return [(x[len(token_ids) :].tolist(), y.item()) for x, y in zip(out.sequences, out.sequences_scores)]

    @staticmethod
    def pixels(images: PromptImages) -> dict:
        patches = torch.cat([patches_of(tensor_of(image)) for image in images.images])
        grids = [[1, 2 * image.rows, 2 * image.columns] for image in images.images]
        return {"pixel_values": patches, "image_grid_thw": torch.tensor(grids)}

    def check(self, prompts, outputs) -> None:
        for prompt, output in zip(prompts, outputs, strict=True):
            for answer in output.outputs:
                token_ids, n = output.prompt_token_ids + answer.token_ids, len(output.prompt_token_ids)
                logprobs = self.logprobs(prompt, token_ids)
                expected = logprobs[range(n - 1, len(token_ids) - 1), answer.token_ids]
                found = [logprob[token_id].logprob for token_id, logprob in zip(answer.token_ids, answer.logprobs)]
                assert found == pytest.approx(expected.tolist(), abs=1e-4), n
                if answer.index == 0 and output.prompt_logprobs is not None:
                    expected = logprobs[range(n - 1), output.prompt_token_ids[1:]].tolist()
                    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
                    assert [x[token_id].logprob for token_id, x in pairs] == pytest.approx(expected, abs=1e-4)


def make_requests(num_tokens: int = 2) -> list[tuple]:
    """Images of odd sizes, alone and several, next to prompts of text; some images and prefixes come again."""
    rng = random.Random(0)
    first, second = picture(61, 43, 1), picture(24, 90, 2)
    shared = with_images(random.Random(1), first, before=30, after=40)
    other = {**shared, "multi_modal_data": {"image": [picture(61, 43, 3)]}}  # the same ids, but another image
    longer = {**shared, "prompt_token_ids": shared["prompt_token_ids"] + [7, 8, 9]}
    prompts = [
        with_images(rng, first),
        [rng.randrange(5, 2000) for _ in range(50)],
        with_images(rng, second, picture(8, 8, 4), first, before=0),
        shared,
        other,
        with_images(rng, picture(130, 70, 5), picture(9, 100, 6), before=17, between=0, after=0),
        longer,
        {"prompt_token_ids": [rng.randrange(5, 2000) for _ in range(20)]},
    ]
    kinds = [{}, {"n": 3}, {"prompt_logprobs": 0}, {"temperature": 0.0}]
    # transformers would look for more images if a placeholder were generated
    options = dict(ignore_eos=True, logprobs=0, detokenize=False, logit_bias={PAD_ID: -100, PAD_ID + 1: -100})
    params = [
        SamplingParams(**{"temperature": 1.0, "seed": i, "max_tokens": num_tokens + i // 2, **options, **kinds[i % 4]})
        for i in range(len(prompts))
    ]
    return [*zip(prompts, params)]


# -- the tower ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_tower(checkpoint, name):
    """On grids larger and smaller than that of the learned positions, and of a single row of tokens."""
    folder, reference = checkpoint(name)
    model = make_model(ModelConfig.read(Path(folder)), 64)
    load_model(model, Path(folder), torch.device("cpu"))
    for height, width in ((6, 6), (10, 4), (2, 18), (2, 2)):
        image = torch.randint(0, 256, (4 * height, 4 * width, 3), dtype=torch.uint8)
        other = torch.randint_like(image, 256)
        larger = torch.randint(0, 256, (1, 16, 24, 3), dtype=torch.uint8)
        found, alone = model.model.visual([torch.stack((other, image)), larger]), model.model.visual([image[None]])
        num_tokens = height * width // 4
        assert found.shape[1] == 2 * num_tokens + 6
        found = found[:, num_tokens : 2 * num_tokens]
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
        expected = reference.model.visual(patches_of(image), grid_thw=torch.tensor([[1, height, width]]))
        if V5:
            expected = expected.pooler_output, getattr(expected, "deepstack_features", None) or ()
        torch.testing.assert_close(found, torch.stack([expected[0], *expected[1]]), rtol=1e-5, atol=1e-5)


@each_dtype
@pytest.mark.parametrize("num_patches, num_heads, head_dim", [(1, 1, 2), (7, 3, 12), (5, 16, 72)])
def test_rotation_on_kernels(num_patches, num_heads, head_dim, dtype):
    ops = pytest.importorskip("nanovllm.kernels.ops")
    qkv = randn(num_patches, 3, num_heads, head_dim, dtype=dtype)
    angles = randn(num_patches, 1, head_dim // 2, dtype=torch.float32)
    expected = rotate_patches.__wrapped__(qkv.double(), angles.cos(), angles.sin())
    assert_close(ops.rotate_patches(qkv, angles.cos(), angles.sin()), expected)


@pytest.mark.skipif(not has_hopper(), reason="needs a Hopper GPU, and Triton 3.6")
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize("num_patches", [1, 4, 127, 128, 129, 700, 4096])
def test_attention_for_hopper(num_patches, head_dim):
    """Also with so many heads that a program computes several tiles of queries."""
    from nanovllm.vision.kernels import hopper_patch_attention

    for num_images, heads in (1, 1), (3, 16), (1, 300):
        for dtype in torch.bfloat16, torch.float16:
            if num_images * num_patches * heads < 2**18:
                qkv = torch.randn(num_images, num_patches, 3, heads, head_dim, device="cuda", dtype=dtype)
                expected = patch_attention.__wrapped__(qkv.double())
                assert_close(hopper_patch_attention.attend(qkv), expected)


@each_dtype
@pytest.mark.parametrize("num_patches, size", [(1, 2), (7, 48), (3, 1152)])
def test_norm_of_sum_on_kernels(num_patches, size, dtype):
    ops = pytest.importorskip("nanovllm.kernels.ops")
    x, residual = (randn(num_patches, size, dtype=dtype) + 3 for _ in range(2))
    weight, bias = randn(2, size, dtype=dtype)
    expected = add_layer_norm.__wrapped__((x + residual).double(), 0, weight.double(), bias.double(), 1e-6)
    for found, exact in zip(ops.add_layer_norm(x, residual.clone(), weight, bias, 1e-6), expected):
        assert_close(found, exact)
    strided = torch.stack((x, x), -1)[..., 0]
    assert (ops.add_layer_norm(strided, residual, weight, bias, 1e-6) is NotImplemented) != strided.is_contiguous()


@each_dtype
@pytest.mark.parametrize("num_patches, inputs, outputs", [(1, 16, 24), (7, 32, 48), (300, 1152, 4304)])
def test_gelu_of_product(num_patches, inputs, outputs, dtype):
    """The kernel's GELU is the approximation with tanh. A CPU has no such kernel."""
    ops = pytest.importorskip("nanovllm.kernels.ops")
    x, weight, bias = randn(num_patches, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype), randn(outputs)
    weight, bias = weight / inputs**0.5, bias.to(dtype)
    if not x.is_cuda:
        assert ops.linear_gelu(x, weight, bias) is NotImplemented
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    expected = torch.nn.functional.gelu(expected, approximate="tanh")
    assert_close(linear_gelu(x, weight, bias), expected)


def test_pixels_are_those_of_transformers(make_vision):
    """Of transformers' own processor, with the checkpoint's colors and sizes."""
    llm = make_vision()
    for size in ((61, 43), (8, 300), (500, 400)):
        image = picture(*size)
        ours = image_prompt_reader(llm.input_processor).reader.read(image)
        ours = Reference.pixels(PromptImages([ours], [PAD_ID] * ours.num_tokens, PAD_ID))
        processor = getattr(transformers, "Qwen2VLImageProcessorPil" if V5 else "Qwen2VLImageProcessor")(
            patch_size=4, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3, **PIXELS
        )
        theirs = processor(images=[image], return_tensors="pt")
        assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])
        torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"])


def test_files_of_image_processors(checkpoint, tmp_path):
    """The files of transformers 4 and 5, with every entry that changes the tower's inputs."""
    kind = getattr(transformers, "Qwen2VLImageProcessorPil" if V5 else "Qwen2VLImageProcessor")
    image = picture(61, 43)
    (tmp_path / "config.json").write_text(Path(checkpoint("qwen3_vl")[0], "config.json").read_text())
    old, new = tmp_path / "preprocessor_config.json", tmp_path / "processor_config.json"

    def read():
        vision = ModelConfig.read(tmp_path).vision
        reader = ImageReader(SimpleNamespace(model_config=SimpleNamespace(vision=vision)))
        patches = VisionTower._patches(VisionTower(vision), tensor_of(reader.read(image))[None])
        return patches.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)

    def expected():
        return kind.from_pretrained(tmp_path)(images=[image], return_tensors="pt")["pixel_values"]

    published = read()
    sizes = dict(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})
    for entries in (
        sizes,
        sizes | dict(image_mean=[0.1, 0.2, 0.3], image_std=[0.2, 0.3, 0.4], min_pixels=2000, max_pixels=3000),
        sizes | dict(resample=2, rescale_factor=0.01, image_mean=[0.0] * 3),
        sizes | dict(do_normalize=False, resample=0),
        sizes | dict(do_rescale=False, image_mean=[100.0] * 3, image_std=[50.0] * 3),
        {"patch_size": 4},
    ):
        old.write_text(json.dumps(entries))
        found = read()
        torch.testing.assert_close(found, expected(), rtol=1e-5, atol=1e-5)
        assert found.shape != published.shape or not torch.equal(found, published)
    if V5:  # earlier versions do not read the file
        new.write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
        torch.testing.assert_close(read(), expected(), rtol=1e-5, atol=1e-5)  # from the other file
        new.write_text(json.dumps({"image_processor": sizes | {"image_mean": [0.3] * 3}}))
        assert read().shape != found.shape
        torch.testing.assert_close(read(), expected(), rtol=1e-5, atol=1e-5)
    for file, wrap in ((old, lambda entries: entries), (new, lambda entries: {"image_processor": entries})):
        new.unlink(missing_ok=True)
        for name, value, bound in [
            ("do_resize", False, "must be one of True"),
            ("patch_size", 8, "must be one of 4"),
            ("merge_size", 4, "must be one of 2"),
            ("temporal_patch_size", 1, "must be one of 2"),
            ("resample", 9, "must be at most 5"),
            ("rescale_factor", 0.0, "must be at least 1e-06"),
            ("do_normalize", "no", "must be True or False"),
            ("size", 5, "must be an object"),
            ("image_mean", 0.5, "must be a list of 3 numbers"),
        ]:
            file.write_text(json.dumps(wrap({name: value})))
            match = f"{file.name}: (image_processor: )?{name}={value!r}: {bound}"
            with pytest.raises((TypeError, ValueError), match=match):
                ModelConfig.read(tmp_path)
    new.write_text(json.dumps({"image_processor": 5}))
    with pytest.raises(TypeError, match="processor_config.json: image_processor=5: must be an object"):
        ModelConfig.read(tmp_path)


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, schedule",
    [
        *((name, schedule) for name in DENSE for schedule in SCHEDULES),
        *((name, "chunks") for name in CASES if name not in DENSE),
    ],
)
def test_same_as_transformers(make_vision, checkpoint, name, schedule):
    llm = make_vision(name, **SCHEDULES[schedule])
    requests = make_requests(18)[:4] if schedule == "preemptions" else make_requests()
    if schedule == "one at a time":
        requests = requests[::2]
    elif name not in DENSE:
        requests = requests[:6]
    prompts, params = map(list, zip(*requests))
    reference = Reference(checkpoint(name)[1], llm)
    reference.check(prompts, llm.generate(prompts, params, use_tqdm=False))
    num_preemptions = llm.scheduler.num_preemptions
    outputs = generate_by_steps(llm, requests)
    reference.check(prompts, outputs)
    hits = [output.num_cached_tokens for output in outputs]
    assert any(hits) == (schedule != "without prefix cache") or schedule in ("preemptions", "one at a time")
    assert len({token_id for output in outputs for token_id in output.outputs[0].token_ids}) > 12
    if schedule == "preemptions":
        assert 0 < num_preemptions < llm.scheduler.num_preemptions


def test_prefix_hits(make_vision, checkpoint):
    """Of the same image, in full blocks; of another image, only before its first token."""
    llm = make_vision()
    reference = Reference(checkpoint("qwen3_vl")[1], llm)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
    prompt = with_images(random.Random(2), picture(61, 43), before=40, after=30)
    same = {**prompt, "multi_modal_data": {"image": picture(61, 43)}}
    other = {**prompt, "multi_modal_data": {"image": picture(61, 43, 1)}}
    turned = {**prompt, "multi_modal_data": {"image": picture(43, 61, 1)}}
    outputs = [llm.generate(x, params, use_tqdm=False)[0] for x in (prompt, same, other, turned)]
    reference.check([prompt, same, other, turned], outputs)
    whole = (len(outputs[0].prompt_token_ids) - 1) // 16 * 16
    assert [output.num_cached_tokens for output in outputs] == [0, whole, 32, 32]
    assert outputs[0].outputs[0].cumulative_logprob != outputs[2].outputs[0].cumulative_logprob
    # a later turn of the conversation finds the image in the cache, and runs as text does
    turn = {**prompt, "prompt_token_ids": outputs[0].prompt_token_ids + outputs[0].outputs[0].token_ids + [9] * 20}
    turn["multi_modal_data"] = llm.input_processor.tokenize(prompt)[2]
    (later,) = llm.generate(turn, params, use_tqdm=False)
    assert later.num_cached_tokens >= whole and not llm.core.model_runner._has_images
    reference.check([turn], [later])
    # and a turn with a further image, behind blocks with the first
    ids = [*later.prompt_token_ids, *later.outputs[0].token_ids, FIRST_ID]
    first, second = turn["multi_modal_data"].images[0], llm.input_processor.tokenize(other)[2].images[0]
    ids += [*[PAD_ID] * second.num_tokens, FIRST_ID + 1, 7, 8]
    further = {"prompt_token_ids": ids, "multi_modal_data": PromptImages([first, second], ids, PAD_ID)}
    outputs += llm.generate(further, params, use_tqdm=False)
    assert outputs[-1].num_cached_tokens >= len(later.prompt_token_ids) // 16 * 16
    reference.check([further], outputs[-1:])
    llm.reset_prefix_cache()
    assert llm.core.model_runner.images.num_tokens == 0
    (again,) = llm.generate(same, params, use_tqdm=False)
    assert again.num_cached_tokens == 0 and again.outputs[0].token_ids == outputs[0].outputs[0].token_ids


@pytest.mark.parametrize("name", DENSE)
def test_blocks_in_host_memory(make_vision, checkpoint, name):
    """Blocks and states that left the device and came back still belong to their image."""
    llm = make_vision(name, swap_space=0.01, num_kvcache_blocks=24, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
    prompts = [with_images(random.Random(2), picture(90, 60, seed), before=40, after=30) for seed in range(4)]
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts * 2]
    Reference(checkpoint(name)[1], llm).check(prompts * 2, outputs)
    assert llm.stats()["tiers"]["loaded_blocks"] and outputs[-1].num_cached_tokens > 96


def test_each_image_is_computed_once(make_vision, monkeypatch):
    """Although chunks cut it, prompts share it, and a sequence is preempted; unless there are too many."""
    added = []
    add = ImageStore.add
    monkeypatch.setattr(
        ImageStore,
        "add",
        lambda self, images, *rest: added.extend(x.digest for x in images) or add(self, images, *rest),
    )
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    prompts = [with_images(random.Random(i), picture(90, 60, i % 2)) for i in range(6)]
    llm = make_vision(max_num_batched_tokens=200, max_num_mixed_tokens=20, num_kvcache_blocks=24)
    size = llm.input_processor.tokenize(prompts[0])[2].images[0].num_tokens
    assert 64 < size < 100
    llm.generate(prompts, params, use_tqdm=False)
    assert len(added) == len({*added}) == 2 and llm.scheduler.num_preemptions
    assert llm.core.model_runner.images.num_tokens == 2 * size
    params = replace(params, max_tokens=5)
    llm = make_vision(max_num_batched_tokens=100)  # the embeddings of one image
    llm.generate(prompts, params, use_tqdm=False)
    assert llm.core.model_runner.images.num_tokens == size
    llm.generate(with_images(random.Random(0), picture(90, 60, 2), picture(90, 60, 3)), params, use_tqdm=False)
    assert llm.core.model_runner.images.num_tokens == size, "a step with parts of two images was followed by others"


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_images_that_are_encoded_together(make_vision, checkpoint, monkeypatch, batch_invariant):
    """Up to a number of patches. The embeddings of an image do not keep the memory of the others."""
    groups, add = [], ImageStore.add

    def counted(self, images, *rest):
        groups.append([(image.rows, image.columns) for image in images])
        add(self, images, *rest)

    monkeypatch.setattr(ImageStore, "add", counted)
    monkeypatch.setattr("nanovllm.vision.vision_runner.MAX_PATCHES", 200)
    llm = make_vision(batch_invariant=batch_invariant)
    sizes = (32, 40), (40, 32), (32, 40), (32, 40), (80, 80)
    prompt = with_images(random.Random(0), *(picture(*size, seed) for seed, size in enumerate(sizes)))
    outputs = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, logprobs=0), use_tqdm=False)
    Reference(checkpoint("qwen3_vl")[1], llm).check([prompt], outputs)
    sizes = [(4, 5), (5, 4), (5, 4), (5, 4), (10, 10)]
    assert groups == ([[size] for size in sizes] if batch_invariant else [sizes[:2], sizes[2:4], sizes[4:]])
    for embeddings in llm.core.model_runner.images._embeddings.values():
        assert embeddings.untyped_storage().nbytes() == embeddings.nbytes


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_memory_for_images(make_vision, monkeypatch, batch_invariant):
    """It is measured with as many patches as are ever encoded together, and with images of several sizes."""
    assert largest_pack(12, 40) == [(4, 3)] * 3 + [(1, 4)]
    assert largest_pack(10, 20) == [(3, 3)] * 2 + [(1, 2)]
    assert largest_pack(20, 40) == [(5, 4), (1, 20)]
    assert largest_pack(30, 40) == [(6, 5), (1, 10)]
    assert largest_pack(64, 40) == largest_pack(64, 0) == [(8, 8)]
    packs, add = [], ImageStore.add
    monkeypatch.setattr(ImageStore, "add", lambda self, images: packs.append(images) or add(self, images))
    for name in ("memory_allocated", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr("nanovllm.vision.vision_runner.MAX_PATCHES", 1200)
    runner = make_vision(batch_invariant=batch_invariant).core.model_runner
    # 256 tokens of the largest image, and the stored ones; three levels of 64 numbers in float32
    embeddings = (256 + runner.config.max_num_batched_tokens) * 3 * 64 * 4
    begun = 256 * 3 * 64 * 4 + 4 * 256 * 3 * 32 * 4  # three levels, and three tensors of patches with 32 numbers
    assert runner._bytes_of_images() == embeddings + begun
    assert [[image.num_tokens for image in pack] for pack in packs] == [[256] if batch_invariant else [44, 256]]
    assert runner.images.num_tokens == 0


def test_which_images_are_kept():
    """The next chunk may begin inside the last image, also if the last image is smaller or larger than others."""

    def tower(groups: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([group.flatten(0, 2)[::64, :1].float()[None] for group in groups], 1)

    def image(num_tokens: int, i: int) -> PromptImage:
        return PromptImage(bytes([i]) * (num_tokens * 3 * 64), 1, num_tokens, bytes([i]) * 16)

    tower.config = SimpleNamespace(merge_size=2, patch_size=4)
    store = ImageStore(tower, 10, torch.device("cpu"))
    large, small, huge = image(8, 0), image(5, 1), image(30, 2)
    for images, kept in [
        ([large, small], {large, small}),
        ([], {small}),
        ([huge], {huge}),
        ([], {huge}),
        ([small], {small}),
        ([small, large], {small, large}),
        ([], {large}),
        ([small, small, huge, large], {small, huge, large}),
        ([small], {small, large}),  # the last of the previous step stays
        ([small], {small}),
    ]:
        store.require(images)
        assert {*store._embeddings} == {image.digest for image in kept}
        for image in kept:
            assert store[image.digest].eq(image.digest[0]).all() and store[image.digest].shape[1] == image.num_tokens


@pytest.mark.parametrize("name", DENSE)
def test_images_count_in_the_budget(make_vision, checkpoint, monkeypatch, name):
    """A mixed step exceeds the budget by at most one block of the tower. What fits is computed in one step."""
    llm, steps = make_vision(name, max_num_batched_tokens=700, max_num_mixed_tokens=90), []
    scheduler, config = llm.scheduler, llm.config.model_config
    assert 10 < cost_of_image(20, config) < 90 and cost_of_image(80, config) > 4 * cost_of_image(20, config)
    plain, store = scheduler.schedule, llm.core.model_runner.images

    def schedule(**options):
        in_parts = []
        monkeypatch.setattr(store, "advance", lambda *arguments: in_parts.append(arguments) or advance(*arguments))
        if (step := plain(**options)) is not None:
            images = [x.image for row in step.chunks for x in images_in(*row) if store.part_left(x.image)]
            steps.append((step.num_decodes, sum(end - start for _, start, end in step.chunks), images, in_parts))
        return step

    advance = store.advance
    monkeypatch.setattr(scheduler, "schedule", schedule)
    rng, params = random.Random(0), SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, logprobs=0)
    prompts = [
        with_images(rng, picture(40, 30, seed), picture(80, 63, seed + 1), before=20, between=30, after=20)
        for seed in range(0, 8, 2)
    ]
    requests = [(prompt, replace(params, max_tokens=2)) for prompt in prompts]
    llm.generate(*requests[3], use_tqdm=False)
    assert [len(images) for _, _, images, _ in steps if images] == [2], "all of the prompt fits"
    steps.clear()
    llm.add_request([5, 6, 7], params)
    llm.step()
    Reference(checkpoint(name)[1], llm).check(prompts, generate_by_steps(llm, requests))
    block = cost_of_image(80, config) / store.num_blocks
    num_blocks = 0
    for num_decodes, num_tokens, images, in_parts in steps:
        costs = [cost_of_image(image.num_tokens, config) for image in images]
        costs += [n * cost_of_image(image.num_tokens, config) / store.num_blocks for image, n in in_parts]
        assert not num_decodes or num_tokens + sum(costs) <= 90 + block
        assert num_tokens + sum(costs) <= 90 or max((n for _, n in in_parts), default=0) <= 1
        num_blocks += sum(n for _, n in in_parts)
    assert num_blocks >= 3 * store.num_blocks


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_images_in_parts(make_vision, checkpoint, monkeypatch, num_ranks):
    """While an image is begun, its request is aborted, another one begins, or the weights change."""
    llm = make_vision(max_num_mixed_tokens=40, tensor_parallel_size=num_ranks, enable_prefix_caching=False)
    store, rng, params = llm.core.model_runner.images, random.Random(0), SamplingParams(temperature=0, max_tokens=60)
    params = replace(params, ignore_eos=True, logprobs=0)
    first, second = (with_images(rng, picture(88, 64, seed)) for seed in range(2))

    def begin(prompt):
        request_id = llm.add_request(prompt, replace(params, max_tokens=3))
        while not 0 < min(map(store.part_left, prompt_images(request_id)), default=0) < 1:
            llm.step()
        return request_id

    def prompt_images(request_id):
        return [x.image for seq in scheduler.live.get(request_id, {}).values() for x in images_of(seq).placed]

    scheduler, outputs, encoded = llm.scheduler, {}, []
    in_parts = VisionTower.in_parts
    monkeypatch.setattr(VisionTower, "in_parts", lambda *arguments: encoded.append(1) or in_parts(*arguments))
    llm.add_request([5, 6, 7], params)
    llm.step()
    llm.abort(begin(first))
    llm.step()
    llm.step()
    assert not store._begun, "it takes memory"
    kept = begin(second)
    assert len(store._begun) == 1
    llm.engine_thread.call(store.clear)
    assert not store._begun
    again = llm.add_request(first, replace(params, max_tokens=3))
    while not llm.is_finished():
        outputs |= {output.request_id: output for output in llm.step().finished}
    assert not store._begun and len(encoded) == 4, "two images, of which each was forgotten once"
    Reference(checkpoint("qwen3_vl")[1], llm).check([second, first], [outputs[kept], outputs[again]])


def test_an_error_while_an_image_is_begun(make_vision, monkeypatch):
    llm = make_vision(max_num_mixed_tokens=40)
    scheduler, store = llm.scheduler, llm.core.model_runner.images
    llm.add_request([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
    llm.step()
    llm.add_request(with_images(random.Random(0), picture(88, 64)), SamplingParams(max_tokens=3))
    while not store._begun:
        llm.step()
    budget = scheduler.mixed_budget
    monkeypatch.setattr(Scheduler, "chunk_end", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="a step has failed"):
        while True:
            llm.add_request([5, 6, 7], SamplingParams(max_tokens=1))
            llm.step()
    assert scheduler.mixed_budget == budget and scheduler._left_out is None


def test_pixels_are_freed(make_vision):
    llm = make_vision()
    (output,) = llm.generate({"prompt": "a", "multi_modal_data": {"image": []}}, SamplingParams(max_tokens=1))
    assert len(output.outputs[0].token_ids) == 1
    requests = llm.input_processor.requests(
        with_images(random.Random(0), picture(9, 9)), SamplingParams(max_tokens=2), None
    )
    llm._run(requests, use_tqdm=False)
    assert requests[0].group[0].feature_state == {"vision": None}


@pytest.mark.parametrize("name", DENSE)
def test_beams(make_vision, checkpoint, name):
    """Those of transformers. Forks keep the image, and beams differ with it."""
    llm, params = make_vision(name), BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    prompts = [with_images(random.Random(0), picture(50, 30, seed), picture(24, 40, 2)) for seed in (0, 1)]
    found, reference = llm.beam_search(prompts, params), Reference(checkpoint(name)[1], llm)
    small = make_vision(name, max_num_seqs=1, max_num_batched_tokens=20)
    for output, alone in zip(found, [small.beam_search(prompt, params)[0] for prompt in prompts]):
        assert [beam.token_ids for beam in output.outputs] == [beam.token_ids for beam in alone.outputs]
    for prompt, output in zip(prompts, found):
        _, token_ids, images = llm.input_processor.tokenize(prompt)
        expected = reference.beams(token_ids, images, params)
        assert [beam.token_ids for beam in output.outputs] == [ids for ids, _ in expected]
        assert [beam.score for beam in output.outputs] == pytest.approx([x for _, x in expected], abs=1e-4)
    assert found[0].outputs[0].cumulative_logprob != found[1].outputs[0].cumulative_logprob


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts(make_vision, checkpoint, method):
    """Rows of several tokens get the positions behind images."""
    drafting = {"method": method, "num_speculative_tokens": 3} | ({"prompt_lookup_min": 1} if method == "ngram" else {})
    llm = make_vision(DENSE[-1], speculative_config=drafting, **SCHEDULES["chunks"])
    prompts, params = map(list, zip(*make_requests(8)[:5]))
    Reference(checkpoint(DENSE[-1])[1], llm).check(prompts, generate_by_steps(llm, zip(prompts, params)))


@pytest.fixture
def mtp_checkpoint(checkpoint, tmp_path) -> str:
    """The checkpoint of Qwen3.5 with a drafting layer (MTP) of random weights."""
    from safetensors.torch import load_file, save_file

    if "qwen3_5" not in CASES:
        pytest.skip("this version of transformers does not have Qwen3.5")
    folder = Path(shutil.copytree(checkpoint("qwen3_5")[0], tmp_path / "mtp"))
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    own = {"mtp.fc.weight": draw(64, 128) / 8}
    own |= {f"mtp.{name}.weight": 0.3 * draw(64) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    layer = "model.language_model.layers.1."
    for name, x in tensors.items():
        if name.startswith(layer):
            own[name.replace(layer, "mtp.layers.0.")] = draw(*x.shape) * (x.shape[-1] ** -0.5 if x.dim() > 1 else 0.3)
    save_file(tensors | own, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("schedule", ["chunks", "preemptions"])
def test_drafts_of_mtp(make_llm, mtp_checkpoint, checkpoint, monkeypatch, schedule):
    """Right drafts, several in a row behind images, and wrong ones between them; the steps are queued ahead."""
    from test_heads import draft_known

    from nanovllm.spec_decode import drafting_scheduler

    monkeypatch.setattr(drafting_scheduler, "LIMIT", 100.0)  # otherwise, wrong drafts would soon end the drafting
    requests = make_requests(16)[:4]
    prompts, params = map(list, zip(*requests))
    settings = SETTINGS | SCHEDULES[schedule] | dict(async_scheduling=True)
    llm = poison(make_llm(checkpoint("qwen3_5")[0], **SETTINGS))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = [(*x.prompt_token_ids, *answer.token_ids) for x in outputs for answer in x.outputs]
    drafting = {"method": "mtp", "num_speculative_tokens": 3}
    for fraction in 1.0, 0.7:
        draft_known(monkeypatch, texts, 2000, fraction)
        llm = poison(make_llm(mtp_checkpoint, **settings, speculative_config=drafting))
        found = generate_by_steps(llm, requests)
        Reference(checkpoint("qwen3_5")[1], llm).check(prompts, found)
        assert [[x.token_ids for x in y.outputs] for y in found] == [[x.token_ids for x in y.outputs] for y in outputs]
        stats = llm.stats()
        num_drafted, num_accepted = (stats["spec_decode"][f"{x}_tokens"] for x in ("draft", "accepted"))
        assert num_accepted == num_drafted if fraction == 1 else 0 < num_accepted < num_drafted
        assert stats["spec_decode"]["accepted_per_position"][2] > 3, "few were accepted in a row"
        assert stats["preemptions"] > 0 or schedule != "preemptions"


@pytest.mark.parametrize("start, end", [(0, 26), (3, 24), (20, 26), (21, 22), (23, 26)])
def test_positions_of_generated_tokens(start, end):
    """They are those of a prompt that goes on. After a preemption, a chunk contains both kinds of tokens."""
    image = SimpleNamespace(rows=2, columns=5, num_tokens=10)
    token_ids = [7, 7, *[PAD_ID] * 10, *[7] * 9]
    images = PromptImages([image], token_ids, PAD_ID)
    longer = PromptImages([image], [*token_ids, *[7] * 5], PAD_ID)
    assert images.num_prompt_tokens == 21
    assert images.positions(start, end).tolist() == longer.positions(start, end).tolist()


@pytest.mark.parametrize("name", DENSE)
def test_batch_invariance(make_vision, name):
    """An image is computed alone, so no bit of an answer depends on the batch."""
    prompts, params = map(list, zip(*make_requests()[:3]))
    llm = make_vision(name, batch_invariant=True)
    expected = [llm.generate(*request, use_tqdm=False)[0].outputs for request in zip(prompts, params)]
    llm = make_vision(name, batch_invariant=True, **SCHEDULES["chunks"])
    for output, answers in zip(generate_by_steps(llm, zip(prompts, params)), expected, strict=True):
        assert [x.token_ids for x in output.outputs] == [x.token_ids for x in answers]
        assert [x.cumulative_logprob for x in output.outputs] == [x.cumulative_logprob for x in answers]


@pytest.mark.parametrize("name", [*CASES][:1] + [*CASES][3:])
def test_formats_of_weights(make_vision, name):
    """The tower keeps its dtype when linear layers are quantized, and its embeddings do not change."""
    digest, embeddings = [], []
    for settings in ({}, {"quantization": "fp8"}):
        llm = make_vision(name, **settings)
        prompt = with_images(random.Random(0), picture(61, 43))
        llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
        digest = llm.input_processor.tokenize(prompt)[2].images[0].digest
        embeddings.append(llm.core.model_runner.images[digest])
    assert torch.equal(*embeddings)


@pytest.mark.parametrize("name", DENSE)
def test_fp8(make_vision, checkpoint, monkeypatch, tmp_path, name):
    """As transformers computes with the dequantized weights of the text model."""
    from test_quantization import write_quantized

    ends = ("_proj.weight", "_qkv.weight", "_proj_z.weight", "_proj_a.weight", "_proj_b.weight")
    is_linear = lambda name: name.endswith(ends) and ".visual." not in name
    monkeypatch.setattr("test_quantization.is_linear", is_linear)
    folder, model = checkpoint(name)
    _, plain = write_quantized(folder, tmp_path, "ct-channel", margin=1.0)
    llm = make_vision(name, quantization="fp8", **SCHEDULES["chunks"])
    prompts, params = map(list, zip(*make_requests()[:5]))
    outputs = generate_by_steps(llm, zip(prompts, params))
    Reference(type(model).from_pretrained(plain, dtype=torch.float32).eval(), llm).check(prompts, outputs)
    with pytest.raises(AssertionError):
        Reference(model, llm).check(prompts, outputs)  # quantizing changes the answers


def test_structured_outputs(make_vision, checkpoint):
    """With other features of a request: a grammar, a bias, a stop string and log-probabilities."""
    pytest.importorskip("llguidance")
    llm = make_vision(**SCHEDULES["chunks"])
    prompt, grammar = in_openai_form(picture(50, 30)), {"regex": "[0-9]{4} cats"}
    params = SamplingParams(temperature=0.5, seed=0, max_tokens=20, structured_outputs=grammar, logprobs=0)
    outputs = llm.chat(prompt, params, use_tqdm=False)
    assert outputs[0].outputs[0].text[4:] == " cats"
    Reference(checkpoint("qwen3_vl")[1], llm).check([prompt], outputs)
    params = SamplingParams(temperature=0.5, seed=0, max_tokens=40, stop=["e"], presence_penalty=0.5, logprobs=1)
    output = llm.chat(prompt, params, use_tqdm=False)[0].outputs[0]
    assert len(output.logprobs) == len(output.token_ids)


def test_new_weights(make_vision, checkpoint):
    """New weights of the tower change an image that was computed before."""
    llm, (_, model) = make_vision(), checkpoint("qwen3_vl")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
    prompt = with_images(random.Random(2), picture(61, 43), before=40, after=30)
    before, changed = llm.generate(prompt, params, use_tqdm=False), deepcopy(model)
    for parameter in changed.model.visual.parameters():
        parameter.mul_(1.2)
    llm.load_weights((f"model.visual.{name}", x) for name, x in changed.model.visual.named_parameters())
    after = llm.generate(prompt, params, use_tqdm=False)
    Reference(changed, llm).check([prompt], after)
    assert before[0].outputs[0].cumulative_logprob != after[0].outputs[0].cumulative_logprob


def test_adapters(make_vision, tmp_path):
    """An adapter of the text model; its prompts with images share no blocks with others."""
    from safetensors.torch import save_file

    llm = make_vision(enable_lora=True, max_lora_rank=4)
    name, (inputs, outputs) = next(iter(llm.core.model_runner.model.adapters.shapes.items()))
    assert not any("visual" in name for name in llm.core.model_runner.model.adapters.shapes)
    sizes = {"A": (4, inputs), "B": (outputs, 4)}
    tensors = {f"base_model.model.{name}.lora_{x}.weight": torch.randn(size) for x, size in sizes.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": name.replace(".", "[.]")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    prompt = with_images(random.Random(2), picture(61, 43), before=40)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
    adapters = None, LoRARequest("a", 1, str(tmp_path)), None
    plain, adapted, again = (llm.generate(prompt, params, use_tqdm=False, lora_request=x)[0] for x in adapters)
    assert plain.outputs[0].cumulative_logprob != adapted.outputs[0].cumulative_logprob
    assert adapted.num_cached_tokens == 0 < again.num_cached_tokens


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", DENSE)
def test_two_ranks(make_vision, checkpoint, name):
    llm = make_vision(name, tensor_parallel_size=2, **SCHEDULES["chunks"])
    prompts, params = map(list, zip(*make_requests()[:4]))
    Reference(checkpoint(name)[1], llm).check(prompts, generate_by_steps(llm, zip(prompts, params)))


@pytest.mark.usefixtures("forked_ranks")
def test_many_images_on_two_ranks(make_vision, checkpoint):
    """Messages to the other rank have a header of constant size, however many images are encoded together."""
    llm = make_vision(tensor_parallel_size=2)
    prompt = with_images(random.Random(0), *(picture(8 + 8 * (i % 3), 8, i) for i in range(80)), between=0)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
    Reference(checkpoint("qwen3_vl")[1], llm).check([prompt], llm.generate(prompt, params, use_tqdm=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # in a tile of no queries
def test_graphs_with_images(use_ops, make_vision, checkpoint, monkeypatch, name):
    """Padded steps whose positions and embeddings are in fixed tensors, next to decodes and to texts."""
    pytest.importorskip("triton")
    from test_cuda_graph import capture, cuda_graph, graph_shapes, make_buffers

    from nanovllm.vision.vision_graphs import VisionGraphsRunner

    use_ops("norm_rope_and_store", "place_decodes", "accept")
    monkeypatch.setattr(cuda_graph, "TOKEN_SIZES", (8, 32))
    monkeypatch.setattr(cuda_graph, "capture", capture)
    settings = dict(max_num_batched_tokens=32, max_num_mixed_tokens=32, max_num_seqs=3, async_scheduling=True)
    llm = make_vision(name, attention_backend="triton", **settings)
    runner: Any = llm.core.model_runner
    runs_as_on_cuda(runner)
    runner.__class__ = subclass(VisionGraphsRunner, type(runner), "Vision")
    runner.buffers = make_buffers(llm.config, torch.device("cpu"))
    sizes, parts = (3, runner.buffers.device, runner.pad_req_index), (runner.run_batch, runner.sample_and_accept)
    with torch.inference_mode():
        runner.graphs = cuda_graph.DecodeGraphs(llm.config, runner.buffers.device, runner.forward, pool=None)
        shapes = graph_shapes(llm.config, runner.backend)
        runner.mixed_graphs = cuda_graph.MixedGraphs(shapes, *sizes, *parts, pool=None)
        runner.capture_images(runner.mixed_graphs, runner.buffers.device)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    rng = random.Random(0)
    images = [picture(32, 24, 0), picture(24, 40, 1)], [], [picture(32, 24, 2)], [picture(48, 16, 3)]
    prompts = [with_images(rng, *own) if own else [7, 8, 9, *range(20, 50)] for own in images]
    outputs = generate_by_steps(llm, [(prompt, params) for prompt in prompts])
    Reference(checkpoint(name)[1], llm).check(prompts, outputs)
    for graphs in runner.image_graphs, runner.mixed_graphs:
        assert sum(graph.num_replays for graph in graphs.models.values()) > 1
    with_decodes = [shape for shape in shapes if shape.num_decode_rows]
    assert any(runner.image_graphs.models[shape.graph_shape].num_replays for shape in with_decodes)


@pytest.mark.parametrize("num_layers", [2, 3])
def test_steps_without_graphs(make_vision, checkpoint, monkeypatch, num_layers):
    """The last layer computes only sampled tokens, unless embeddings of images are added to its outputs."""
    family, text, vision = CASES["qwen3_vl"]
    monkeypatch.setitem(
        CASES, name := f"layers_{num_layers}", (family, text | {"num_hidden_layers": num_layers}, vision)
    )
    requests = [(prompt, SamplingParams(temperature=0, max_tokens=3)) for prompt, _ in make_requests()[:4]]
    expected = generate_by_steps(make_vision(name), requests)
    llm, selected, fused = make_vision(name, async_scheduling=True), [], FusedDecoderLayer.fused
    runner: Any = llm.core.model_runner
    runs_as_on_cuda(runner)
    runner.__class__ = subclass(VisionRunner, type(runner), "Vision")
    runner.buffers = make_buffers(llm.config, torch.device("cpu"))
    fuse(runner.model)

    def record(self, x, residual, rope, rows=None):
        selected.append(rows is not None)
        return fused(self, x, residual, rope, rows)

    monkeypatch.setattr(FusedDecoderLayer, "fused", record)
    assert [x.outputs for x in generate_by_steps(llm, requests)] == [x.outputs for x in expected]
    assert any(selected) == (num_layers > 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("has_kernels", [False, True])
def test_fused_layers(use_ops, make_vision, checkpoint, name, has_kernels):
    """Hooks on embeddings and layers, and rotations by three positions, also where neighbours are fused."""
    pytest.importorskip("triton")
    use_ops(table=None if has_kernels else {})
    requests = make_requests()[:5]
    if has_kernels:  # they are slow
        few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0)
        requests = [(with_images(random.Random(0), picture(30, 20)), few), (requests[1][0][:20], few)]
    llm = make_vision(name, attention_backend="triton" if has_kernels else "sdpa", **SCHEDULES["chunks"])
    assert type(llm.core.model_runner.model.model.language_model.layers[1].self_attn.rotary_emb).__name__ == (
        "FusedMRotaryEmbedding"
    )
    Reference(checkpoint(name)[1], llm).check([x for x, _ in requests], generate_by_steps(llm, requests))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs graphs as Python code")
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_graphs(make_vision, checkpoint, use_ops, monkeypatch, name):
    """Steps without images are padded for CUDA graphs, also with decodes behind images; steps with images are not."""
    pytest.importorskip("triton")
    tests = pytest.importorskip("test_cuda_graph")
    monkeypatch.setattr(tests.cuda_graph, "TOKEN_SIZES", (4, 12))
    monkeypatch.setattr(tests.cuda_graph, "capture", tests.capture)
    # keys that several programs read are in test_cuda_graph.py
    monkeypatch.setattr("nanovllm.kernels.attention.decode_attention.choose_num_splits", lambda *arguments: 1)
    runs_as_on_cuda = tests.runs_as_on_cuda

    def takes_images_as_on_cuda(runner) -> None:
        runs_as_on_cuda(runner)
        replace_methods(runner, VisionRunner, "Vision")

    monkeypatch.setattr(tests, "runs_as_on_cuda", takes_images_as_on_cuda)
    use_ops("norm_rope_and_store", "place_decodes", "accept", "delta_net_drafts")
    settings = dict(max_num_batched_tokens=24, max_num_mixed_tokens=12, max_num_seqs=4)
    settings |= dict(async_scheduling=True, attention_backend="triton")
    llm, rng = make_vision(name, **settings, max_model_len=160), random.Random(0)
    decode_graphs, graphs = tests.use_graphs(llm)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=5, ignore_eos=True, logprobs=0, detokenize=False)
    params = replace(params, logit_bias={PAD_ID: -100, PAD_ID + 1: -100})
    prompts = [
        with_images(rng, picture(20, 30)),
        [7] * 12,
        with_images(rng, picture(9, 40), after=9),
        [8] * 9,
        [9] * 20,
    ]
    outputs = generate_by_steps(llm, [(prompt, params) for prompt in prompts])
    Reference(checkpoint(name)[1], llm).check(prompts, outputs)
    for used in (decode_graphs.graphs, graphs.models):
        assert any(graph.num_replays for graph in used.values())


def test_text_only(make_vision, make_llm, checkpoint):
    """Without a tower, the same tokens for texts; images are refused."""
    folder, reference = checkpoint("qwen3_vl")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    prompt = [*range(20, 60)]
    for settings in (dict(language_model_only=True), dict(limit_mm_per_prompt={"image": 0})):
        llm = make_llm(folder, **SETTINGS | settings)
        assert not any("visual" in name for name, _ in llm.core.model_runner.model.named_parameters())
        Reference(reference, llm).check([prompt], llm.generate([prompt], params, use_tqdm=False))
        with pytest.raises(ValueError, match="multi_modal_data: must be left out, because this engine takes no images"):
            llm.generate(with_images(random.Random(0), picture(9, 9)), params)


# -- what callers may send ---------------------------------------------------------------------------------------------


def as_bytes(image, kind: str = "PNG", **options) -> bytes:
    image.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


def data_url(image, kind: str = "PNG") -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(as_bytes(image, kind)).decode()}"


def test_forms_of_images(make_vision, tmp_path):
    """All forms of an image make the same prompt, as text, token ids and conversations."""
    llm, image = make_vision(allowed_local_media_path=str(tmp_path)), picture(50, 30)
    (tmp_path / "a picture.png").write_bytes(as_bytes(image))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    text = f"<|im_start|>user\n{START}{PAD}{END}What?<|im_end|>\n<|im_start|>assistant\n"
    sources = image, np.asarray(image), as_bytes(image), str(tmp_path / "a picture.png"), tmp_path / "a picture.png"
    outputs = llm.generate(
        [{"prompt": text, "multi_modal_data": {"image": x}} for x in (*sources, [image], data_url(image))], params
    )
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(image), "detail": "high"}},
        {"type": "image_url", "image_url": data_url(image)},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a%20picture.png"}},
        {"type": "input_image", "image_url": data_url(image)},
        {"type": "image", "image": image},
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": as_bytes(image)},
        {"type": "image", "image": np.asarray(image), "path": None},
        {"type": "image", "image": str(tmp_path / "a picture.png")},
        {"type": "image", "image": tmp_path / "a picture.png"},
        {"type": "image", "image": data_url(image)},
        {"type": "image", "path": str(tmp_path / "a picture.png")},
        {"type": "image", "path": tmp_path / "a picture.png"},
        {"type": "image", "base64": base64.encodebytes(as_bytes(image)).decode()},
        {"type": "image", "base64": data_url(image)},
        {"type": "image", "url": f"file://{tmp_path}/a%20picture.png"},
    ]
    chats = [[{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}] for part in parts]
    outputs += llm.chat(chats, params) + llm.generate(chats, params)
    assert len({(*output.prompt_token_ids, -1, *output.outputs[0].token_ids) for output in outputs}) == 1
    assert outputs[0].prompt_token_ids.count(PAD_ID) > 10
    events = [*llm.stream(chats[0], params)]
    assert [x for event in events for x in event.token_ids] == outputs[0].outputs[0].token_ids


def test_sizes_for_one_image(make_vision, checkpoint, monkeypatch):
    """`detail`, `min_pixels` and `max_pixels` scale an image; what has other pixels shares no block."""
    monkeypatch.setattr(image_sources, "LOW_DETAIL", 1024)
    llm, image = make_vision(), picture(50, 30)
    reference = Reference(checkpoint("qwen3_vl")[1], llm)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0)
    before, url = {"type": "text", "text": "x" * 40}, {"url": data_url(image)}
    sizes = [
        ({"type": "image", "image": image}, 24),
        ({"type": "image_url", "image_url": url | {"detail": "high"}}, 24),
        ({"type": "image_url", "image_url": url | {"detail": "low"}}, 15),
        ({"type": "input_image", "image_url": data_url(image), "detail": "low"}, 15),
        ({"type": "image", "image": image, "detail": "low", "max_pixels": 2**14, "min_pixels": 2**13}, 15),
        ({"type": "image", "image": image, "max_pixels": 640}, 8),
        ({"type": "image", "image": image, "min_pixels": 6400}, 104),
        ({"type": "image", "image": image, "min_pixels": 1, "max_pixels": 1}, 1),  # below the engine's minimum
    ]
    chats = [[{"role": "user", "content": [before, part]}] for part, _ in sizes]
    alone = [llm.chat(chat, params, use_tqdm=False)[0] for chat in chats]
    reference.check(chats, alone)
    assert [output.prompt_token_ids.count(PAD_ID) for output in alone] == [size for _, size in sizes]
    shared = alone[0].prompt_token_ids.index(PAD_ID) // 16 * 16
    hits = [output.num_cached_tokens for output in alone]
    assert shared > 0 and hits[0] == 0 and hits[2] == hits[5] == hits[6] == hits[7] == shared
    assert min(hits[1], hits[3], hits[4]) > shared
    together = llm.chat(chats, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in together] == [output.prompt_token_ids for output in alone]
    prompt = {"prompt": f"a{PAD}", "multi_modal_data": {"image": image}, "mm_processor_kwargs": {"max_pixels": 640}}
    for output in llm.generate([prompt, prompt | {"prompt": "b" + PAD}], params, use_tqdm=False):
        assert output.prompt_token_ids.count(PAD_ID) == 8


@pytest.mark.parametrize(
    "part, kind, match",
    [
        ({"type": "image"}, ValueError, "an image part has no image: must have one of image, path, base64, url"),
        ({"type": "image", "image": b"", "url": "x"}, ValueError, "has image and url: must have one of"),
        ({"type": "image", "image": b"", "resized_height": 9}, TypeError, "entry of an image part 'resized_height'"),
        ({"type": "image_url", "image_url": {"url": "x", "detial": "low"}}, TypeError, "did you mean 'detail'"),
        ({"type": "image_url", "image_url": Path("x")}, TypeError, "messages: image='x': is a path: must be a URL"),
        ({"type": "image_url", "image_url": "/x"}, ValueError, "must be a data:, file:, http: or https: URL"),
        ({"type": "image", "url": "/x"}, ValueError, "must be a data:, file:, http: or https: URL"),
        ({"type": "image", "path": 5}, TypeError, "messages: path=5: must be a string"),
        ({"type": "image", "base64": b"x"}, TypeError, "messages: base64=b'x': must be a string"),
        ({"type": "image", "base64": "%"}, ValueError, "is not valid base64"),
        ({"type": "image", "image": "none.png"}, ValueError, "image='none.png': can't be read .No such file"),
        ({"type": "image", "image": "file:///x"}, ValueError, "files are read only with the setting"),
        ({"type": "image", "image": b"", "detail": 1}, ValueError, "messages: detail=1: must be one of 'auto', 'low'"),
        ({"type": "image", "image": b"", "min_pixels": 0}, ValueError, "messages: min_pixels=0: must be at least 1"),
        (
            {"type": "image", "image": b"", "min_pixels": 9, "max_pixels": 8},
            ValueError,
            "min_pixels=9: must be at most 8",
        ),
        ({"type": "image", "image": b"", "max_pixels": 2**15}, ValueError, "max_pixels=32768: must be at most 16384"),
        (
            {"type": "video", "video": []},
            ValueError,
            "messages: content part of type 'video': videos are not supported",
        ),
        ({"type": "audio", "audio": ""}, ValueError, "messages: content part of type 'audio': audio is not supported"),
        ({"type": "file", "file": ""}, ValueError, "messages: content part .*: must be text"),
    ],
)
def test_wrong_parts(make_vision, part, kind, match):
    llm, chat = make_vision(), [{"role": "user", "content": [part]}]
    for prompts in ([chat], [chat, chat]):
        with pytest.raises(kind, match=match):
            llm.chat(prompts, SamplingParams(max_tokens=1), use_tqdm=False)


def test_images_of_several_prompts(make_vision, monkeypatch, tmp_path):
    """Threads read them at the same time, each image once, in prompts and in conversations."""
    llm, scale, together = make_vision(), ImageReader.scale, Barrier(2, timeout=20)
    picture(70, 50).save(tmp_path / "a.png")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)

    def make_prompts() -> tuple[list, list]:
        sources = Image.open(tmp_path / "a.png"), np.asarray(picture(60, 90))  # the first is not decoded yet
        prompts = [with_images(random.Random(i), sources[i % 2]) for i in range(4)]
        parts = [{"type": "image", "image": source} for source in sources]
        chats = [[{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}] for part in parts]
        return prompts, chats

    def answers_of(prompts: list) -> list:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]

    def wait_and_scale(self, opened, bounds):
        num_read.append(opened)
        together.wait()  # for another thread
        return scale(self, opened, bounds)

    alone = [[answer for prompt in kind for answer in answers_of([prompt])] for kind in make_prompts()]
    monkeypatch.setattr(image_prompts, "available_cores", lambda: 4)
    monkeypatch.setattr(ImageReader, "scale", wait_and_scale)
    for kind, expected in zip(make_prompts(), alone):
        num_read: list = []
        assert answers_of([*kind, {"prompt_token_ids": [5, 6]}])[:-1] == expected and len(num_read) == 2
    monkeypatch.setattr(ImageReader, "scale", scale)
    prompts, _ = make_prompts()
    prompts[1] = with_images(random.Random(1), b"no image")
    with pytest.raises(ValueError, match="multi_modal_data: image: unknown format"):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.is_finished()


def test_vllm_prompts(checkpoint):
    """A program that imports vLLM passes images in the same way."""
    from nanovllm.compat import vllm

    image, text = picture(50, 30), f"{START}{PAD}{END}What?"
    settings = {name: value for name, value in SETTINGS.items() if name != "kvcache_block_size"}
    with vllm.LLM(checkpoint("qwen3_vl")[0], block_size=16, device="cpu", dtype="float32", **settings) as llm:
        params = vllm.SamplingParams(temperature=0, max_tokens=4)
        prompt = {"prompt": text, "multi_modal_data": {"image": image}, "mm_processor_kwargs": None}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        (again,) = llm.generate(prompt, params, tokenization_kwargs={"add_special_tokens": False}, use_tqdm=False)
        assert output.prompt_token_ids == again.prompt_token_ids and output.prompt_token_ids.count(PAD_ID) == 24
        (small,) = llm.generate(prompt | {"mm_processor_kwargs": {"max_pixels": 640}}, params, use_tqdm=False)
        assert small.prompt_token_ids.count(PAD_ID) == 8
        parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "What?"}]
        assert llm.chat([{"role": "user", "content": parts}], params)[0].prompt_token_ids.count(PAD_ID) == 24


def test_modes_of_images(make_vision):
    """Palettes, gray, alpha, 16 bits, CMYK, animation and rotation are read as transformers reads them."""
    from transformers.image_utils import load_image

    reader, image = image_prompt_reader(make_vision().input_processor).reader, picture(40, 30)
    exif = Image.Exif()
    exif[0x112] = 6  # turned by 90 degrees
    files = [as_bytes(image.convert(mode)) for mode in ("P", "L", "RGBA", "LA", "1")]
    files += [as_bytes(image.convert("CMYK"), "JPEG"), as_bytes(image, "JPEG", exif=exif)]
    files += [as_bytes(image.convert("I;16"), "PNG"), as_bytes(image, "WEBP"), as_bytes(image, "TIFF")]
    files.append(as_bytes(image, "GIF", save_all=True, append_images=[picture(40, 30, 1)]))
    for data in files:
        expected = load_image(Image.open(io.BytesIO(data)))
        assert reader.read(data) == reader.read(expected)
    for mode in "RGBA", "LA":  # put on white
        transparent = image.convert(mode)
        transparent.putalpha(Image.linear_gradient("L").resize(image.size))
        on_white = Image.composite(
            image.convert(mode[:-1]).convert("RGB"), Image.new("RGB", image.size, "white"), transparent.getchannel("A")
        )
        pixels = [np.frombuffer(reader.read(x).pixels, np.uint8).astype(int) for x in (as_bytes(transparent), on_white)]
        assert abs(pixels[0] - pixels[1]).max() <= 1
        assert reader.read(transparent) == reader.read(as_bytes(transparent)) != reader.read(image.convert(mode))
    assert reader.read(files[6])[1:3] == reader.read(image)[2:0:-1], "rows and columns change places"
    closed = Image.open(io.BytesIO(files[9]))
    closed.close()
    with pytest.raises(ValueError, match="image: can't be read .Operation on closed image"):
        reader.read(closed)


def test_an_image_is_decoded_once(make_vision):
    """Several threads read a PIL image that is not decoded yet."""
    reader, data, begun = image_prompt_reader(make_vision().input_processor).reader, as_bytes(picture(40, 30)), []
    image, is_decoded = Image.open(io.BytesIO(data)), Event()
    load = image.load

    def slow_load():
        if not is_decoded.is_set():
            begun.append(sleep(0.01))
            load()
            is_decoded.set()

    image.load = slow_load
    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(reader.read, 4 * [image])} == {reader.read(data)}
    assert len(begun) == 1


def test_large_images_are_decoded_one_after_another(make_vision, monkeypatch):
    """Smaller ones need not wait for them, and an error reaches the caller."""
    reader, large, small = image_prompt_reader(make_vision().input_processor).reader, picture(50, 40), picture(20, 20)
    expected, threads, in_rgb = reader.read(large), {}, ImageReader._in_rgb
    small_are_decoded, small_images = Event(), Barrier(2, timeout=20)

    def decode(self, image):
        now = threads.setdefault(current_thread().name, [])
        now.append(image.size)
        if image.size == small.size:
            small_images.wait()
            small_are_decoded.set()
        else:
            assert small_are_decoded.wait(20) and len([*threads]) == 3
        return in_rgb(self, image)

    monkeypatch.setattr("nanovllm.vision.image_reader.LARGE_PIXELS", 50 * 40 - 1)
    monkeypatch.setattr(ImageReader, "_in_rgb", decode)
    with ThreadPoolExecutor(5, thread_name_prefix="pool") as pool:
        futures = [pool.submit(reader.read, x) for x in (large, large, large, small, small)]
        assert [future.result() for future in futures[:3]] == [expected] * 3
        assert futures[3].result() == futures[4].result()
    assert threads.pop("nanovllm-large-image_0") == [large.size] * 3
    assert [*threads.values()] == [[small.size]] * 2
    with pytest.raises(ValueError, match="image: has 9 x 3000 pixels: absolute aspect ratio must be smaller than 200"):
        reader.read(picture(9, 3000))


def test_terminal(make_vision, checkpoint, tmp_path, capsys):
    """`/image FILE` sends an image with the next message, and with that message only."""
    from nanovllm.serve.terminal.conversation import Conversation
    from nanovllm.serve.terminal.sources import LocalModel

    llm, image = make_vision(), picture(50, 30)
    (tmp_path / "a.png").write_bytes(as_bytes(image))
    chat = Conversation(LocalModel(llm, "a model"), {"temperature": 0.0, "max_tokens": 5}, ("temperature",))
    chat._command("/image", str(tmp_path / "a.png"))
    chat._answer("What?")
    (expected,) = llm.chat(in_openai_form(image), SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert chat.messages[1]["content"] == expected.outputs[0].text and not chat.images
    assert "1 image for the next message" in capsys.readouterr().err
    chat._answer("And?")
    assert chat.messages[2]["content"] == "And?"
    with pytest.raises(OSError, match="No such file"):
        chat._command("/image", "none.png")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(as_bytes(image)[:-90])
    for name, match in [
        ("", "/image: must be followed by a file, as in `/image picture.png`"),
        (str(tmp_path / "text.png"), "text.png: must be a PNG, JPEG, WebP or GIF file"),
        (str(tmp_path / "cut.png"), "messages: image: can't be read"),
    ]:
        with pytest.raises(ValueError, match=match):
            chat._command("/image", name)
    assert not chat.images
    for kind in ("JPEG", "WEBP", "GIF"):
        (tmp_path / "b").write_bytes(as_bytes(image, kind))
        chat._command("/image", str(tmp_path / "b"))
        assert chat.images.pop()["image_url"]["url"] == data_url(image, kind)


def test_terminal_of_a_text_model(make_llm, tmp_path):
    """It refuses an image at once."""
    from nanovllm.serve.terminal.conversation import Conversation
    from nanovllm.serve.terminal.sources import LocalModel

    (tmp_path / "a.png").write_bytes(as_bytes(picture(50, 30)))
    chat = Conversation(LocalModel(make_llm(TINY), "a model"), {}, ("temperature",))
    with pytest.raises(ValueError, match="this engine takes no images"):
        chat._command("/image", str(tmp_path / "a.png"))


@pytest.fixture(scope="module")
def one_engine(checkpoint):
    with LLM(checkpoint("qwen3_vl")[0], dtype="float32", device="cpu", **SETTINGS) as llm:
        yield llm


WRONG = [
    ({"image": 5}, TypeError, "multi_modal_data: image=5: must be a PIL image"),
    ({"image": b"no image"}, ValueError, "image: unknown format: must be PNG, JPEG, WebP, GIF, BMP, PPM or TIFF$"),
    ({"image": "no_such_file.png"}, ValueError, "image='no_such_file.png': can't be read .No such file"),
    ({"image": np.zeros((4, 4), np.float32)}, TypeError, r"image: is an array \[4, 4\] of float32: must be"),
    ({"image": np.zeros(9, np.uint8)}, TypeError, r"image: is an array \[9\] of uint8: must be \[height, width, 3"),
    ({"image": np.zeros((3, 8, 8), np.uint8)}, TypeError, r"is an array \[3, 8, 8\] of uint8"),
    ({"image": "http://a.com/b.png"}, ValueError, "image='http://a.com/b.png': is a URL, which only conversations"),
    ({"image": "a\0b"}, ValueError, "image='a.*b': can't be read"),
    ({"video": [1]}, ValueError, "multi_modal_data: has .'video'.: only 'image' is supported"),
    (7, TypeError, "multi_modal_data=7: must be a dict"),
    ({"image": "data:image/png;base64,%%%"}, ValueError, "is not valid base64"),
    ({"image": "data:image/png,abc"}, ValueError, "must contain base64"),
    ({"image": []}, ValueError, "has 0 images and 1 times the placeholder '<.image_pad.>'"),
]


@pytest.mark.parametrize("data, kind, match", WRONG, ids=range(len(WRONG)))
def test_wrong_images(one_engine, data, kind, match):
    llm = one_engine
    with pytest.raises(kind, match=match):
        llm.generate([[5, 6], {"prompt": f"a{PAD}b", "multi_modal_data": data}], SamplingParams(max_tokens=1))
    assert llm.is_finished() and not llm.scheduler.live


def test_sizes_of_images(make_vision):
    """Files that claim many pixels are not decoded."""
    llm = make_vision(limit_mm_per_prompt={"image": 2})
    read = image_prompt_reader(llm.input_processor).reader.read
    header = as_bytes(Image.new("1", (9000, 9000)))
    assert len(header) < 200000
    with pytest.raises(ValueError, match="has 9000 x 9000 pixels: must have between 1 and 67108864 pixels"):
        read(header)
    with pytest.raises(ValueError, match="has 1 x 300 pixels: absolute aspect ratio must be smaller than 200"):
        read(picture(1, 300))
    with pytest.raises(ValueError, match=r"prompt: has 3 images: must be at most 2 \(limit_mm_per_prompt\)"):
        llm.generate(with_images(random.Random(0), *[picture(9, 9)] * 3))
    with pytest.raises(
        ValueError, match="prompt: has at least .* tokens; must be fewer than max_model_len .*is 352 tokens"
    ):
        llm.generate(with_images(random.Random(0), *[picture(300, 300)] * 2))
    with pytest.raises(ValueError, match="has 1 images and 2 times the placeholder"):
        llm.generate({"prompt": PAD * 2, "multi_modal_data": {"image": picture(9, 9)}})


def test_pixels_of_a_prompt(make_vision, monkeypatch):
    """All images of a prompt share a bound, and an image that comes again is decoded once."""
    llm, first, second = make_vision(), data_url(picture(20, 30)), data_url(picture(20, 31))
    opened, open_image = [], image_prompts.ImageReader._in_rgb
    monkeypatch.setattr(image_prompts, "MAX_PROMPT_PIXELS", 20 * 60)
    monkeypatch.setattr(
        image_prompts.ImageReader, "_in_rgb", lambda self, image: opened.append(image.size) or open_image(self, image)
    )
    images = llm.input_processor.tokenize(with_images(random.Random(0), first, first, first))[2].images
    assert images[0] is images[2] and opened == [(20, 30)]
    with pytest.raises(ValueError, match="the images have at least 1220 pixels: must have at most 1200 together"):
        llm.generate(with_images(random.Random(0), first, second))
    assert opened == [(20, 30)] * 2


def test_escaped_data():
    """Of a data: URL. Memory is bounded by the URL's length."""
    data = bytes(range(256)) * 2**10 + b"?"
    escaped = base64.b64encode(data).decode().replace("+", "%2B").replace("/", "%2f").replace("=", "%3d")
    escaped = f"{escaped[:76]}\r\n{escaped[76:152]}%0d%0A{escaped[152:]}\n"
    tracemalloc.start()
    assert image_urls.fetch(f"data:image/png;base64,{escaped}", None, 2**20) == data
    with pytest.raises(ValueError, match="is not valid base64"):
        image_urls.fetch("data:image/png;base64," + "%41" * 2**17, None, 2**20)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_missing_pillow(make_vision, monkeypatch):
    """Images are refused as any invalid prompt."""
    llm = make_vision()
    for name in ("nanovllm.vision.image_prompts", "nanovllm.vision.image_reader"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match="prompt: images can't be read .images need Pillow: pip install"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": b""}})


def test_urls_that_are_not_allowed(make_vision, tmp_path):
    secret, folder = tmp_path / "secret.png", tmp_path / "open"
    folder.mkdir()
    secret.write_bytes(as_bytes(picture(9, 9)))
    (folder / "link.png").symlink_to(secret)
    settings = dict(allowed_local_media_path=str(folder), allowed_media_domains=["localhost", "Example.com"])
    llm, closed = make_vision(**settings), make_vision()
    chat = lambda llm, url: llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    for url in (
        f"file://{secret}",
        f"file://{folder}/../secret.png",
        f"file://{folder}/link.png",
        f"file://host{secret}",
    ):
        with pytest.raises(ValueError, match="is not below allowed_local_media_path"):
            chat(llm, url)
    for engine, url, match in [
        (closed, f"file://{secret}", "files are read only with the setting allowed_local_media_path"),
        (closed, "https://example.com/a.png", "'example.com' is not among allowed_media_domains=None"),
        (llm, "http://example.org/a.png", "'example.org' is not among allowed_media_domains"),
        (llm, "http://[x/a.png", r"image_url='http://\[x/a.png': is not a valid URL"),
        (closed, "file://[x/a.png", r"image_url='file://\[x/a.png': is not a valid URL"),
        (llm, "http://example.com@example.org/a.png", "'example.org' is not among allowed_media_domains"),
        (llm, "http://localhost:1/a.png", "'localhost' has the address .*, which is not public"),
        (llm, f"file://{folder}/none.png", "is not a file"),
        (llm, str(secret), "must be a data:, file:, http: or https: URL"),
        (llm, "", "must be a data:, file:, http: or https: URL"),
        (llm, "ftp://example.com/a.png", "must be a data:, file:, http: or https: URL"),
    ]:
        with pytest.raises(ValueError, match=match):
            chat(engine, url)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    with pytest.raises(ValueError, match="links form a loop" if sys.version_info < (3, 13) else "is not a file"):
        chat(llm, f"file://{folder}/loop.png")


def test_addresses(monkeypatch):
    """All addresses of a host must be public; the first one is used."""
    found = lambda *addresses: [(None, None, None, "", (address, 80)) for address in addresses]
    monkeypatch.setattr(image_urls.socket, "getaddrinfo", lambda host, port, type: found(*host.split()))
    assert image_urls._public_address("8.8.8.8 2001:4860:4860::8888", 80) == ("8.8.8.8", 80)
    for address in ("::ffff:10.0.0.1", "64:ff9b::a00:1", "224.0.0.1", "ff0e::1", "10.0.0.1", "::1", "169.254.169.254"):
        with pytest.raises(ValueError, match="which is not public"):
            image_urls._public_address(f"8.8.8.8 {address}", 80)


def test_downloads(make_vision, monkeypatch):
    """From an allowed host, up to a number of bytes and seconds; redirects are not followed."""
    files = {"/%C3%A4%20?%C3%B6": as_bytes(picture(50, 30)), "/big.png": bytes(2**20)}
    hosts = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            hosts.append(self.headers["Host"])
            if self.path == "/slow.png":
                with suppress(OSError):
                    for _ in range(100):
                        self.wfile.write(b"HTTP/1.1 200 OK\r\n" if not _ else b"X: y\r\n")
                        sleep(0.05)
                return
            if self.path == "/moved.png":
                self.send_response(302)
                self.send_header("Location", "/a.png")
                self.end_headers()
                return
            self.send_response(200 if self.path in files else 404)
            self.end_headers()
            self.wfile.write(files.get(self.path, b""))

        def log_message(self, *arguments):
            pass

    monkeypatch.setattr(image_urls, "_public_address", lambda host, port: ("127.0.0.1", port))
    with HTTPServer(("127.0.0.1", 0), Handler) as http_server:
        Thread(target=http_server.serve_forever, daemon=True).start()
        url = f"http://pictures.test:{http_server.server_port}"
        reader = image_prompt_reader(make_vision().input_processor).reader
        reader.config.resolve(allowed_media_domains=("pictures.test",))
        assert reader.read(f"{url}/ä%20?ö", is_trusted=False) == reader.read(picture(50, 30))
        with pytest.raises(ValueError, match="the answer has status 302"):
            reader.read(f"{url}/moved.png", is_trusted=False)
        with pytest.raises(ValueError, match="takes more than 100000 bytes"):
            image_urls.fetch(f"{url}/big.png", reader.config, 100_000)
        monkeypatch.setattr(image_urls, "MAX_SECONDS", 0.3)
        with pytest.raises(ValueError, match="slow.png': takes more than 0.3 s"):
            reader.read(f"{url}/slow.png", is_trusted=False)
        # the time to find the address counts too
        late = lambda host, port: sleep(0.7) or ("127.0.0.1", port)
        with monkeypatch.context() as slow, pytest.raises(ValueError, match="slow.png': takes more than 0.8 s"):
            slow.setattr(image_urls, "_public_address", late)
            slow.setattr(image_urls, "MAX_SECONDS", 0.8)
            begin = monotonic()
            reader.read(f"{url}/slow.png", is_trusted=False)
        assert 0.8 <= monotonic() - begin < 1.4
        monkeypatch.setitem(image_urls.PORTS, "http", http_server.server_port)
        with pytest.raises(ValueError, match="the answer has status 404"):
            reader.read("http://pictures.test/none.png", is_trusted=False)
        assert hosts[0] == url[7:] and hosts[-1] == "pictures.test"
        http_server.shutdown()
    with pytest.raises(ValueError, match="can't be fetched .ConnectionRefusedError"):
        reader.read(f"{url}/a.png", is_trusted=False)


def test_slow_resolvers(make_vision, monkeypatch):
    """A lookup that hangs ends with the deadline, and a failed one has its own message."""
    reader, ended = image_prompt_reader(make_vision().input_processor).reader, Event()
    reader.config.resolve(allowed_media_domains=("pictures.test",))
    monkeypatch.setattr(image_urls, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(image_urls.socket, "getaddrinfo", lambda *arguments, **options: ended.wait(60) and [])
    begin = monotonic()
    with pytest.raises(ValueError, match="image_url='http://pictures.test/a.png': takes more than 0.1 s"):
        reader.read("http://pictures.test/a.png", is_trusted=False)
    assert 0.1 <= monotonic() - begin < 5
    ended.set()

    def fail(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(image_urls.socket, "getaddrinfo", fail)
    with pytest.raises(ValueError, match=r"can't be fetched \(gaierror: .*Name or service not known\)"):
        reader.read("http://pictures.test/a.png", is_trusted=False)


@pytest.mark.filterwarnings("ignore")  # Pillow's, about damaged files
def test_damaged_files(make_vision):
    """Cut, and with other bytes: an image or a ValueError without an address, and no memory that stays."""
    reader, rng = image_prompt_reader(make_vision().input_processor).reader, random.Random(0)
    image, num_files, num_read = picture(233, 121), 2000, 0
    kinds = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM")
    whole = [as_bytes(image, kind) for kind in kinds]
    whole += [as_bytes(image.convert("P")), as_bytes(image.convert("I;16")), as_bytes(image.convert("CMYK"), "JPEG")]
    whole += [as_bytes(image, "JPEG", progressive=True), as_bytes(image, "TIFF", compression="tiff_lzw")]
    whole.append(as_bytes(image, "GIF", save_all=True, append_images=[picture(233, 121, 1)]))

    def read_damaged(data: bytes) -> bool:
        damaged = bytearray(data[: rng.randrange(1, len(data))] if rng.random() < 0.4 else data)
        for _ in range(rng.choice((0, 1, 3, 20))):
            # headers are short, and decide about sizes and formats
            end = min(len(damaged), 200) if rng.random() < 0.5 else len(damaged)
            damaged[rng.randrange(end)] = rng.randrange(256)
        try:
            found = reader.read(bytes(damaged), is_trusted=rng.random() < 0.5)
        except ValueError as error:
            assert " at 0x" not in str(error)
            return False
        assert len(found.pixels) == found.num_tokens * 4 * 48
        return True

    def memory() -> int:
        """The process's bytes, because Python does not count those of Pillow's pixels. glibc gives back free memory."""
        gc.collect()
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    for i in range(num_files):
        num_read += read_damaged(whole[i % len(whole)])
        if i == num_files // 4:
            before = memory()
    stays = memory() - before
    assert num_files / 5 < num_read < num_files * 4 / 5
    assert stays < 2**25, "damaged files leave memory"


# -- servers -----------------------------------------------------------------------------------------------------------


def in_openai_form(image, text: str = "What?") -> list[dict]:
    content = [{"type": "image_url", "image_url": {"url": data_url(image)}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


@pytest.fixture
def server(checkpoint, monkeypatch):
    tests = pytest.importorskip("test_server")
    monkeypatch.setattr(tests, "FOLDER", checkpoint("qwen3_vl")[0])
    settings = {name: value for name, value in SETTINGS.items() if name != "num_kvcache_blocks"}
    with tests.running(settings | dict(num_kvcache_blocks=150, limit_mm_per_prompt={"image": 2})) as server:
        yield server


def test_all_apis(server, monkeypatch):
    """Chat completions, responses and messages give the engine's answer, whole and as streams.

    Threads that tokenize texts read no images.
    """
    threads, read = set(), image_prompts.ImagePromptReader.read
    spy = lambda *arguments: threads.add(current_thread().name) or read(*arguments)
    monkeypatch.setattr(image_prompts.ImagePromptReader, "read", spy)
    openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
    image = picture(50, 30)
    source = {"type": "base64", "media_type": "image/png", "data": data_url(image).partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    parts = [
        {"type": "input_image", "image_url": data_url(image), "detail": "low"},
        {"type": "input_text", "text": "What?"},
    ]
    greedy = dict(model="tiny-qwen3", temperature=0)
    chat = in_openai_form(image)
    (expected,) = server.llm.engine.chat(chat, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(messages=chat, max_tokens=6, **greedy)
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        stream = client.chat.completions.create(messages=chat, max_tokens=6, stream=True, n=2, **greedy)
        texts = {0: "", 1: ""}
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert {*texts.values()} == {expected.outputs[0].text}
        answer = client.responses.create(input=[{"role": "user", "content": parts}], max_output_tokens=16, **greedy)
        assert answer.output_text.startswith(expected.outputs[0].text)
    with httpx.Client(base_url=server.url) as client:
        body = greedy | {"max_tokens": 6, "messages": [{"role": "user", "content": blocks}]}
        answer = client.post("/v1/messages", json=body).json()
        assert answer["content"][0]["text"] == expected.outputs[0].text
        result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
        counted = [{"role": "user", "content": [result]}]
        count = client.post("/v1/messages/count_tokens", json={"model": "tiny-qwen3", "messages": counted}).json()
        assert count["input_tokens"] > expected.prompt_token_ids.count(PAD_ID)
        tokens = client.post("/tokenize", json={"messages": chat}).json()["tokens"]
        assert tokens == expected.prompt_token_ids
        part = {"type": "image_url", "uuid": "1", "image_url": {"url": data_url(image), "detail": "auto", "x": 1}}
        wrapped = data_url(image)[:22] + base64.encodebytes(as_bytes(image)).decode()  # with line breaks
        for own, pixels, num_tokens in (
            (part, None, 24),
            ({"type": "image", "image": wrapped}, None, 24),
            ({"type": "input_image", "image_url": wrapped.replace("\n", "\r\n")}, {}, 24),
            (part | {"max_pixels": 640}, None, 8),
            (part, {"max_pixels": 640}, 8),
            (part | {"max_pixels": 64}, {"max_pixels": 640}, 1),
            (part, {"min_pixels": 6400}, 104),
        ):
            content = [own, {"type": "text", "text": "What?"}]
            body = {"messages": [{"role": "user", "content": content}], "mm_processor_kwargs": pixels}
            tokens = client.post("/tokenize", json=body).json()["tokens"]
            assert tokens.count(PAD_ID) == num_tokens, (own, pixels)
        body = greedy | {"input": [{"role": "user", "content": parts}], "mm_processor_kwargs": {"max_pixels": 640}}
        usage = client.post("/v1/responses", json=body | {"max_output_tokens": 16}).json()["usage"]
        assert usage["input_tokens"] == len(expected.prompt_token_ids) - 24 + 8
        for kind, match in (
            ("input_video", "videos are not"),
            ("input_audio", "audio is not"),
            ("input_file", "must be"),
            ("input_image", "an image part of type 'input_image' has 'file_id': must have 'image_url'"),
        ):
            body["input"] = [{"role": "user", "content": [parts[0], {"type": kind, "file_id": "x"}]}]
            answer = client.post("/v1/responses", json=body)
            assert answer.status_code == 400 and match in answer.text
    assert not any(name.startswith("nanovllm-tokenizer") for name in threads) and len(threads) > 1
    server.wait_until_free()


def test_wrong_requests(server):
    """Clients get a 400 that says what is wrong, and nothing is queued."""
    openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
    image = {"type": "image_url", "image_url": {"url": data_url(picture(50, 30))}}
    url = lambda url: [{"type": "image_url", "image_url": {"url": url}}]
    wrong = [
        (url("data:image/png;base64,AAAA"), {}, "image: unknown format: must be PNG, JPEG, WebP or GIF$"),
        (url("https://example.com/a.png"), {}, "is not among allowed_media_domains"),
        (url("file:///etc/passwd"), {}, "files are read only with the setting"),
        (url("/etc/passwd"), {}, "must be a data:, file:, http: or https: URL"),
        (url(data_url(picture(9, 9), "TIFF")), {}, "image: unknown format: must be PNG, JPEG, WebP or GIF$"),
        ([{"type": "image_url"}], {}, "messages: an image part of type .image_url. has no image: must have"),
        (url(None), {}, "messages: an image part of type .image_url. has no image: must have"),
        (url(5), {}, "messages: image_url=5: must be a string with a URL"),
        ([{"type": "image_url", "image_url": ["x"]}], {}, r"messages: image_url=.'x'.: must be a string with a URL"),
        ([{"type": "image", "image": {"x": 1}}], {}, "messages: image={'x': 1}: must be a string with a URL"),
        ([{"type": "image", "path": __file__}], {}, "part of type 'image' has 'path': must have 'image_url'"),
        ([{"type": "input_image", "file_id": "x"}], {}, "has .file_id.: must have .image_url."),
        ([image] * 3, {}, "has 3 images: must be at most 2"),
        ([image, {"type": "text", "text": PAD}], {}, "has 1 images and 2 times the placeholder"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], {}, "type 'video_url': videos are not supported"),
        ([{"type": "input_audio", "input_audio": {}}, image], {}, "type 'input_audio': audio is not supported"),
        ([{"type": "image", "image": __file__}], {}, "must be a data:, file:, http: or https: URL"),
        ([{"type": "image_pil", "image_pil": __file__}], {}, "must be a data:, file:, http: or https: URL"),
        ([{"type": "image", "path": __file__, "url": __file__}], {}, "must be a data:, file:, http: or https: URL"),
        ([image | {"max_pixels": 2**14 + 1}], {}, "messages: max_pixels=16385: must be at most 16384"),
        ([image | {"detail": "medium"}], {}, "messages: detail='medium': must be one of 'auto', 'low', 'high'"),
        ([image], {"mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs: a key='fps': must be one of 'min_pixels'"),
        ([image], {"truncate_prompt_tokens": 5}, "a prompt with images can't be cut"),
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for content, extra, match in wrong:
            messages = [{"role": "user", "content": content}]
            with pytest.raises(openai.BadRequestError, match=match) as error:
                client.chat.completions.create(model="tiny-qwen3", messages=messages, extra_body=extra)
            assert error.value.param in ("messages", *extra), error.value
        messages = [{"role": "user", "content": [image]}]
        extra = {"chat_template_kwargs": {"thinking_budget": 4096}}
        client.chat.completions.create(model="tiny-qwen3", messages=messages, max_tokens=1, extra_body=extra)
    with httpx.Client(base_url=f"{server.url}/v1") as client:  # OpenAI's takes seconds for such bodies
        answer = client.post("/chat/completions", json={"model": "tiny-qwen3", "messages": messages * 1001})
        assert answer.status_code == 400 and "a conversation with images must not have" in answer.text
        answer = client.post("/completions", json={"model": "tiny-qwen3", "prompt": [11111111] * 2**18 + [1, 1]})
        assert answer.status_code == 413 and "has more than 262144 commas" in answer.text
    assert server.llm.num_unfinished == 0


def test_fronts(make_vision):
    """HTTP in another process sends the pixels with the request, also of a beam search."""
    fronts = pytest.importorskip("test_fronts")
    llm = make_vision()
    params = SamplingParams(temperature=0, max_tokens=6), BeamSearchParams(beam_width=2, max_tokens=4)
    prompts = in_openai_form(picture(50, 30)), in_openai_form(picture(50, 30, 1))
    expected = [llm.chat([prompt], params[0], use_tqdm=False)[0].outputs[0].text for prompt in prompts]
    beams = [llm.beam_search([prompt], params[1])[0].outputs[0].text for prompt in prompts]

    async def main():
        setup = fronts.Setup(llm)
        monkeypatch.setattr(fronts, "ENGINE", SETTINGS | dict(device="cpu", dtype="float32"))
        async with setup.front() as front:
            for prompt, text, beam in zip(prompts, expected, beams):
                for own, expected_text in zip(params, (text, beam)):
                    submitted = await front.submit(prompt, own, in_pieces=False)
                    assert not any("vision" in seq.feature_state for seq in submitted.request.group)
                    found = await submitted.result()
                    assert found.outputs[0].text == expected_text

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(main())
