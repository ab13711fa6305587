"""Prompts of benchmarks: built-in texts to speculate on, and random tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.llm import LLM
    from forerun.models.tokenizer import Tokenizer

_STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, value):
        self.items.append(value)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items[-1]

    def size(self):
        return len(self.items)
"""

_TEMPERATURE = '''def to_fahrenheit(celsius):
    """Convert a temperature from Celsius to Fahrenheit."""
    return celsius * 9 / 5 + 32


def to_celsius(fahrenheit):
    """Convert a temperature from Fahrenheit to Celsius."""
    return (fahrenheit - 32) * 5 / 9


def describe(celsius):
    """Say in one word how warm it is."""
    if celsius < 0:
        return "freezing"
    if celsius < 15:
        return "cold"
    if celsius < 25:
        return "mild"
    return "warm"
'''

_INVOICE = '''def total_price(items, tax_rate):
    """Sum the prices of all items and add the tax."""
    total = 0
    for item in items:
        total += item["price"] * item["quantity"]
    return round(total * (1 + tax_rate), 2)


def print_invoice(customer, items, tax_rate):
    """Print one line per item and the total."""
    print("Invoice for", customer)
    for item in items:
        print(item["name"], item["quantity"], item["price"])
    print("Total:", total_price(items, tax_rate))
'''

_QUEUE = """class Queue:
    def __init__(self, capacity):
        self.capacity = capacity
        self.entries = []

    def is_full(self):
        return len(self.entries) >= self.capacity

    def enqueue(self, entry):
        if self.is_full():
            raise OverflowError("the queue is full")
        self.entries.append(entry)

    def dequeue(self):
        if not self.entries:
            raise LookupError("the queue is empty")
        return self.entries.pop(0)
"""

_HARBOUR = (
    "The old harbour of Lindvik lies on the western shore of the fjord. It was built in 1846 by the merchant Anna Solberg, "
    "who had bought three ships the year before and needed a place to unload salt and grain. The harbour has two piers, a "
    "lighthouse of red brick, and a row of seven wooden warehouses. In 1902 a fire destroyed four of the warehouses; they "
    "were rebuilt in stone. Today the lighthouse is a museum, and the stone warehouses hold workshops for boat builders."
)

_BEES = (
    "Honey bees tell each other where to find food by dancing. A bee that has found flowers returns to the hive and walks "
    "in a figure of eight on the comb. The angle of the middle line against the vertical is the angle between the flowers "
    "and the sun. The longer the bee waggles on the middle line, the farther away the flowers are. Other bees follow the "
    "dance with their antennae, then fly out and find the flowers themselves."
)


def _edit(code: str, wish: str) -> str:
    return f"{wish} Answer with the whole file and nothing else.\n\n```python\n{code}```"


WORKLOADS: dict[str, list[str]] = {
    "code edit": [
        _edit(_STACK, "Rename the class Stack to Pile in this file."),
        _edit(_TEMPERATURE, "Rename the function describe to feeling in this file."),
        _edit(_INVOICE, "Rename the parameter tax_rate to vat in this file."),
        _edit(_QUEUE, "Rename the method enqueue to put in this file."),
    ],
    "from a text": [
        f"Copy this text and replace the name Lindvik by Solvik:\n\n{_HARBOUR}",
        f"List the facts of this text, one per line, in its own words:\n\n{_HARBOUR}",
        f"Summarise this text in three sentences:\n\n{_BEES}",
        f"Answer from the text. How do bees show the distance to the flowers? Quote the sentence.\n\n{_BEES}",
    ],
    "chat": [
        "What should I see in Lisbon in two days?",
        "Explain to a child why the sea is salty.",
        "Write a short story about a lighthouse keeper who finds a letter.",
        "Give me three ideas for a quick dinner with eggs.",
    ],
}
"""Kind of prompts -> user messages. Answers to the first two kinds repeat much of the prompt, those of chat little."""


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation, or of a text, which is a user message if the model has a chat template.

    Raises:
        RequestError: a conversation is given and there is no template, or the template refuses it.
    """
    if not isinstance(prompt, str):
        return tokenizer.apply_chat_template(prompt)
    if not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])


def check_room(prompts: Mapping[str, Sequence[Sequence[int]]], num_tokens: int, *, most: int) -> None:
    """Refuse prompts whose answers an engine would cut off.

    Args:
        prompts: kind -> token ids of each prompt.
        num_tokens: of each answer.
        most: tokens of a prompt and its answer.

    Raises:
        ConfigError: there is one; the message names it.
    """
    for kind, of_kind in prompts.items():
        for number, ids in enumerate(of_kind, 1):
            if len(ids) + num_tokens > most:
                raise ConfigError(
                    f"prompts: prompt {number} of {kind!r} has {len(ids)} tokens, and its answer {num_tokens}; max_model_len is "
                    f"{most}, which is the most in sum: shorten it or leave it out, or ask for fewer max_tokens"
                )


def random_prompts(llm: LLM, count: int, *, input_len: int, output_len: int) -> list[list[int]]:
    """`count` prompts of `input_len` random tokens, drawn with the engine's seed.

    Raises:
        ConfigError: prompt and output are longer than the engine's sequences, which would cut the output off.
    """
    if input_len + output_len > llm.max_model_len:
        raise ConfigError(
            f"input_len, output_len: got {input_len} + {output_len} tokens; max_model_len is {llm.max_model_len}; "
            "ask for less or raise max_model_len"
        )
    random = np.random.default_rng(llm.settings.seed)
    vocab_size = llm.executor.model.vocab_size
    prompts: list[list[int]] = random.integers(vocab_size, size=(count, input_len)).tolist()
    return prompts
