"""Token ids to text, and stop strings; the reference looks at the whole text, one character at a time."""

import random
from time import process_time
from types import SimpleNamespace

import pytest
from scaling import assert_grows_less
from simulation import SimulatedEngine
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm.engine.collector import OutputCollector, StepOutput
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.outputs import OutputKind
from nanovllm.engine.scheduled_step import StepResult
from nanovllm.engine.sequence import Sequence
from nanovllm.features.stop_strings import StoppingDetokenizer, StopStrings
from nanovllm.requests.detokenizer import Detokenizer, TokenBytes
from nanovllm.requests.request import CompletionRequest
from nanovllm.requests.streamed_request import StreamedRequest
from nanovllm.sampling_params import SamplingParams


class Pieces(dict):
    """A TokenBytes without a tokenizer, which never leaves out a space."""

    at_start = dict.__getitem__


# pieces that overlap, two that are halves of a character, and one without text
TOKENS = Pieces(enumerate([b"", b"", b"a", b"b", b"ab", b"ba", b"bab", b"\xc3", b"\xa9", b"", b"a\xc3"]))


def pieces(rng: random.Random, ids: list[int]):
    while ids:
        n = rng.randint(1, 3)
        yield ids[:n]
        ids = ids[n:]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_text_is_the_tokenizers(tokenizer, skip_special_tokens):
    """Of random ids, which are mostly not valid UTF-8 together; and text that was returned once never changes."""
    rng = random.Random(0)
    token_bytes = TokenBytes(tokenizer, skip_special_tokens)
    byte_ids = [i for i in range(2045) if len(tokenizer.convert_ids_to_tokens(i)) == 1]
    real = tokenizer.encode("naïve café, 東京 🙂🙃!\n\t  Ünï-cödé ﷽ ")
    for round in range(300):
        ids = [rng.choice(byte_ids) if rng.random() < 0.5 else rng.randrange(2048) for _ in range(rng.randint(0, 20))]
        ids = real if round == 0 else ids + real[rng.randrange(len(real)) :]
        expected = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        detokenizer = Detokenizer(token_ids := [1, 2, 3], 3, token_bytes)
        for piece in pieces(rng, ids):
            token_ids += piece
            detokenizer.decode()
            assert expected.startswith(detokenizer.text)
        detokenizer.decode(is_last=True)
        assert detokenizer.text == expected


def test_bytes_of_odd_tokens():
    """Added tokens that byte-level BPE could not have written, and ids that only the padded model has."""
    tokenizer = SimpleNamespace(
        backend_tokenizer=SimpleNamespace(decoder=decoders.ByteLevel()),
        convert_ids_to_tokens={0: "Ġa", 1: "a b", 2: "日本", 3: None}.get,
        added_tokens_decoder={1: SimpleNamespace(special=True), 2: SimpleNamespace(special=False)},
    )
    assert [TokenBytes(tokenizer, False)[i] for i in range(4)] == [b" a", b"a b", "日本".encode(), b""]
    assert [TokenBytes(tokenizer, True)[i] for i in range(4)] == [b" a", b"", "日本".encode(), b""]
    tokenizer.backend_tokenizer.decoder = object()
    with pytest.raises(ValueError, match="'object'.*must be 'ByteLevel'"):
        TokenBytes(tokenizer, True)
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="'WordPiece'.*must be 'ByteLevel', or one for SentencePiece"):
        TokenBytes(tokenizer, True)


# -- SentencePiece -----------------------------------------------------------------------------------------------------

SPACE = "\u2581"
TEXTS = [
    "The the then",
    " two  spaces   and\nlines\n\n",
    "na\xefve caf\xe9, \u6771\u4eac \U0001f642\U0001f643!\tend",
    "\n<s>the</s>",
]


def sentencepiece_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """With a small vocabulary: the kinds differ in how they mark the space before a text, and leave it out again."""
    pieces = [*"Thensatwopclid,", SPACE, *(SPACE + x for x in "Ttswa"), "th", "the", SPACE * 2, SPACE + "the"]
    if kind == "unigram":  # T5
        vocab = [(piece, -10.0 - i) for i, piece in enumerate(["<unk>", "<s>", "</s>", *pieces])]
        backend = Tokenizer(models.Unigram(vocab, unk_id=0))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        ids = {
            piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces])
        }
        merges = [("t", "h"), ("th", "e"), *((SPACE, x) for x in "Ttswa"), (SPACE, SPACE), (SPACE, "the")]
        backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if kind == "llama-2":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        elif kind == "mistral":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
        elif kind == "gemma":  # marks none
            backend.normalizer = normalizers.Replace(" ", SPACE)
        steps += [decoders.Strip(content=" ", left=1)] * (kind != "gemma")
        backend.decoder = decoders.Sequence(steps)
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("kind", ["llama-2", "mistral", "gemma", "unigram"])
def test_sentencepiece(kind, skip_special_tokens):
    """An answer is what it adds to the text of its prompt; only a text that begins with it lacks its first space."""
    tokenizer, rng = sentencepiece_tokenizer(kind), random.Random(2)
    token_bytes = TokenBytes(tokenizer, skip_special_tokens)
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    whole = [i for i in range(len(tokenizer)) if not tokenizer.convert_ids_to_tokens(i).startswith("<0x")]
    assert kind == "unigram" or any(i not in whole for ids in encoded for i in ids), "no byte has a token of its own"
    for round in range(300):
        prompt = [1] * rng.randint(0, 1) + rng.choice([[], *encoded])
        answer = [*rng.choice(encoded)] if round < 50 else rng.choices(whole, k=rng.randint(0, 6))
        answer += rng.choice([[], *encoded])
        expected = decode(prompt + answer).removeprefix(decode(prompt))
        detokenizer = Detokenizer(token_ids := [*prompt], len(prompt), token_bytes)
        for piece in pieces(rng, answer):
            token_ids += piece
            detokenizer.decode()
            assert expected.startswith(detokenizer.text)
        detokenizer.decode(is_last=True)
        assert detokenizer.text == expected, (prompt, answer)


def test_spaces_of_sentencepiece():
    tokenizer = sentencepiece_tokenizer("llama-2")
    the, newline = tokenizer.convert_tokens_to_ids([SPACE + "the", "<0x0A>"])
    assert tokenizer.decode([the, newline, the]) == "the\n the"
    for prompt, expected in [([the], " the\n the"), ([1], "the\n the"), ([newline], " the\n the")]:
        token_ids = [*prompt, 1, the, newline, the]
        detokenizer = Detokenizer(token_ids, len(prompt), TokenBytes(tokenizer, True))
        assert detokenizer.decode(is_last=True) == expected


def test_broken_bytes_of_sentencepiece():
    """A character is text as soon as it is whole, and stays so when bytes follow that are none."""
    tokenizer = sentencepiece_tokenizer("llama-2")
    token_bytes, token_ids = TokenBytes(tokenizer, True), [1]
    detokenizer = StoppingDetokenizer(token_ids, 1, token_bytes, SamplingParams(stop="\n"))
    seen = []
    for byte in "\xe9".encode() + b"\xff\xe6a\n":
        token_ids.append(tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>"))
        stop = detokenizer.cut_at_stop()
        seen.append(detokenizer.take_text())
    assert seen == ["", "\xe9", "\ufffd", "", "\ufffda", ""] and stop == "\n"


def test_every_character_of_a_tokenizer_is_known(tokenizer):
    """The table of bytes against the tokenizer's own, for all 256."""
    token_bytes = TokenBytes(tokenizer, False)
    assert token_bytes[150_000] == b""  # of a model whose vocabulary is larger
    singles = {token_bytes[i] for i in range(2045)} & {bytes([b]) for b in range(256)}
    assert len(singles) == 256


def reference(ids: list[int], params: SamplingParams) -> tuple[int, str, str, str | None]:
    """(tokens, text, finish reason, stop reason); the stop string that ends first, or is the first of the list."""
    prefixes = [b"".join(TOKENS[i] for i in ids[:n]) for n in range(len(ids) + 1)]
    texts = [prefix[: -1 if prefix.endswith(b"\xc3") else None].decode(errors="replace") for prefix in prefixes]
    for n in range(params.min_tokens + 1, len(ids) + 1):
        for end in range(len(texts[n - 1]) + 1, len(texts[n]) + 1):
            if stops := [s for s in params.stop if texts[n][:end].endswith(s)]:
                stop = stops[0]
                return n, texts[n][: end if params.include_stop_str_in_output else end - len(stop)], "stop", stop
        if ids[n - 1] in params.stop_token_ids:
            last = n if params.include_stop_str_in_output else n - 1
            return n, prefixes[last].decode(errors="replace"), "stop", ids[n - 1]
    return len(ids), prefixes[-1].decode(errors="replace"), "length", None


def run(params: SamplingParams, ids: list[int], kind: OutputKind) -> tuple[tuple, StepOutput]:
    """The answer to a request, one token a step, in the form of `reference`; and what its caller got on the way."""
    outputs = OutputProcessor(SimulatedEngine().scheduler)
    seq = Sequence([0], params, max_len=64)
    request_class = CompletionRequest if kind is OutputKind.FINAL_ONLY else StreamedRequest
    request = request_class([seq], None, kind, TOKENS)
    StopStrings.attach(request, None)
    request.collector = collector = OutputCollector(kind)
    outputs.add([request])
    collector.put = lambda *counts: None  # so that all is in `new`
    for token_id in ids:
        if seq.finish_reason:
            break
        step, result = outputs.scheduler.schedule(), StepResult([token_id], {})
        outputs.process(step, result, outputs.scheduler.postprocess(step, result))
    (answer,) = request.output().outputs
    reference_form = len(answer.token_ids), answer.text, answer.finish_reason or "length", answer.stop_reason
    return reference_form, collector.new


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(include):
    """Across tokens, within one, overlapping, before min_tokens; in the whole text and in what is taken on the way."""
    rng = random.Random(1)
    seen = set()
    for _ in range(400):
        ids = rng.choices(range(2, len(TOKENS)), k=rng.randint(1, 12))
        stops = ["".join(rng.choices("aabé", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 5))]
        params = SamplingParams(
            max_tokens=len(ids),
            min_tokens=rng.randint(0, min(3, len(ids))),
            include_stop_str_in_output=include,
            stop=stops,
            stop_token_ids=rng.choice([(), (9,)]),
        )
        expected = reference(ids, params)
        for kind in OutputKind:
            answer, output = run(params, ids, kind)
            assert answer == expected, (ids, params)
            if kind is OutputKind.DELTA:
                assert "".join(event.text for event in output.events) == expected[1]
                reasons = [event.finish_reason for event in output.events[-2:]]
                assert reasons == [None, expected[2]][-len(output.events) :]
            if kind is OutputKind.TOKENS:
                assert [token_id for _, token_id in output.new_tokens] == ids[: expected[0]]
        seen.add((expected[2], type(expected[3])))
    assert len(seen) == 3


def test_only_what_may_be_cut_is_held_back():
    _, output = run(SamplingParams(stop="bba"), [2, 3, 3, 3, 7, 8, 3, 2, 3], OutputKind.DELTA)
    assert [event.text for event in output.events] == ["a", "", "", "b", "", "bbé", "", "ba", ""]


@pytest.mark.parametrize("stop", ["never to be found", ("never", "to be found")])
def test_time_is_linear_in_the_text(stop):

    def seconds(num_tokens: int) -> float:
        token_ids, params = [0], SamplingParams(stop=stop)
        token_bytes = Pieces({0: b"", 1: b"word " * 8})
        detokenizer = StoppingDetokenizer(token_ids, 1, token_bytes, params)
        begin = process_time()
        for _ in range(num_tokens):
            token_ids.append(1)
            detokenizer.cut_at_stop()
            detokenizer.take_text()
        return process_time() - begin

    assert_grows_less(30, seconds, 4_000, 40_000, rounds=3)  # and not 100
