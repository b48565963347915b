"""Four questions to the bundled model, or to any other: `python example.py --model Qwen/Qwen3-0.6B`."""

import argparse
import logging

from nanovllm import LLM, SamplingParams

QUESTIONS = ["introduce yourself", "list all prime numbers within 100", "What is 17 + 25?"]
VERSE = "HAMLET.\nTo be, or not to be"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-qwen3", help="a folder, a hub id, or the bundled tiny-qwen3")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--attention-backend", default="auto", choices=["auto", "triton", "flash", "sdpa"])
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    settings = vars(parser.parse_args())
    model, max_tokens, temperature = (settings.pop(name) for name in ("model", "max_tokens", "temperature"))

    logging.basicConfig(format="%(message)s")
    logger = logging.getLogger("nanovllm")
    logger.setLevel(logging.INFO)  # a line on what runs, once the engine has started
    logger.info("Loading %s", model)
    with LLM(model, **settings) as llm:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = llm.chat(conversations, params) + llm.generate(VERSE, params)
    for question, answer in zip([*QUESTIONS, VERSE], answers):
        print(f"\n> {question}\n{answer['text']}")


if __name__ == "__main__":
    main()
