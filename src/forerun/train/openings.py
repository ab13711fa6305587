"""Words with which an invented question may begin, so that a small model does not ask the same few things again and again.

They name kinds of tasks, never a subject: the model goes on from them as it likes.
"""

from __future__ import annotations

import random

OPENINGS = {
    "write": (
        "Write a short story about",
        "Write a poem about",
        "Write an email to",
        "Write a blog post about",
        "Write a letter",
        "Write a speech",
        "Write a dialogue between",
        "Write a product description for",
        "Write the first paragraph of",
        "Write a review of",
        "Write an essay on",
        "Draft a",
        "Create an outline for",
    ),
    "explain": (
        "Explain",
        "Explain how",
        "Explain to a child",
        "Explain the difference between",
        "What is",
        "What are the",
        "What is the difference between",
        "What causes",
        "What happens when",
        "Why do",
        "Why is",
        "How does",
        "How did",
        "Describe",
        "Describe the",
        "Who was",
        "When did",
        "Tell me about",
        "Can you explain",
    ),
    "advise": (
        "How do I",
        "How can I",
        "What should I",
        "Should I",
        "I want to",
        "I need help with",
        "I'm trying to",
        "I have a",
        "I am planning",
        "Give me tips",
        "Give me some ideas for",
        "Suggest",
        "Recommend",
        "Help me",
        "Plan a",
        "List",
        "List five",
        "What are some ways to",
        "What are the advantages and disadvantages of",
        "Compare",
    ),
    "reason": (
        "Solve",
        "Calculate",
        "If a",
        "Suppose that",
        "A train",
        "A farmer",
        "There are",
        "How many",
        "What is the probability",
        "What is the value of",
        "Prove that",
        "Is it true that",
        "Which of the following",
        "Find the",
        "John has",
        "Sarah buys",
    ),
    "code": (
        "Write a Python function that",
        "Write a Python program to",
        "Write a JavaScript function",
        "Write a SQL query",
        "Write a C++ program",
        "Write a regular expression",
        "Write an HTML page",
        "Write a shell script",
        "Implement",
        "How do I implement",
        "What does this code do?\n\n```python\n",
        "Fix the error in this code:\n\n```python\n",
        "Explain the following code:\n\n```\n",
        "Refactor this function:\n\n```python\ndef",
        "I am working on a Python project",
    ),
    "transform": (
        "Summarize the following text:\n\n",
        "Summarize",
        "Rewrite the following sentence",
        "Rewrite this paragraph so that",
        "Correct the grammar of this text:\n\n",
        "Translate the following",
        "Extract",
        "Extract the names of all people from this text:\n\n",
        "Classify",
        "Identify the",
        "Given the following paragraph",
        "Read the passage and answer the question.\n\n",
        "Turn this list into",
        "Format the following as JSON:",
        "Here is a table",
        "Edit the following",
    ),
    "play": (
        "Pretend you are",
        "Imagine you are",
        "You are a",
        "Act as",
        "Let's play",
        "Hello",
        "Hi, I",
        "Do you think",
        "What do you think about",
        "What would happen if",
        "Tell me a joke",
        "Make up a",
    ),
}
"""By kind of task."""

SHARE_FREE = 0.25
"""Of the conversations: those whose question begins as the model likes."""


def draw_opening(chance: random.Random) -> str:
    """Draw how a question begins; each kind is as likely as the others, "" is the model's own choice."""
    if chance.random() < SHARE_FREE:
        return ""
    return chance.choice(OPENINGS[chance.choice(sorted(OPENINGS))])
