"""How byte-level vocabularies in GGUF files cut text into words before BPE: by the names in `tokenizer.ggml.pre`.

A file does not hold the expressions of its original tokenizer.json, only llama.cpp's name for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

LETTER_CASES = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REST_WITH_SLASH = REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
CL100K = rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
QWEN35 = rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{REST.replace('{L}', '{L}' + chr(92) + 'p{M}')}"
SEED_CODER = rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def _by_case(ending: str, digits: str) -> str:
    """Words that begin a new one at a capital after small letters."""
    upper, lower = LETTER_CASES
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}|{digits}|{REST_WITH_SLASH}"


TEKKEN = _by_case("", r"\p{N}")
GPT4O = _by_case(f"{ENGLISH}?", r"\p{N}{1,3}")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How one kind of vocabulary is used.

    Attributes:
        splits: expressions that cut a text one after the other, each what the last one left.
        takes_whole_words: whether a word that is a token becomes that token, whatever the merges would make of it.
        adds_bos: whether texts begin with the bos token where a file does not say.
        composes: whether the text is brought into Unicode's composed form (NFC).
    """

    splits: tuple[str, ...]
    takes_whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Cut a text, then spell its bytes in GPT-2's letters; a last cut by GPT-2's expression is part of the spelling."""
        ends_in_gpt2 = self.splits[-1] == GPT2
        splits = self.splits[:-1] if ends_in_gpt2 else self.splits
        cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=ends_in_gpt2)
        return pre_tokenizers.Sequence([*cuts, spelling]) if cuts else spelling

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to a text before it is cut."""
        return normalizers.NFC() if self.composes else None


def _named(names: str, pre_tokenizer: PreTokenizer) -> Iterable[tuple[str, PreTokenizer]]:
    return ((name, pre_tokenizer) for name in names.split())


PRE_TOKENIZERS: dict[str, PreTokenizer] = dict(
    [
        *_named("default", PreTokenizer(splits=DEFAULT)),
        *_named("gpt-2 phi-2 mpt olmo jais trillion granite-docling", PreTokenizer(splits=(GPT2,))),
        *_named("gigachat a.x-4.0 mellum exaone4 modern-bert", PreTokenizer(splits=(GPT2,))),
        *_named("smollm starcoder refact command-r codeshell exaone", PreTokenizer(splits=(r"\p{N}", GPT2))),
        *_named("minerva-7b mellum2", PreTokenizer(splits=(r"\p{N}", GPT2))),
        *_named(
            "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            PreTokenizer(splits=(CL100K,), takes_whole_words=True, adds_bos=True),
        ),
        *_named("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer(splits=(CL100K,))),
        *_named("qwen2", PreTokenizer(splits=(QWEN2,), composes=True)),
        *_named("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2", PreTokenizer(splits=(QWEN2,))),
        *_named("hunyuan grok-2 solar-open", PreTokenizer(splits=(QWEN2,))),
        *_named("qwen35", PreTokenizer(splits=(QWEN35,), composes=True)),
        *_named("tekken", PreTokenizer(splits=(TEKKEN,), takes_whole_words=True, adds_bos=True)),
        *_named("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(splits=(GPT4O,))),
        *_named("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer(splits=DEEPSEEK3)),
        *_named("deepseek-coder", PreTokenizer(splits=DEEPSEEK_CODER)),
        *_named("seed-coder", PreTokenizer(splits=(SEED_CODER,))),
        *_named("bailingmoe bailingmoe2 llada-moe", PreTokenizer(splits=(BAILING,))),
    ]
)
"""By the name in a file."""
