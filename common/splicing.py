"""Prompts that go on from the last answer exactly as the model gave it.

A client sends an answer back as it got it: without its thought maybe, its arguments written anew. What the template
makes of that seldom is what the model wrote. Where both say the same, the model's own text takes the place of the
template's, after the prompt that it was the answer to, so that the engine has nothing to process again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Final, Protocol

from common.control_text import ControlStrings
from common.conversations import Message
from common.errors import InvalidRequest
from common.generation import TextSpan
from common.prefixes import Answer, Outline, Returned, Seam, WrittenPrompt, common_length, digest_of
from common.templating import RenderedPrompt

_MARK: Final = "CONTENTOFTHENEXTMESSAGE"


class Render(Protocol):
    def __call__(self, messages: Sequence[Message], /, *, whole: bool) -> RenderedPrompt:
        """What the template makes of some messages of a conversation.

        Args:
            whole: all of them are there, and the prompt ends as the request wants it; otherwise it ends with the last.
        """


def with_thoughts(messages: Sequence[Message], outline: Outline, returned: Returned) -> list[Message]:
    """The messages, with the thoughts that the client has left out of them."""
    earlier, position = returned.earlier.turn.messages, returned.position
    pairs = zip(outline.digests[:position], earlier.digests, earlier.thoughts, strict=False)
    thoughts = [thought if now == then else None for now, then, thought in pairs]
    thoughts += [None] * (position - len(thoughts)) + [returned.earlier.thought]
    return [
        {**message, "reasoning_content": thought} if thought and not message.get("reasoning_content") else message
        for message, thought in zip_longest(messages, thoughts)
    ]


def write_prompt(
    messages: Sequence[Message], returned: Returned, render: Render, control: ControlStrings
) -> WrittenPrompt:
    """The prompt of a conversation in which the text of the model stands wherever the template says the same.

    Args:
        messages: with all thoughts.
        returned: the last answer among them that is known.
        control: strings of the tokenizer's control tokens.

    Raises:
        InvalidRequest: the template refuses the conversation.
    """
    earlier = returned.earlier.turn.written
    now = render(messages, whole=True)
    # Up to where nothing has changed, what was sent for it then does for it now.
    same = common_length(earlier.plain, now.text)
    seams = [seam for seam in earlier.seams if seam.plain <= same]
    begun = earlier.prompt
    with suppress(InvalidRequest):  # the template takes the conversation as a whole only
        if (turn := _answer_and_rest(messages, returned, now, render, control)) is not None:
            answer, rest, end = turn
            text = begun.text + answer.text
            literals = [*begun.literals, *_shifted(answer.literals, len(begun.text))]
            begun = RenderedPrompt(text + rest, [*literals, *_between(now, end - len(rest), end, len(text))], [])
            seams = [*seams, Seam(end, len(begun.text))]
    if not seams:
        return WrittenPrompt.by_template(now)
    plain, sent = seams[-1]
    literals = [span for span in begun.literals if span[1] <= sent]
    literals += _between(now, plain, len(now.text), sent)
    return WrittenPrompt(now._replace(text=begun.text[:sent] + now.text[plain:], literals=literals), now.text, seams)


def _answer_and_rest(
    messages: Sequence[Message], returned: Returned, now: RenderedPrompt, render: Render, control: ControlStrings
) -> tuple[Answer, str, int] | None:
    """The answer, what the template writes after it, and where in a prompt that ends.

    None where the answer would not be what the template shows in its place: something before it has changed, or is
    shown in another way now; or the template leaves the answer or its thought out.
    """
    earlier, position = returned.earlier, returned.position
    if position + 1 >= len(messages) or not returned.is_unchanged:
        return None
    before = render(messages[:position], whole=False)
    if digest_of(before) != earlier.base or not now.text.startswith(before.text):
        return None
    marked = list(messages)
    marked[position + 1] = {**messages[position + 1], "content": _MARK}
    up_to_next, found, _ = render(marked, whole=True).text.partition(_MARK)
    if not found or not now.text.startswith(up_to_next):
        return None
    rest = _rest_of_turn(up_to_next[len(before.text) :], earlier.answer, control)
    return None if rest is None else (earlier.answer, rest, len(up_to_next))


def _rest_of_turn(shown: str, answer: Answer, control: ControlStrings) -> str | None:
    """What a template writes after an answer; None where it does not show all of that.

    Args:
        shown: what it has written from the end of the messages before the answer to the content of the one after it.
    """
    message = answer.message
    content = (message.get("content") or "").strip()
    thought = (message.get("reasoning_content") or "").strip()
    if content not in shown or thought not in shown:
        return None
    # It ends where the answer does, of which the template may have written the beginning in another way.
    written = answer.text.rstrip()
    length = _longest_end(written, shown)
    if not length:
        return None
    rest = shown[shown.rindex(written[-length:]) + length :]
    if message.get("tool_calls"):
        token = next(control.spans(rest.lstrip()), None)
        is_end = token is not None and token[0] == 0
    else:
        is_end = bool(content) and length >= min(len(content), len(written))
    return rest.removeprefix(answer.text[len(written) :]) if is_end else None


def _longest_end(text: str, other: str) -> int:
    """Length of the longest end of a text that stands in another one."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[-middle:] in other:
            low = middle
        else:
            high = middle - 1
    return low


def _between(prompt: RenderedPrompt, start: int, end: int, place: int) -> list[TextSpan]:
    """The literals of a part of a prompt that is moved to another place."""
    return _shifted([span for span in prompt.literals if start <= span[0] and span[1] <= end], place - start)


def _shifted(spans: Sequence[TextSpan], by: int) -> list[TextSpan]:
    return [(start + by, end + by) for start, end in spans]
