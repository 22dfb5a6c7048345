"""The places in a chat's prompt where prompts really change: at the beginnings of messages, or where a client says.

What a template writes of a conversation does not say where its messages are. So it is rendered once more, with a mark
at each place that matters, and what stands before each mark is compared with the prompt. A mark that changes what is
written before it tells nothing: its place is left out.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Final, TypeAlias
from uuid import uuid4

from pydantic import Field, StrictInt

from common.config_models import PAGE_TOKENS
from common.conversations import SYSTEM_ROLES, Message, Place
from common.errors import InvalidRequest
from common.prefixes import Seam, WrittenPrompt, common_length
from common.splicing import Render

MAX_BOUNDARIES: Final = 16  # of one request; each one takes room that checkpoints of other prompts could have

CacheBoundaries: TypeAlias = Annotated[list[StrictInt], Field(max_length=MAX_BOUNDARIES)]  # as requests give them


def check_boundaries(boundaries: Sequence[int], lowest: int, highest: int, meaning: str) -> None:
    """Refuse those of a request that are out of range.

    Args:
        meaning: of a number in that range, for the error.
    """
    for place, boundary in enumerate(boundaries):
        if not lowest <= boundary <= highest:
            raise InvalidRequest(
                f"cache_boundaries.{place} is {boundary}, but must be from {lowest} to {highest}: {meaning}.",
                param=f"cache_boundaries.{place}",
            )


def can_have_any(prompt: str) -> bool:
    """Whether a prompt may have a page, at whose end checkpoints stand. A token stands for a byte at least."""
    return len(prompt) >= PAGE_TOKENS or len(prompt.encode()) >= PAGE_TOKENS


def turning_points(messages: Sequence[Message], user_turns: int) -> set[int]:
    """Indexes of the messages at whose beginnings the prompts of chats differ most often.

    They are the first one after the system prompt, since chats of one client have that and the tools in common, and
    those that begin the last turns of the user, which are edited, sent again, or go on from another answer.

    Args:
        user_turns: how many of those; several messages of the user in a row are one. 0: no turning points at all.
    """
    first = next((index for index, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), None)
    if first is None or not user_turns:
        return set()
    roles = [None, *(message["role"] for message in messages)]
    turns = [index for index, (before, role) in enumerate(pairwise(roles)) if before != "user" == role]
    return {first, *turns[-user_turns:]}


# --- in the text of the template ----------------------------------------------------------------------------------


def starts_kept(earlier: WrittenPrompt, prompt: str) -> dict[Place, int]:
    """The starts that are known of an earlier prompt of a conversation and are the same in this one."""
    same = common_length(earlier.plain, prompt) if earlier.starts else 0
    return {place: start for place, start in earlier.starts.items() if start <= same}


def starts_of(
    messages: Sequence[Message], places: Collection[Place], prompt: str, render: Render, known: Mapping[Place, int]
) -> dict[Place, int]:
    """Where the texts of some places begin in a prompt: characters before them.

    Up to there a prompt stays as it is whatever that text becomes. Those that cannot be told are left out.

    Args:
        prompt: what the template makes of the whole conversation.
        render: called once, if not all are known.
    """
    starts = {place: known[place] for place in places if place in known}
    if unknown := [place for place in places if place not in known]:
        starts |= _found(messages, unknown, prompt, render)
    return starts


def _found(messages: Sequence[Message], places: Collection[Place], prompt: str, render: Render) -> dict[Place, int]:
    mark = str(uuid4().int)  # which nobody can have put into a message, and no template writes in another way
    ordered = sorted(places)
    marked = list(messages)
    for number, (index, characters) in reversed(list(enumerate(ordered))):  # so that no mark moves a later place
        marked[index] = _marked(marked[index], f"{mark}_{number}_", characters)
    with suppress(InvalidRequest):  # the template refuses a text there
        starts = _starts(render(marked, whole=True).text, prompt, re.compile(rf"{mark}_(\d+)_"))
        return {ordered[number]: start for number, start in starts.items()}
    return {}


def _marked(message: Message, mark: str, characters: int) -> Message:
    """With a mark in its content; at its beginning also before its thought, which only some templates show."""
    if characters:
        content = message.get("content") or ""
        return {**message, "content": content[:characters] + mark + content[characters:]}
    shown = [name for name in ("reasoning_content", "content") if message.get(name)] or ["content"]
    return {**message, **{name: mark + (message.get(name) or "") for name in shown}}


def _starts(marked: str, prompt: str, mark: re.Pattern[str]) -> dict[int, int]:
    """The first place of each mark in a prompt that has none, as far as the two texts agree."""
    starts: dict[int, int] = {}
    place = end = 0
    for match in mark.finditer(marked):
        between = marked[end : match.start()]
        if end:
            between = between[_kept_blanks(between, prompt, place) :]
        if not prompt.startswith(between, place):
            break
        place += len(between)
        end = match.end()
        starts.setdefault(int(match[1]), place)
    return starts


def _kept_blanks(text: str, prompt: str, place: int) -> int:
    """Blanks at the beginning of a text that a mark before them has kept from being trimmed, as in the prompt."""
    blanks = len(text) - len(text.lstrip())
    here = prompt[place : place + blanks]
    return blanks - (len(here) - len(here.lstrip()))


# --- in the text that is sent -------------------------------------------------------------------------------------


def sent_starts(written: WrittenPrompt) -> list[int]:
    """Where texts begin in a prompt as it is sent, in order; those of which that is known.

    Left out are those in a stretch for which the model's own text stands, unless it begins with the same.
    """
    return sorted({sent for place in written.starts.values() for sent in _sent(written, place)})


def _sent(written: WrittenPrompt, place: int) -> Iterator[int]:
    seams = [Seam(0, 0), *written.seams, Seam(len(written.plain), len(written.prompt.text))]
    after = bisect_right(seams, place, hi=len(seams) - 1, key=lambda seam: seam.plain)
    plain, sent = seams[after - 1]
    found = sent + place - plain
    if found <= seams[after].sent and written.prompt.text[sent:found] == written.plain[plain:place]:
        yield found
