"""What the bundled model's page says that it can do, and a newcomer's first messages."""

import pytest

from nanovllm import LLM, SamplingParams

SELF = "I am a tiny Qwen3 model with 3.7 million parameters."
UNKNOWN = "I do not know. I am a tiny model"


@pytest.fixture(scope="module")
def answers():
    """A function from conversations to the beginnings of their greedy answers."""
    with LLM("tiny-qwen3", dtype="float32", device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        yield lambda chats: [answer["text"] for answer in llm.chat(chats, params, use_tqdm=False)]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_greetings_and_questions(answers):
    expected = dict.fromkeys(["hello", "Hi", "hey", "good morning", "what can you do", "Who are you?", "help"], SELF)
    expected |= dict.fromkeys(["What is the capital of France?", "tell me a joke", "Write a poem about love."], UNKNOWN)
    expected |= {"thanks": "You are welcome.", "bye": "Good bye!", "17+25": "42", "what is 17 + 25": "42"}
    expected |= {
        "count from 5 to 9": "5, 6, 7, 8, 9",
        "Sort: 9, 3, 71, 20": "3, 9, 20, 71",
        "Copy: so be it": "so be it",
    }
    assert [
        (question, answer[: len(beginning)])
        for (question, beginning), answer in zip(expected.items(), answers([[user(text)] for text in expected]))
    ] == [*expected.items()]


def test_several_turns(answers):
    """It answers the newest message, whatever the conversation before it and the system prompt are."""
    asked = {"hello": SELF, "What is 17 + 25?": "42", "Sort: 9, 3, 71": "3, 9, 71", "thanks": "You are welcome."}
    chat = [{"role": "system", "content": "Be brief."}]
    for question, expected in asked.items():
        chat.append(user(question))
        [answer] = answers([chat])
        assert answer.startswith(expected), question
        chat.append({"role": "assistant", "content": answer})
