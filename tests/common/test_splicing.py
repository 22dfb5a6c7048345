"""Prompts in which the model's own text stands where the template says the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from common.control_text import ControlStrings
from common.conversations import Message
from common.errors import InvalidRequest
from common.generation import TextSpan
from common.prefixes import Answer, Outline, PrefixHistory, Turn, WrittenPrompt, digest_of
from common.splicing import with_thoughts, write_prompt
from common.templating import RenderedPrompt
from tests.common.test_prefixes import calling, said

CONTROL = ControlStrings(["<", "</>", "<call>", "</call>"])
LITERAL = "LITERAL"  # stands for text that spells a control token


def shown(message: Message) -> str:
    """Thoughts in braces, calls in marks, blanks trimmed."""
    text = message["content"].strip()
    if thought := message.get("reasoning_content"):
        text = f"{{{thought}}}{text}"
    for call in message.get("tool_calls") or ():
        text += f"<call>{call['function']['arguments']}</call>"
    return f"<{message['role']}>{text}</>"


class Template:
    """What a chat template does.

    Args:
        show: makes text of a message, given all of them and its index.
    """

    def __init__(self, show: Callable[[Sequence[Message], int], str] | None = None) -> None:
        self._show = show or (lambda messages, index: shown(messages[index]))

    def __call__(self, messages: Sequence[Message], /, *, whole: bool) -> RenderedPrompt:
        text = "".join(self._show(messages, index) for index in range(len(messages))) + ("<assistant>" if whole else "")
        starts = [start for start in range(len(text)) if text.startswith(LITERAL, start)]
        return RenderedPrompt(text, [(start, start + len(LITERAL)) for start in starts], [])


class Chat:
    def __init__(self, template: Template | None = None) -> None:
        self.template = template or Template()
        self.history = PrefixHistory()

    def turn(
        self, messages: list[Message], raw: str, answer: Message, literals: Sequence[TextSpan] = ()
    ) -> RenderedPrompt:
        """The prompt of a turn, which is answered then."""
        outline = Outline.of(messages)
        returned = self.history.latest(messages, outline)
        if returned is None:
            written = WrittenPrompt.by_template(self.template(messages, whole=True))
        else:
            messages = with_thoughts(messages, outline, returned)
            written = write_prompt(messages, returned, self.template, CONTROL)
        base = digest_of(self.template(messages, whole=False))
        self.history.remember(Turn.of(written, messages, {}), Answer(raw, list(literals), answer), base)
        return written.prompt


ASK = [said("system", "s"), said("user", "one")]
BEGUN = "<system>s</><user>one</><assistant>"


@pytest.mark.parametrize("raw", ["Yes.", " Yes. \n", "{why}Yes.", "{ why }\n Yes.\n\n"])
def test_an_answer_stays_as_it_was(raw: str) -> None:
    chat = Chat()
    answer = said("assistant", raw.rpartition("}")[2], "why" if "why" in raw else None)
    assert chat.turn(ASK, raw, answer).text == BEGUN
    for returned in (answer, said("assistant", answer["content"]), said("assistant", answer["content"].strip())):
        follow = chat.turn([*ASK, returned, said("user", "two")], "x", said("assistant", "x"))
        assert follow.text == f"{BEGUN}{raw}</><user>two</><assistant>"


def test_calls_stay_as_they_were() -> None:
    chat = Chat()
    first, second = '{look}Well.\n<call>{"a":1}</call>\n', '<call>{"b" :2}</call>'
    messages = list(ASK)
    chat.turn(messages, first, calling("c1", '{"a":1}', "Well.") | {"reasoning_content": "look"})
    messages += [calling("c1", '{ "a": 1 }', "Well."), said("tool", "r1")]
    assert chat.turn(messages, second, calling("c2", '{"b":2}')).text == f"{BEGUN}{first}</><tool>r1</><assistant>"
    messages += [calling("c2", {"b": 2}), said("tool", "r2")]
    assert chat.turn(messages, "x", said("assistant", "x")).text == (
        f"{BEGUN}{first}</><tool>r1</><assistant>{second}</><tool>r2</><assistant>"
    )


def test_literals_keep_their_places() -> None:
    chat = Chat()
    messages = [said("user", f"a {LITERAL}")]
    chat.turn(messages, f" {LITERAL}! ", said("assistant", f" {LITERAL}! "), [(1, 1 + len(LITERAL))])
    messages += [said("assistant", f"{LITERAL}!"), said("user", f"{LITERAL} b")]
    prompt = chat.turn(messages, "x", said("assistant", "x"))
    assert prompt.text == f"<user>a {LITERAL}</><assistant> {LITERAL}! </><user>{LITERAL} b</><assistant>"
    assert [prompt.text[start:end] for start, end in prompt.literals] == [LITERAL] * 3


def edited(messages: list[Message]) -> list[Message]:
    return [said("system", "S"), *messages[1:]]


def shortened(messages: list[Message]) -> list[Message]:
    return messages[1:]


@pytest.mark.parametrize("change", [edited, shortened])
def test_what_the_client_changes_before_the_answer_counts(change: Callable[[list[Message]], list[Message]]) -> None:
    chat = Chat()
    answer = said("assistant", "Yes. ")
    chat.turn(ASK, "Yes. ", answer)
    messages = change([*ASK, answer, said("user", "two")])
    assert chat.turn(messages, "x", said("assistant", "x")).text == chat.template(messages, whole=True).text


@pytest.mark.parametrize(
    "returned",
    [
        said("assistant", "Yes. "),
        said("assistant", "Yes. ", "otherwise"),
        calling("c1", '{"a":2}', "Yes. "),
        calling("c1", '{"a":1}', "No."),
    ],
)
def test_what_the_client_changes_in_the_answer_counts(returned: Message) -> None:
    chat = Chat()
    chat.turn(ASK, '{why}Yes. <call>{"a":1}</call>', calling("c1", '{"a":1}', "Yes.") | {"reasoning_content": "why"})
    messages = [*ASK, returned, said("user", "two")]
    prompt = chat.turn(messages, "x", said("assistant", "x"))
    assert prompt.text in (
        chat.template(messages, whole=True).text,
        chat.template([*ASK, {**returned, "reasoning_content": "why"}, said("user", "two")], whole=True).text,
    )


def only_late_thoughts(messages: Sequence[Message], index: int) -> str:
    """Thoughts since the last question."""
    last = max(place for place, message in enumerate(messages) if message["role"] == "user")
    return shown(messages[index] if index > last else {**messages[index], "reasoning_content": None})


def test_a_template_may_leave_thoughts_out() -> None:
    chat = Chat(Template(only_late_thoughts))
    first, second = "{go}<call>1</call> ", "{so} Done."
    messages = list(ASK)
    chat.turn(messages, first, calling("c1", "1") | {"reasoning_content": "go"})
    messages += [calling("c1", "1"), said("tool", "r1")]
    assert (
        chat.turn(messages, second, said("assistant", "Done.", "so")).text == f"{BEGUN}{first}</><tool>r1</><assistant>"
    )
    messages += [said("assistant", "Done."), said("user", "two")]
    assert chat.turn(messages, "x", said("assistant", "x")).text == chat.template(messages, whole=True).text


def test_what_can_stay_stays_where_a_later_answer_cannot() -> None:
    def silent(messages: Sequence[Message], index: int) -> str:
        return shown(messages[index]).replace("Second", "Other")

    chat = Chat(Template(silent))
    messages = list(ASK)
    chat.turn(messages, "First. ", said("assistant", "First."))
    messages += [said("assistant", "First."), said("user", "two")]
    kept = chat.turn(messages, "Second. ", said("assistant", "Second.")).text
    assert kept == f"{BEGUN}First. </><user>two</><assistant>"
    messages += [said("assistant", "Second."), said("user", "three")]
    kept += "Other.</><user>three</><assistant>"
    assert chat.turn(messages, "Third. ", said("assistant", "Third.")).text == kept
    messages += [said("assistant", "Third."), said("user", "four")]
    assert chat.turn(messages, "x", said("assistant", "x")).text == f"{kept}Third. </><user>four</><assistant>"


def last_marked(messages: Sequence[Message], index: int) -> str:
    return shown(messages[index]) + ("[last]" if index == len(messages) - 1 else "")


def without_mark(messages: Sequence[Message], index: int) -> str:
    message = messages[index]
    return shown({**message, "content": "t"} if message["role"] == "user" and index else message)


def in_another_form(messages: Sequence[Message], index: int) -> str:
    return shown(messages[index]).replace("<call>", "(").replace("</call>", "}")


def refuses_parts(messages: Sequence[Message], index: int) -> str:
    if len(messages) < 3 and index:
        raise InvalidRequest("not only these")
    return shown(messages[index])


@pytest.mark.parametrize("show", [last_marked, without_mark, in_another_form])
def test_the_template_has_the_last_word(show: Callable[[Sequence[Message], int], str]) -> None:
    chat = Chat(Template(show))
    chat.turn(ASK, '<call>{"a":1}</call>\n', calling("c1", '{"a":1}'))
    messages = [*ASK, calling("c1", '{"a":1}'), said("user", "two")]
    assert chat.turn(messages, "x", said("assistant", "x")).text == chat.template(messages, whole=True).text


def test_a_template_that_refuses_parts_of_a_conversation() -> None:
    template = Template(refuses_parts)
    answer = said("assistant", "Yes.")
    history = PrefixHistory()
    turn = Turn.of(WrittenPrompt.by_template(RenderedPrompt(BEGUN, [], [])), ASK, {})
    history.remember(turn, Answer(" Yes.", [], answer), None)
    messages = [*ASK, answer, said("user", "two")]
    returned = history.latest(messages, Outline.of(messages))
    assert returned is not None
    assert write_prompt(messages, returned, template, CONTROL) == WrittenPrompt.by_template(
        template(messages, whole=True)
    )


def test_an_answer_without_text_is_left_to_the_template() -> None:
    chat = Chat()
    chat.turn(ASK, "{cut off", said("assistant", "", "cut off"))
    messages = [*ASK, said("assistant", ""), said("user", "two")]
    prompt = chat.turn(messages, "x", said("assistant", "x")).text
    assert prompt == f"{BEGUN}{{cut off}}</><user>two</><assistant>"


def test_only_thoughts_of_unchanged_messages_are_put_back() -> None:
    chat = Chat()
    first = said("assistant", "Yes.", "why")
    chat.turn(ASK, "{why}Yes.", first)
    messages = [*ASK, said("assistant", "Yes."), said("user", "two")]
    chat.turn(messages, "{so}No.", said("assistant", "No.", "so"))
    changed = [*ASK, said("assistant", "YES."), said("user", "two"), said("assistant", "No."), said("user", "three")]
    assert "{why}" not in chat.turn(changed, "x", said("assistant", "x")).text
    kept = [*messages, said("assistant", "No."), said("user", "three")]
    assert chat.turn(kept, "x", said("assistant", "x")).text == (
        f"{BEGUN}{{why}}Yes.</><user>two</><assistant>{{so}}No.</><user>three</><assistant>"
    )
