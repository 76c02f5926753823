"""The Jinja environment: delimiters that leave CUDA readable, undefined names as errors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2

PACKAGE = Path(__file__).resolve().parent.parent


def templates() -> Path:
    """The templates' folder: inside the installed package, or beside it in a checkout."""
    for folder in (PACKAGE / "templates", PACKAGE.parent / "templates"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"templates are missing beside {PACKAGE}; install flashgen again")


@cache
def environment() -> jinja2.Environment:
    """The environment that all templates are parsed with."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates()),
        undefined=jinja2.StrictUndefined,
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        line_statement_prefix="//%",
        line_comment_prefix="//#",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def header(name: str) -> str:
    """The text of a device header."""
    return (templates() / "device" / name).read_text()
