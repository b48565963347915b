"""Tokenizers: the token ids and texts of transformers' AutoTokenizer, for every family and many scripts."""

import json
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from nanovllm.utils.families import MODELS
from nanovllm.utils.loader import load_tokenizer

TEXTS = {
    "Latin": "It's 1,234.50 — naïve cafés, don't they?  Ĳsselmeer\n\n\tœuvre",
    "Vietnamese": "Tiếng Việt có rất nhiều dấu thanh điệu",
    "Greek": "Ἐν ἀρχῇ ἦν ὁ λόγος, καὶ ὁ λόγος",
    "Cyrillic": "Съешь же ещё этих мягких французских булок",
    "Armenian": "Բոլոր մարդիկ ծնվում են ազատ",
    "Georgian": "ყველა ადამიანი იბადება თავისუფალი",
    "Hebrew": "בְּרֵאשִׁית בָּרָא אֱלֹהִים",
    "Arabic": "بِسْمِ ٱللَّهِ ٱلرَّحْمَٰنِ ٱلرَّحِيمِ ١٢٣",
    "Persian": "می‌خواهم کتاب‌هایم را بخوانم",
    "Hindi": "नमस्ते दुनिया, क्या हाल है? १२३",
    "Bengali": "সমস্ত মানুষ স্বাধীনভাবে",
    "Tamil": "மனிதப் பிறவியினர் சகலரும்",
    "Telugu": "ప్రతిపత్తిస్వత్వముల విషయమున",
    "Sinhala": "සියලු මනුෂ්‍යයෝ නිදහස්ව",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระ",
    "Lao": "ມະນຸດທຸກຄົນເກີດມາມີກຽດ",
    "Khmer": "មនុស្សទាំងអស់កើតមក",
    "Burmese": "လူတိုင်းသည် တူညီ လွတ်လပ်သော",
    "Tibetan": "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ",
    "Ethiopic": "የሰው፡ልጅ፡ሁሉ፡ሲወለድ፡ነጻና",
    "Chinese": "人人生而自由。在尊严和权利上一律平等。",
    "Japanese": "すべての人間は、生まれながらにして自由であり、ガギグ",
    "Korean": "모든 인간은 태어날 때부터 자유로우며",
    "emoji": "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ 1️⃣ 🧑🏿‍🚀",
    "code": "def f(x):\r\n    return {'a': [1, 2], \"b\": x**2}  # 1234567890\r\n",
    "spaces": "  a\u00a0b\u3000c\u200bd   \n \n  e \u2028 f  ",
    "marks": "e\u0301\u0323 q\u0307\u0323 Z\u0351\u0343\u0328\u034cA\u0310\u0300L\u0327\u034eG\u0334O\u0321 \u0301x",
    "special": "<|im_start|>user\nHi<|im_end|> <s>a</s> <|endoftext|>",
    "unassigned": "\U0001fbff\ue000\U000e0041\ufffd\x00\x7f\ufeff",
}
TEXTS |= {f"{name} NFD": unicodedata.normalize("NFD", text) for name, text in TEXTS.items()}

CONTRACTIONS, SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
BEFORE, OTHERS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = {  # what byte-level tokenizers split text into
    "qwen2": [CONTRACTIONS, BEFORE + r"\p{L}+", r"\p{N}", OTHERS],
    "qwen3.5": [CONTRACTIONS, BEFORE + r"[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"],
    "llama-3": [CONTRACTIONS, BEFORE + r"\p{L}+", r"\p{N}{1,3}", OTHERS],
    "tekken": [f"{BEFORE}{UPPER}*{LOWER}+", f"{BEFORE}{UPPER}+{LOWER}*", r"\p{N}", OTHERS],
}
SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def with_begin(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def byte_level(kind: str) -> Tokenizer:
    """As of Qwen, Llama 3 and later models of Mistral."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if kind.startswith("qwen") else None
    split = pre_tokenizers.Split(Regex("|".join([*WORDS[kind], SPACES])), "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([split, of_bytes]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS.values()] * 3, trainer)
    return tokenizer if kind.startswith("qwen") else with_begin(tokenizer)


def sentencepiece() -> Tokenizer:
    """As of Llama 2 and the first models of Mistral: characters, and bytes of those that the vocabulary lacks."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    trained.normalizer = normalizers.Sequence(marks)
    trainer = trainers.BpeTrainer(vocab_size=700, limit_alphabet=250, special_tokens=SPECIAL[:3], show_progress=False)
    trained.train_from_iterator([text.replace(" ", " ▁") for text in TEXTS.values()] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    vocab = {token: i for i, token in enumerate([*SPECIAL[:3], *bytes_, *[*model["vocab"]][3:]])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.add_special_tokens(SPECIAL)
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([*steps])
    return with_begin(tokenizer)


@cache
def tokenizer_json(kind: str) -> str:
    return (sentencepiece() if kind == "sentencepiece" else byte_level(kind)).to_str()


# `model_type` of config.json, `tokenizer_class` of tokenizer_config.json, and what tokenizer.json has
CASES = [
    ("qwen2", "Qwen2Tokenizer", "qwen2"),
    ("qwen2", "PreTrainedTokenizerFast", "qwen2"),
    ("qwen3", "Qwen2Tokenizer", "qwen2"),
    ("qwen3", "Qwen2TokenizerFast", "qwen2"),
    ("qwen3", "PreTrainedTokenizerFast", "qwen2"),
    ("qwen3", "PreTrainedTokenizerFast", "llama-3"),
    ("qwen3", "LlamaTokenizerFast", "qwen2"),  # DeepSeek-R1-0528-Qwen3-8B
    ("qwen3", None, "qwen2"),
    ("qwen3_moe", "Qwen2Tokenizer", "qwen2"),
    ("qwen3_moe", "PreTrainedTokenizerFast", "qwen3.5"),
    ("qwen3_next", "Qwen2Tokenizer", "qwen2"),
    ("qwen3_next", "PreTrainedTokenizerFast", "tekken"),
    ("qwen3_vl", "Qwen2Tokenizer", "qwen2"),
    ("qwen3_vl_moe", "Qwen2Tokenizer", "qwen2"),
    ("qwen3_5", "Qwen2Tokenizer", "qwen3.5"),
    ("qwen3_5", "PreTrainedTokenizerFast", "qwen3.5"),
    ("qwen3_5_text", "Qwen2Tokenizer", "qwen3.5"),
    ("qwen3_5_moe", "Qwen2Tokenizer", "qwen3.5"),
    ("qwen3_5_moe_text", "Qwen2Tokenizer", "qwen3.5"),
    ("llama", "PreTrainedTokenizerFast", "llama-3"),
    ("llama", "LlamaTokenizer", "sentencepiece"),
    ("llama", "LlamaTokenizerFast", "llama-3"),  # DeepSeek-R1-Distill-Llama-8B
    ("mistral", "LlamaTokenizer", "sentencepiece"),
    ("mistral", "LlamaTokenizerFast", "sentencepiece"),
    ("mistral", "PreTrainedTokenizerFast", "tekken"),
    ("gemma2", "GemmaTokenizerFast", "sentencepiece"),
    ("gemma3_text", "GemmaTokenizerFast", "sentencepiece"),
    ("gemma4_text", "GemmaTokenizerFast", "sentencepiece"),
    ("gemma4_unified_text", "GemmaTokenizerFast", "sentencepiece"),
    ("ministral3", "PreTrainedTokenizerFast", "tekken"),
    ("olmo3", "GPT2TokenizerFast", "qwen2"),
    ("smollm3", "PreTrainedTokenizerFast", "llama-3"),
    ("granite", "GPT2TokenizerFast", "qwen2"),
    ("glm4", "PreTrainedTokenizerFast", "qwen2"),
    ("phi3", "GPT2TokenizerFast", "qwen2"),
    ("phi3", "LlamaTokenizerFast", "sentencepiece"),
    ("seed_oss", "PreTrainedTokenizerFast", "qwen2"),
    ("gpt_oss", "PreTrainedTokenizerFast", "tekken"),
    ("a_type_of_its_own", "PreTrainedTokenizerFast", "llama-3"),
    ("a_type_of_its_own", "Qwen2Tokenizer", "qwen2"),
]


def write(folder: Path, model_type: str, tokenizer_class: str | None, kind: str, **entries) -> str:
    begins = kind in ("llama-3", "tekken", "sentencepiece")
    config = {"tokenizer_class": tokenizer_class, "eos_token": "</s>" if begins else "<|im_end|>"}
    config |= {"bos_token": "<s>"} if begins or tokenizer_class == "LlamaTokenizerFast" else {"bos_token": None}
    config = {name: value for name, value in (config | entries).items() if name != "tokenizer_class" or value}
    (folder / "tokenizer.json").write_text(tokenizer_json(kind))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(folder)


def assert_same(ours, expected) -> None:
    for name, text in TEXTS.items():
        for adds in (True, False):
            ids = expected.encode(text, add_special_tokens=adds)
            assert ours.encode(text, add_special_tokens=adds) == ids, name
            for skips in (True, False):
                decoded = expected.decode(ids, skip_special_tokens=skips)
                assert ours.decode(ids, skip_special_tokens=skips) == decoded, name
    assert ours.special_tokens_map == expected.special_tokens_map
    assert ours.eos_token_id == expected.eos_token_id and ours.chat_template == expected.chat_template


def test_every_family_is_there():
    assert {*MODELS} <= {model_type for model_type, *_ in CASES}


@pytest.mark.parametrize("model_type, tokenizer_class, kind", CASES)
def test_ids_and_texts_are_those_of_transformers(tmp_path, model_type, tokenizer_class, kind):
    folder = write(tmp_path, model_type, tokenizer_class, kind)
    ours, expected = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert_same(ours, expected)
    assert type(ours) is type(expected)
    assert ours.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()


@pytest.mark.parametrize(
    "model_type, tokenizer_class, kind",
    [
        ("qwen3", "Qwen2Tokenizer", "qwen2"),
        ("qwen3", "TokenizersBackend", "tekken"),
        ("llama", "TokenizersBackend", "llama-3"),
        ("mistral", "TokenizersBackend", "sentencepiece"),
    ],
)
def test_what_transformers_5_has_written(tmp_path, model_type, tokenizer_class, kind):
    """Transformers 4 has no class TokenizersBackend, and takes no list of `extra_special_tokens`."""
    entries = {"backend": "tokenizers", "is_local": True, "extra_special_tokens": ["<|im_start|>", "<|endoftext|>"]}
    ours = load_tokenizer(write(tmp_path, model_type, tokenizer_class, kind, **entries))
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for name, text in TEXTS.items():
        assert ours.encode(text) == plain.encode(text).ids, name
    assert ours.decode(ours.encode(TEXTS["special"]), skip_special_tokens=True).split() == ["user", "Hi", "a"]


def test_unknown_class(tmp_path):
    """As AutoTokenizer: it is refused by name, or what tokenizer.json has counts."""
    folder = write(tmp_path, "qwen3", "MadeUpTokenizer", "qwen2")
    try:
        expected = AutoTokenizer.from_pretrained(folder)
    except ValueError:
        with pytest.raises(ValueError, match=f"{folder}: can't load the tokenizer .*MadeUpTokenizer"):
            load_tokenizer(folder)
    else:
        assert_same(load_tokenizer(folder), expected)
