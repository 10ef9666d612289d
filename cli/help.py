"""Help pages with options in groups and with examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """An option that knows under which heading it is listed."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def option(*names: str, group: str = "Options", **settings: Any) -> Callable[[F], F]:
    """`click.option`, listed under a heading."""
    return click.option(*names, cls=GroupedOption, group=group, **settings)


class Command(click.Command):
    """A command whose help lists options under headings and ends with examples.

    Args:
        examples: Command lines with what each does.
    """

    def __init__(self, *args: Any, examples: tuple[tuple[str, str], ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, heading by heading, in the order in which the headings first appear."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                last = next(reversed(groups), "Options")  # --help, which click adds, comes last
                groups.setdefault(getattr(param, "group", last), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples."""
        if self.examples:
            with formatter.section("Examples"):
                for line, what in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}# {what}\n")
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
