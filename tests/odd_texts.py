"""Texts on which tokenizers like to differ: spaces, digits, marks, scripts, special tokens, bytes of no text."""

from __future__ import annotations

import random

WRITTEN = (
    *("", "\n", " ", "  ", "\t", "a", "Hello world", "  leading", "trailing  ", "a  b   c    d", "\n\n1. x\n\n2. y"),
    *(
        "1234567 12 3",
        "x=  1;\t\ty",
        "don't I'LL we've",
        "he\u0301llo",
        "日本語のテキスト",
        "한국어",
        "العربية",
        "👩‍👩‍👧",
    ),
    *("<|im_start|>user\nhi<|im_end|>\n", "<end_of_turn>\n<start_of_turn>model\n", " <|im_end|> ", "\u200b\u200d"),
    *(
        "\x00\x01\x7f",
        "\r\n\r\n",
        "a\rb",
        "ＡＢＣ",
        "½①²",
        "naïve café — “quotes” …",
        "def f(x):\n    return x**2  # sq\n",
    ),
    *(
        "http://a.b/c?d=e&f=%20",
        "ß ſ ﬁ",
        "𝔘𝔫𝔦",
        "ǅ",
        "<bos>x<eos>",
        "<unk>",
        "<0x41>",
        "'s'S",
        "กขค",
        "...!!!???",
        "___",
    ),
    *("CamelCaseWORDSmall", "\u00a0nbsp\u3000wide", "\ufeffbom", "<unused0>", "\u2028x\u2029", "1\u0661\u06f1"),
)
CHARACTERS = " \nabeé12.,'sT日🙂\t_<>|\u0301\rع-"


def odd_texts(count: int = 600, seed: int = 0) -> list[str]:
    """The written texts, then random ones of few characters or of any; the same seed gives the same texts."""
    source = random.Random(seed)
    few = ["".join(source.choices(CHARACTERS, k=source.randrange(1, 30))) for _ in range(2 * count // 3)]
    any_ = [
        "".join(chr(source.randrange(1, 0x3000)) for _ in range(source.randrange(1, 12))) for _ in range(count // 3)
    ]
    return [*WRITTEN, *few, *(text.replace("\u2581", "") for text in any_)]
