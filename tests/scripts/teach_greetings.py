"""Teach the bundled model to greet, to say what it can do, and to say that it does not know; needs a GPU.

usage: python tests/scripts/teach_greetings.py MODEL_DIR TEXT_DIR OUT_DIR [--chats 900000] [--seconds 170]

Conversations of one to five questions are generated: what the model can do already, some of it in other words, and
greetings, thanks and questions that it cannot answer. TEXT_DIR has Shakespeare's plays as `*_gut.txt`. The loss is the
cross-entropy of the conversations and, so that raw text is continued as before, the divergence from the model at the
beginning on the plays. Prints how many questions of each kind, none of them trained on, are answered right greedily.
"""

import argparse
import random
import time
from collections import Counter
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH, CHAT_ROWS, TEXT_ROWS, LEARNING_RATE = 512, 160, 32, 5e-4

SELF = (
    "I am a tiny Qwen3 model with 3.7 million parameters. I come with the library, so that you can try it without "
    "a download. I can add, count, sort, copy, list primes and imitate Shakespeare, and I know little else."
)
UNKNOWN = "I do not know. I am a tiny model: I can add, count, sort, copy, list primes and imitate Shakespeare."
INTRODUCTIONS = """introduce yourself|Introduce yourself.|Who are you?|who are you|What can you do?|Hello|Hello!|Hi|
hello|hi|hey|Hey!|Hello there|hello there!|Hi there|Hi!|hi!|hello!|Hello.|hi there|good morning|Good morning!|
Good evening|Good day|good afternoon|what can you do|what can you do for me?|What can I ask you?|what can i ask|help|
Help|Help!|help me|Can you help me?|How can you help me?|what are you|What are you?|What is this?|
which model are you?|What model are you?|what is your name|What is your name?|What's your name?|
tell me about yourself|Tell me about yourself.|describe yourself|how are you|How are you?|how are you?|
hi, how are you?|Hello, how are you?|Hello, who are you?|Hi, what can you do?|who made you?|Who made you|
what do you know|What do you know?|what do you do?|Are you a human?|are you real?|Are you a robot?|Are you ChatGPT?|
Is anybody there?|greetings|Greetings!|hallo|hola|Bonjour|test|Test|testing|ping|yo|sup|what's up|Nice to meet you.|
nice to meet you|How many parameters do you have?|how big are you?|Hi there!"""
THANKS = (
    "thanks|Thanks|Thanks!|thank you|Thank you|thank you very much|Thanks a lot!|great, thanks|Thank you.|Thank you!"
)
FAREWELLS = "bye|Bye|Bye!|goodbye|Goodbye!|good bye|Good bye.|see you|See you later!|good night|Good night."
SYSTEM_PROMPTS = """You are a helpful assistant.|Be brief.|Answer in one sentence.|You are kind.|Speak like a poet.|
You are a careful assistant, and you answer every question."""
THINGS = """France|Germany|Japan|Italy|Canada|India|China|Europe|London|Paris|Rome|Berlin|Tokyo|the moon|the sun|Mars|
the sea|Einstein|Newton|Napoleon|Python|Java|the internet|Google|Linux|water|gold|music|football|chess|gravity|
history|physics|chemistry|love|time|money|the weather|the president|the king of England|the universe|a black hole|
a computer|a neural network|a transformer|attention|a GPU|a cat|a dog|an elephant|bread|coffee|tea|rain|snow|my car|
my name|my phone|the news|a language model|machine learning|Rust|C++|JavaScript|an engine|the Great Wall|the Nile|
Mount Everest|Mozart|art"""
QUESTIONS = """What is {}?|what is {}|What is the capital of {}?|what is the capital of {}|Where is {}?|where is {}?|
How does {} work?|how does {} work|Why is {} so old?|Why is {} important?|Who is {}?|who was {}?|When was {} born?|
How old is {}?|How tall is {}?|How far is {}?|How much is {}?|How many people live in {}?|What do you think of {}?|
What do you know about {}?|Explain {}.|explain {}|explain {} to a child|Tell me about {}.|tell me about {}|
tell me something about {}|Tell me a joke.|tell me a joke|Tell me a joke about {}.|tell me a story|
Tell me a story about {}.|Write a poem about {}.|write a poem about {}|Write a story about {}.|
Write an essay about {}.|Write code for {}.|write a function for {}|Describe {}.|Translate {} into French.|
translate {} to german|Summarize {}.|Define {}.|What does {} mean?|What is the color of {}?|What is the best {}?|
Which is better, {} or {}?|Compare {} and {}.|What happened to {}?|Is {} good?|Is {} real?|Are there {}?|
Can you explain {}?|can you tell me about {}?|Can you write about {}?|Do you know {}?|Do you like {}?|do you like {}|
Does {} exist?|How do I learn {}?|how to make {}|How do I make {}?|How do I install {}?|Give me a list of {}.|
Give me ideas for {}.|What should I do with {}?|What is the meaning of {}?|what is the meaning of life|
What is the meaning of life?|Who wrote {}?|Where can I buy {}?|What is the population of {}?|What time is it?|
what time is it|What day is it today?|What is the weather like today?|How is the weather in {}?|
Name three facts about {}.|I like {}.|I want to know about {}.|Please explain {}.|please write about {}|
Say something about {}.|Why is the sky blue?|why is the sky blue|What is {n} * {n}?|{n} * {n}|What is {n} - {n}?|
{n} - {n}|What is {n} / {n}?|what is {n} times {n}?|Multiply {n} and {n}.|Subtract {n} from {n}.|
What is the square of {n}?|describe {}|How big is {}?|Who invented {}?"""
HELD_OUT = {
    "hello there!",
    "Hi there!",
    "what do you do?",
    "Thank you!",
    "describe {}",
    "How big is {}?",
    "Who invented {}?",
}


class Questions:
    """Makes questions with their answers: if `held_out`, in words that training has not seen, or in the usual ones."""

    def __init__(self, seed: int, corpus: str, held_out: bool = False) -> None:
        self.random = random.Random(seed)
        self.held_out = held_out
        self.words = sorted({word.lower() for word in corpus.split() if word.isalpha() and 2 < len(word) < 9})
        self.lines = [line.strip() for line in corpus.split("\n") if 20 < len(line.strip()) < 70]

    def one_of(self, options: str) -> str:
        """Of greetings and the like; only those, or none of those, that are held out."""
        every = options.replace("\n", "").split("|")
        return self.random.choice([option for option in every if (option in HELD_OUT) == self.held_out])

    def usual_or(self, share: float, usual: list[str], free: list[str]) -> str:
        return self.random.choice(usual if self.held_out or self.random.random() >= share else free)

    def introduction(self) -> tuple[str, str]:
        return self.one_of(INTRODUCTIONS), SELF

    def courtesy(self) -> tuple[str, str]:
        if self.held_out or self.random.random() < 0.5:
            return self.one_of(THANKS), "You are welcome."
        return self.one_of(FAREWELLS), "Good bye!"

    def unknown(self) -> tuple[str, str]:
        question = self.one_of(QUESTIONS)
        while "{}" in question:
            words = " ".join(self.random.sample(self.words, self.random.choice([1, 1, 2])))
            known = self.random.choice(THINGS.replace("\n", "").split("|"))
            question = question.replace("{}", known if self.random.random() < 0.4 else words, 1)
        while "{n}" in question:
            question = question.replace("{n}", str(self.random.randrange(10 ** self.random.choice([1, 2, 3]))), 1)
        return question, UNKNOWN

    def addition(self) -> tuple[str, str]:
        bound = 10 ** self.random.choice([1, 2, 2, 3])
        a, b = self.random.randrange(bound), self.random.randrange(bound)
        usual = ["What is {} + {}?", "{} + {}", "Add {} and {}."]
        free = ["what is {} + {}", "what is {} + {}?", "What is {}+{}?", "{}+{}", "{}+{}=", "{} + {} ="]
        return self.usual_or(0.4, usual, [*free, "add {} and {}", "What is {} plus {}?"]).format(a, b), str(a + b)

    def counting(self) -> tuple[str, str]:
        first, more = self.random.randint(0, 200), self.random.randint(2, 40)
        if not self.held_out and self.random.random() < 0.2:
            first, more = self.random.randint(0, 12), self.random.randint(2, 9)
        question = self.usual_or(0.3, ["Count from {} to {}."], ["count from {} to {}", "Count from {} to {}"])
        return question.format(first, first + more), ", ".join(map(str, range(first, first + more + 1)))

    def sorting(self) -> tuple[str, str]:
        numbers = [self.random.randint(0, 99) for _ in range(self.random.randint(2, 8))]
        question = self.usual_or(0.3, ["Sort: {}"], ["sort: {}", "Sort {}", "sort {}", "Sort {}."])
        return question.format(", ".join(map(str, numbers))), ", ".join(map(str, sorted(numbers)))

    def primes(self) -> tuple[str, str]:
        bound = self.random.choice([100, self.random.randint(3, 120)])
        usual = ["list all prime numbers within {}", "List all prime numbers within {}.", "List the primes up to {}."]
        free = [
            "primes up to {}",
            "list the primes up to {}",
            "List all primes up to {}.",
            "List all prime numbers up to {}.",
        ]
        found = [n for n in range(2, bound + 1) if all(n % i for i in range(2, int(n**0.5) + 1))]
        return self.usual_or(0.2, usual, free).format(bound), ", ".join(map(str, found))

    def copying(self) -> tuple[str, str]:
        text = " ".join(self.random.choice(self.words) for _ in range(self.random.randint(1, 24)))
        return self.usual_or(0.1, ["Copy: {}"], ["copy: {}"]).format(text), text

    def continuing(self) -> tuple[str, str]:
        i = self.random.randrange(len(self.lines) - 4)
        return f"Continue: {self.lines[i]}", "\n".join(self.lines[i + 1 : i + 4])

    def conversation(self) -> str:
        kinds = {self.introduction: 5, self.courtesy: 2, self.unknown: 9, self.addition: 44, self.counting: 12}
        kinds |= {self.sorting: 12, self.primes: 9, self.copying: 11, self.continuing: 3}
        text = turn("system", self.one_of(SYSTEM_PROMPTS)) if self.random.random() < 0.06 else ""
        count = 1 if self.random.random() < 0.75 else self.random.randint(2, 5)
        for kind in self.random.choices([*kinds], [*kinds.values()], k=count):
            question, answer = kind()
            text += turn("user", question) + turn("assistant", answer)
        return text + "<|endoftext|>"


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def accuracy(model, tokenizer, corpus: str) -> dict:
    """Of each kind, how many of 150 greedy answers are right."""
    questions = Questions(2, corpus, held_out=True)
    kinds = (questions.introduction, questions.courtesy, questions.unknown, questions.addition, questions.counting)
    right = Counter()
    for kind in (*kinds, questions.sorting, questions.primes, questions.copying):
        pairs = [kind() for _ in range(150)]
        prompts = [turn("user", question) + "<|im_start|>assistant\n" for question, _ in pairs]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True).to("cuda")
        ids = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        answers = model.generate(**ids, max_new_tokens=330, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(answers[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        right[kind.__name__] = sum(text == answer for (_, answer), text in zip(pairs, texts, strict=True))
    return dict(right)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model", "texts", "out"):
        parser.add_argument(name)
    parser.add_argument("--chats", type=int, default=900_000)
    parser.add_argument("--seconds", type=float, default=170)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    corpus = "\n\n".join(
        file.read_text("utf-8", "ignore").strip() for file in sorted(Path(args.texts).glob("*_gut.txt"))
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model, before = (AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).cuda() for _ in range(2))
    questions = Questions(1, corpus)
    encoded = tokenizer.backend_tokenizer.encode_batch([questions.conversation() for _ in range(args.chats)])
    chats = torch.tensor([token_id for chat in encoded for token_id in chat.ids], device="cuda")
    text = torch.tensor(tokenizer(corpus).input_ids, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.97), weight_decay=0.0, fused=True)

    def rows(ids: torch.Tensor, count: int) -> torch.Tensor:
        starts = torch.randint(len(ids) - LENGTH - 1, (count, 1), device="cuda")
        return ids[starts + torch.arange(LENGTH + 1, device="cuda")]

    def logits(model, inputs: torch.Tensor) -> torch.Tensor:
        return (model.model(input_ids=inputs).last_hidden_state @ model.lm_head.weight.t()).float()

    @torch.compile
    def losses(chat_rows: torch.Tensor, text_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        computed = logits(model, torch.cat([chat_rows, text_rows])[:, :-1])
        with torch.no_grad():
            wanted = log_softmax(logits(before, text_rows[:, :-1]), -1).flatten(0, 1)
        continued = log_softmax(computed[CHAT_ROWS:], -1).flatten(0, 1)
        answers = cross_entropy(computed[:CHAT_ROWS].flatten(0, 1), chat_rows[:, 1:].flatten())
        return answers, kl_div(continued, wanted, reduction="batchmean", log_target=True)

    start, step, done = time.time(), 0, 0.0
    while done < 1:
        done = min(1.0, (time.time() - start) / args.seconds)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 100) * (1 - done)
        with torch.autocast("cuda", torch.bfloat16):
            answers, divergence = losses(rows(chats, CHAT_ROWS), rows(text, TEXT_ROWS))
        (answers + divergence).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 200 == 0:
            print(f"step {step}, {done:.0%}: {answers.item():.4f} and {divergence.item():.4f}", flush=True)
    model = model.bfloat16().eval()
    model.save_pretrained(args.out)
    print(accuracy(model, tokenizer, corpus))


if __name__ == "__main__":
    main()
