"""Prompts written to measure speculation with: edits of code, questions about a text, chat."""

from __future__ import annotations

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
"""Workload -> user messages. In the first two much of the answer stands in the prompt; in chat little does."""
