"""What --help shows: cyclopts' screens, each explanation in paragraphs, wherever its source breaks a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel, InlineText
    from rich.console import Console, ConsoleOptions


class HelpScreen:
    """cyclopts' own formatter, given such explanations; imported where help is asked for, as it takes a while."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Show a group of options or commands."""
        from cyclopts.help import DefaultFormatter

        DefaultFormatter()(console, options, panel.copy(entries=[_in_paragraphs(entry) for entry in panel.entries]))

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Show how the command is called."""
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Show what the command does."""
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_description(
            console, options, _paragraphs(description) if description else description
        )


def _in_paragraphs(entry: HelpEntry) -> HelpEntry:
    """The entry with such an explanation; an empty default says nothing that the explanation does not."""
    return entry.copy(
        description=_paragraphs(entry.description), default=None if entry.default == "()" else entry.default
    )


def _paragraphs(explanation: InlineText) -> InlineText:
    from cyclopts.help import InlineText
    from rich.text import Text

    text = explanation.primary_renderable
    assert isinstance(text, Text), "the program's help_format is plaintext"
    paragraphs = "\n\n".join(" ".join(part.split()) for part in text.plain.split("\n\n"))
    return InlineText(Text(paragraphs), force_empty_end=explanation.force_empty_end)
