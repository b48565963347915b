"""What quantized weights and caches cost in accuracy: `python tests/scripts/accuracy.py [--model MODEL]`. Not a test.

The texts are what the model itself writes at temperature 1, in float32, so that any model can be measured without data;
`--text FILE` takes the beginning of a text file instead. Each row of the table is an engine that reads the texts:

- error: the root mean square of the difference of its logits from the float32 model's, relative to that of the float32
  model's logits (less their mean over the vocabulary, which changes nothing)
- top-1: how often both models find the same token most likely
- perplexity of the texts
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[i]) for i in (1, 2)]  # tests, and the repository

import torch

from nanovllm import LLM, SamplingParams

# a row's name, and its settings; the model "block" is quantized in blocks of 128 x 128, as Qwen3 is published
ROWS: dict[str, dict] = {
    "float32": {"dtype": "float32"},
    "the checkpoint's dtype": {},
    "int8 weights": {"quantization": "int8"},
    "FP8 weights, a scale for each output": {"quantization": "fp8"},
    "FP8 weights, blocks of 128 x 128": {"model": "block"},
    "int4 weights, groups of 128": {"quantization": "int4"},
    "FP8 cache": {"kv_cache_dtype": "fp8"},
    "FP8 weights (a scale for each output) and cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
OPENINGS = ["ROMEO.\n", "KING RICHARD.\n", "HAMLET.\n", "What is", "The ", "QUEEN.\nMy lord,", "Enter ", "I "]


def sampled_texts(llm: LLM, num_texts: int, length: int) -> list[list[int]]:
    prompts = [OPENINGS[i % len(OPENINGS)] for i in range(num_texts)]
    params = [SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, seed=i) for i in range(num_texts)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def logits_of(llm: LLM, text: list[int]) -> torch.Tensor:
    """[len(text) - 1, vocabulary] float32: what the model expects after each token."""
    seen: list[torch.Tensor] = []
    hook = llm.model_runner.model.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(logits))
    llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
    hook.remove()
    return torch.cat(seen)[-(len(text) - 1) :].float().cpu()


def measure(llm: LLM, texts: list[list[int]], reference: list[torch.Tensor]) -> tuple[float, float, float]:
    """Relative error, agreement and perplexity."""
    difference = norm = agreed = loss = count = 0.0
    for text, expected in zip(texts, reference):
        logits = logits_of(llm, text)
        logits -= logits.mean(1, keepdim=True)
        expected = expected - expected.mean(1, keepdim=True)
        difference += (logits - expected).double().square().sum().item()
        norm += expected.double().square().sum().item()
        agreed += (logits.argmax(1) == expected.argmax(1)).sum().item()
        loss += torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="sum").item()
        count += len(logits)
    return (difference / norm) ** 0.5, agreed / count, float(torch.tensor(loss / count).exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--text", type=Path, help="a file to read instead of texts that the model writes")
    parser.add_argument("--num-texts", type=int, default=48)
    parser.add_argument("--length", type=int, default=384, help="tokens of a text")
    args = parser.parse_args()
    options = dict(device=args.device, max_model_len=args.length + 32, enable_prefix_caching=False)
    texts: list[list[int]] = []
    reference: list[torch.Tensor] = []
    print("| | error of logits | top-1 | perplexity |\n| --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in ROWS.items():
            settings = options | settings
            model = settings.pop("model", args.model)
            with LLM(args.model if model != "block" else write_blocks(args.model, Path(folder)), **settings) as llm:
                if not texts and args.text:
                    ids = llm.tokenizer.encode(args.text.read_text())[: args.num_texts * args.length]
                    texts = [ids[i : i + args.length] for i in range(0, len(ids), args.length)]
                elif not texts:
                    texts = sampled_texts(llm, args.num_texts, args.length)
                reference = reference or [logits_of(llm, text) for text in texts]
                error, agreement, perplexity = measure(llm, texts, reference)
            print(f"| {name} | {error:.2%} | {agreement:.2%} | {perplexity:.3f} |", flush=True)
    print(f"\n{args.model}, {sum(map(len, texts)):,} tokens")


def write_blocks(model: str, folder: Path) -> str:
    """The checkpoint in Qwen3's published FP8 format."""
    from test_quantization import write_quantized

    from nanovllm.utils.model_files import find_model

    return write_quantized(str(find_model(model, None, with_weights=True)), folder, "block", margin=1.0)[0]


if __name__ == "__main__":
    main()
