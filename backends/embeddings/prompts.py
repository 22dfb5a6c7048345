"""What a request says its texts are -> the text that the model wants before them, and the way that they take in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from backends.embeddings.messages import EmbedOptions
from common.errors import InvalidRequest

Task: TypeAlias = Literal["query", "document"]

# By task, the names that models give to their prompts and other servers to `input_type`. The first that a model has a
# prompt for counts.
NAMES: Final[Mapping[Task, tuple[str, ...]]] = {
    "query": ("query", "search_query", "retrieval.query", "s2p_query"),
    "document": ("document", "passage", "corpus", "search_document", "retrieval.passage"),
}


class Purpose(NamedTuple):
    """Texts with the same purpose can be computed together."""

    prompt: str = ""  # put before each text
    task: Task | None = None  # for models with a part for queries and one for documents


def find_purpose(prompts: Mapping[str, str], default: str | None, options: EmbedOptions) -> Purpose:
    """
    Args:
        prompts: of the model, by name.
        default: name of the one for texts of which nothing is said.
        options: `input_type` and `prompt_name` count.

    Raises:
        InvalidRequest: the model has no such prompt.
    """
    if options.prompt_name is not None:
        return Purpose(_named(prompts, options.prompt_name, "prompt_name"), _task_of(options.prompt_name))
    if options.input_type is None:
        return Purpose(prompts.get(default, "") if default is not None else "")
    task = _task_of(options.input_type)
    if task is None or prompts.get(options.input_type):
        return Purpose(_named(prompts, options.input_type, "input_type"), task)
    # As sentence-transformers has it: a model without such a prompt takes queries and documents alike.
    return Purpose(next((prompts[name] for name in NAMES[task] if prompts.get(name)), ""), task)


def _named(prompts: Mapping[str, str], name: str, param: str) -> str:
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise InvalidRequest(f"{param} {name!r} is none of the model's prompts; it has: {known}.", param=param)
    return prompts[name]


def _task_of(name: str) -> Task | None:
    return next((task for task, names in NAMES.items() if name in names), None)
