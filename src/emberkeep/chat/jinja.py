"""A template's source made to run, and what is said when it cannot."""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import TemplateError

from emberkeep.chat.budget import MAX_OUTPUT, OutOfBudget, budget
from emberkeep.chat.sandbox import compile_template
from emberkeep.chat.traits import Traits, find_traits
from emberkeep.errors import TemplateFailed
from emberkeep.types import Json


class JinjaTemplate:
    """Runs its source in this process, where nothing can stop a long step of it: foreign ones belong in a worker
    (`render_pool`).

    Raises TemplateFailed when `source` is not a template.
    """

    def __init__(self, source: str) -> None:
        try:
            self._template = compile_template(source)
        except MemoryError as error:
            raise stopped("it needs too much memory") from error
        # Foreign code: Jinja, Python's parser and its recursion limit all have their say.
        except Exception as error:
            raise TemplateFailed(f"The model's chat template is not valid Jinja: {_reason(error)}.") from error

    def render(self, values: Mapping[str, Json], seconds: float, most: int = MAX_OUTPUT) -> str:
        """At most `most` characters, within `seconds` unless one step takes longer. Raises TemplateFailed."""
        try:
            with budget(seconds):
                text = self._template.render(values)
        except OutOfBudget as error:
            raise stopped(str(error)) from error
        except MemoryError as error:
            raise stopped("it needs too much memory") from error
        # Foreign code may fail in any way; all of them mean that it cannot write these messages.
        except Exception as error:
            raise TemplateFailed(
                f"The model's chat template refused these messages ({_reason(error)}): "
                "change them to what it expects.",
                "messages",
            ) from error
        if len(text) > MAX_OUTPUT:
            raise TemplateFailed("The prompt is too long to be tokenised: shorten the messages.", "messages")
        if len(text) > most:
            raise stopped("it builds more text than is allowed")
        return text

    def traits(self, specials: Mapping[str, str], seconds: float) -> Traits:
        """Never raises: a template that writes nothing has few of them."""
        return find_traits(self.render, specials, seconds)


def stopped(reason: str) -> TemplateFailed:
    return TemplateFailed(f"The model's chat template was stopped: {reason}.", "messages")


def _reason(error: Exception) -> str:
    """The first line of a foreign error, short enough for one sentence."""
    text = error.message if isinstance(error, TemplateError) else str(error)
    line = (text or type(error).__name__).strip().partition("\n")[0]
    return line[:200].rstrip(".")
