"""Where messages begin in a prompt, by marks and through what was put in place of the template's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from common.boundaries import (
    can_have_any,
    check_boundaries,
    sent_starts,
    starts_kept,
    starts_of,
    turning_points,
)
from common.conversations import Message, Place
from common.errors import InvalidRequest
from common.prefixes import Seam, WrittenPrompt
from common.templating import RenderedPrompt


def said(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


class Template:
    """Shows each message as `show` does, given all of them and an index."""

    def __init__(self, show: Callable[[Sequence[Message], int], str]) -> None:
        self._show = show
        self.rendered = 0

    def __call__(self, messages: Sequence[Message], /, *, whole: bool) -> RenderedPrompt:
        assert whole
        self.rendered += 1
        text = "".join(self._show(messages, index) for index in range(len(messages)))
        return RenderedPrompt(text, [], [])


def plainly(messages: Sequence[Message], index: int) -> str:
    return f"<{messages[index]['role']}>{messages[index]['content']}</>"


def found(template: Template, messages: Sequence[Message], *indexes: int) -> dict[int, str]:
    """What stands from each start on."""
    prompt = template(messages, whole=True).text
    starts = starts_of(messages, [Place(index) for index in indexes], prompt, template, {})
    return {place.message: prompt[start:] for place, start in starts.items()}


CHAT = [said("system", "s"), said("user", "one"), said("assistant", "yes"), said("user", "two")]


# --- which messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "user_turns", "expected"),
    [
        ("s u", 2, {1}),
        ("u a u a u", 2, {0, 2, 4}),
        ("s u a u a u", 1, {1, 5}),
        ("s u a u a u", 9, {1, 3, 5}),
        ("s d u a u", 2, {2, 4}),
        ("s a u a u", 1, {1, 4}),  # a greeting
        ("s u a t a t a t", 2, {1}),
        ("s u a u a t a t a t", 2, {1, 3}),
        ("s u a u u u", 2, {1, 3}),  # several messages are one turn
        ("s u a u s u", 2, {1, 3, 5}),
        ("s u a u", 0, set()),
        ("s d", 2, set()),
        ("", 2, set()),
    ],
)
def test_turning_points(roles: str, user_turns: int, expected: set[int]) -> None:
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    assert turning_points([said(names[role], "x") for role in roles.split()], user_turns) == expected


@pytest.mark.parametrize(("character", "fewest"), [("x", 256), ("é", 128), ("\U0001f600", 64)])
def test_a_page_takes_as_many_bytes_as_it_has_tokens(character: str, fewest: int) -> None:
    assert can_have_any(character * fewest)
    assert not can_have_any(character * (fewest - 1))


@pytest.mark.parametrize("boundary", [-4, 3])
def test_a_boundary_out_of_range_is_named(boundary: int) -> None:
    check_boundaries([-3, 2], -3, 2, "an index")
    with pytest.raises(InvalidRequest) as caught:
        check_boundaries([0, boundary], -3, 2, "an index")
    assert caught.value.message == f"cache_boundaries.1 is {boundary}, but must be from -3 to 2: an index."
    assert caught.value.param == "cache_boundaries.1"


# --- where they begin -------------------------------------------------------------------------------------------------


def test_messages_begin_after_their_headers() -> None:
    template = Template(plainly)
    assert found(template, CHAT, 1, 3) == {1: "one</><assistant>yes</><user>two</>", 3: "two</>"}
    assert template.rendered == 2
    assert found(template, CHAT) == {}
    assert template.rendered == 3


@pytest.mark.parametrize("content", ["one", " one", "\n\n one \n", "", " ", "\n"])
def test_blanks_that_a_template_trims(content: str) -> None:
    messages = [said("user", content), said("assistant", " yes"), said("user", " \ttwo")]

    def trimmed(messages: Sequence[Message], index: int) -> str:
        return f"<{messages[index]['role']}>\n{messages[index]['content'].strip()}\n</>"

    def half_trimmed(messages: Sequence[Message], index: int) -> str:
        return plainly([said("user", message["content"].removeprefix("\n")) for message in messages], index)

    assert found(Template(trimmed), messages, 0, 1, 2) == {
        0: f"{content.strip()}\n</><assistant>\nyes\n</><user>\ntwo\n</>",
        1: "yes\n</><user>\ntwo\n</>",
        2: "two\n</>",
    }
    starts = found(Template(half_trimmed), messages, 0, 2)
    assert starts == {0: content.removeprefix("\n") + "</><user> yes</><user> \ttwo</>", 2: " \ttwo</>"}
    starts = found(Template(plainly), messages, 0, 1, 2)
    assert starts[0] == content + "</><assistant> yes</><user> \ttwo</>"
    assert starts[2] == " \ttwo</>"


def test_a_thought_is_a_beginning_where_it_is_shown() -> None:
    messages = [said("user", "x"), said("assistant", "yes", reasoning_content="why"), said("user", "y")]

    def with_thought(messages: Sequence[Message], index: int) -> str:
        return f"{{{messages[index].get('reasoning_content', '')}}}{plainly(messages, index)}"

    assert found(Template(with_thought), messages, 1, 2) == {1: "why}<assistant>yes</>{}<user>y</>", 2: "y</>"}
    assert found(Template(plainly), messages, 1, 2) == {1: "yes</><user>y</>", 2: "y</>"}


def test_a_message_of_calls_alone_begins_where_its_text_would() -> None:
    messages = [said("user", "x"), said("assistant", None, tool_calls=["ls"]), said("tool", "a b")]

    def with_calls(messages: Sequence[Message], index: int) -> str:
        message = messages[index]
        return f"<{message['role']}>{message['content'] or ''}{''.join(message.get('tool_calls', []))}</>"

    assert found(Template(with_calls), messages, 0, 1) == {
        0: "x</><assistant>ls</><tool>a b</>",
        1: "ls</><tool>a b</>",
    }


def test_what_a_mark_changes_is_left_out() -> None:
    def looks_ahead(messages: Sequence[Message], index: int) -> str:
        results = sum(message["content"].startswith("[result]") for message in messages)
        return f"{results if index == 2 else ''}{plainly(messages, index)}"

    messages = [*CHAT[:3], said("user", "[result]"), said("user", "two")]
    assert list(found(Template(looks_ahead), messages, 1, 3, 4)) == [1]  # the second user's message would change it
    assert list(found(Template(looks_ahead), messages, 1, 4)) == [1, 4]


def test_a_message_that_is_not_shown_has_no_place() -> None:
    def forgetful(messages: Sequence[Message], index: int) -> str:
        return plainly(messages, index) if index != 1 else ""

    assert found(Template(forgetful), CHAT, 1, 3) == {3: "two</>"}


def test_a_message_that_is_shown_twice_begins_at_the_first() -> None:
    def titled(messages: Sequence[Message], index: int) -> str:
        return f"# {messages[-1]['content']}\n" + plainly(messages, index) if index == 0 else plainly(messages, index)

    assert found(Template(titled), CHAT, 1, 3) == {
        3: "two\n<system>s</><user>one</><assistant>yes</><user>two</>",
        1: "one</><assistant>yes</><user>two</>",
    }


def test_a_template_that_refuses_a_mark() -> None:
    def strict(messages: Sequence[Message], index: int) -> str:
        if len(messages[index]["content"]) > 5:
            raise InvalidRequest("too long")
        return plainly(messages, index)

    assert found(Template(strict), CHAT, 1) == {}


def test_the_same_texts_everywhere() -> None:
    messages = [said("user", "x"), said("assistant", "x"), said("user", "x")]
    assert found(Template(plainly), messages, 0, 2) == {0: "x</><assistant>x</><user>x</>", 2: "x</>"}


def test_what_is_known_is_not_looked_for() -> None:
    template = Template(plainly)
    prompt = template(CHAT, whole=True).text
    first, second = Place(1), Place(3)
    assert starts_of(CHAT, [first, second], prompt, template, {Place(0): 1, first: 2, second: 4}) == {
        first: 2,
        second: 4,
    }
    assert template.rendered == 1
    assert starts_of(CHAT, [first, second], prompt, template, {first: 2}) == {first: 2, second: prompt.index("two")}
    assert template.rendered == 2


@pytest.mark.parametrize("trims", [False, True])
def test_places_inside_messages(trims: bool) -> None:
    def show(messages: Sequence[Message], index: int) -> str:
        content = messages[index]["content"]
        return f"<{messages[index]['role']}>{content.strip() if trims else content}</>"

    messages = [said("user", "  doc\n\nask"), said("assistant", "yes"), said("user", "a b")]
    template = Template(show)
    prompt = template(messages, whole=True).text
    places = [Place(2, 2), Place(0, 7), Place(0), Place(2, 1), Place(2)]
    starts = starts_of(messages, places, prompt, template, {})
    assert {place: prompt[start:] for place, start in starts.items()} == {
        Place(0): ("" if trims else "  ") + "doc\n\nask</><assistant>yes</><user>a b</>",
        Place(0, 7): "ask</><assistant>yes</><user>a b</>",
        Place(2): "a b</>",
        Place(2, 1): " b</>",
        Place(2, 2): "b</>",
    }
    assert template.rendered == 2


def test_what_stays_known_in_the_next_prompt() -> None:
    earlier = WrittenPrompt(RenderedPrompt("", [], []), "<s>a<u>b<u>c", starts={Place(1): 7, Place(2): 11})
    assert starts_kept(earlier, "<s>a<u>b<u>c and more") == {Place(1): 7, Place(2): 11}
    assert starts_kept(earlier, "<s>a<u>b<u>other") == {Place(1): 7, Place(2): 11}
    assert starts_kept(earlier, "<s>a<u>other") == {Place(1): 7}
    assert starts_kept(earlier, "<s>other") == {}
    assert starts_kept(earlier._replace(starts={}), "<s>a") == {}


# --- through the seams ------------------------------------------------------------------------------------------------

PLAIN = "<u>one</><a>yes</><u>two</><a>[ls]</><t>ok</><u>three</>"
SENT = "<u>one</><a>{why} yes\n</><u>two</><a>ls</><t>ok</><u>three</>"
SEAMS = [Seam(PLAIN.index("two"), SENT.index("two")), Seam(PLAIN.index("ok"), SENT.index("ok"))]


def sent(*words: str, plain: str = PLAIN, text: str = SENT, seams: Sequence[Seam] = SEAMS) -> list[str]:
    starts = {Place(index): plain.index(word) for index, word in enumerate(words)}
    written = WrittenPrompt(RenderedPrompt(text, [], []), plain, seams, starts)
    return [text[place:] for place in sent_starts(written)]


def test_starts_in_the_text_of_the_template() -> None:
    beginnings = [SENT[SENT.index(word) :] for word in ("one", "two", "ok", "three")]
    assert sent("one", "two", "ok", "three") == beginnings
    assert sent("three", "two", "two") == [beginnings[1], beginnings[3]]
    assert sent("two", text=PLAIN, seams=[]) == [PLAIN[PLAIN.index("two") :]]
    assert sent() == []


def test_starts_in_the_text_of_the_model() -> None:
    # The model has written the same up to the answer, and something else inside of it.
    assert sent("yes</>") == [SENT[SENT.index("{why}") :]]
    assert sent("es</>") == []
    assert sent("]</><t>") == []


def test_a_start_past_the_end_of_the_models_text() -> None:
    plain, text = "<a>yes, yes</><u>two", "<a>yes</><u>two"
    seams = [Seam(plain.index("two"), text.index("two"))]
    assert sent("two", plain=plain, text=text, seams=seams) == ["two"]
    assert sent("</>", plain=plain, text=text, seams=seams) == []
    # What stands past the seam is no answer any more, though it begins with the same.
    assert sent("b", plain="aab", text="aab", seams=[Seam(3, 1)]) == []
