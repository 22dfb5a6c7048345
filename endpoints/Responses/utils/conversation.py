"""Items of an input -> messages of a chat.

An answer of a model is one message there: a thought, text and calls that follow each other are put together as
`endpoints.OAI` does it when it remembers the answer, so that the next prompt goes on from what was generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from common.errors import Unsupported
from endpoints.paths import Paths
from endpoints.Responses.types.items import (
    AdditionalToolsItem,
    BuiltInCallItem,
    BuiltInOutputItem,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    InputItem,
    InputPart,
    LeftOutItem,
    MessageItem,
    ReasoningItem,
)
from endpoints.Responses.utils.thoughts import unsealed
from endpoints.Responses.utils.tools import INPUT, chat_name


class Conversation:
    """The messages of a chat completion.

    Attributes:
        left_out: types of items that say nothing to a model.

    Args:
        paths: gets where the messages come from.
    """

    def __init__(self, paths: Paths) -> None:
        self.messages: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._paths = paths
        self._answer: dict[str, Any] | None = None  # the last message, where it is an answer that may go on
        self._after_text = False  # the last item was a text of that answer

    def add(self, items: Iterable[InputItem], path: str) -> None:
        """Add the items of one request, or of several that followed each other.

        Args:
            path: of the items in the request.

        Raises:
            Unsupported: an item holds what cannot be shown to a model.
        """
        self._end_answer()
        for index, item in enumerate(items):
            self._add(item, f"{path}.{index}")

    def add_instructions(self, text: str) -> None:
        self._begin({"role": "system", "content": text}, "instructions")

    def _add(self, item: InputItem, path: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                if self._after_text:  # two messages that follow each other are two
                    self._end_answer()
                self._show(self._answering(path), item.content, f"{path}.content")
                self._after_text = True
            case MessageItem():
                self._show(self._begin({"role": item.role}, path), item.content, f"{path}.content")
            case ReasoningItem():
                if thought := _thought(item):
                    answer = self._answering(path)
                    answer["reasoning_content"] = answer.get("reasoning_content", "") + thought
            case FunctionCallItem():
                if item.status != "incomplete":  # what there is of it stands in a message as well
                    self._call(item.call_id, chat_name(item.name, item.namespace), item.arguments, path)
            case CustomCallItem():
                arguments = json.dumps({INPUT: item.input}, ensure_ascii=False)
                self._call(item.call_id, chat_name(item.name, item.namespace), arguments, path)
            case CallOutputItem():
                result = self._begin({"role": "tool", "tool_call_id": item.call_id}, path)
                self._show(result, item.output, f"{path}.output")
            case BuiltInCallItem():
                arguments = json.dumps(item.model_extra, ensure_ascii=False)
                self._call(item.call_id, item.type.removesuffix("_call"), arguments, path)
            case BuiltInOutputItem():
                text = item.output if isinstance(item.output, str) else json.dumps(item.output, ensure_ascii=False)
                self._begin({"role": "tool", "tool_call_id": item.call_id or item.id, "content": text}, path)
            case LeftOutItem():
                self.left_out.append(item.type)
            case AdditionalToolsItem():  # see `utils/requests.py`
                pass

    def _call(self, call_id: str, name: str, arguments: str, path: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._answering(path).setdefault("tool_calls", []).append(call)

    def _answering(self, path: str) -> dict[str, Any]:
        if self._answer is None:
            self._answer = self._begin({"role": "assistant"}, path)
        self._after_text = False
        return self._answer

    def _end_answer(self) -> None:
        self._answer = None
        self._after_text = False

    def _begin(self, message: dict[str, Any], path: str) -> dict[str, Any]:
        self._end_answer()
        self._paths.add(f"messages.{len(self.messages)}", path)
        self.messages.append(message)
        return message

    def _show(self, message: dict[str, Any], parts: Sequence[InputPart], path: str) -> None:
        """Add parts to the last message, which is an answer's or has none yet."""
        content = message.setdefault("content", [])
        for index, part in enumerate(parts):
            if part.file_id is not None:
                raise Unsupported(
                    f"{path}.{index}.file_id: no files are kept here. Send a text, or an image as a data URL.",
                    param=f"{path}.{index}.file_id",
                )
            self._paths.add(f"messages.{len(self.messages) - 1}.content.{len(content)}", f"{path}.{index}")
            content.append(part.model_dump(exclude_none=True))


def _thought(item: ReasoningItem) -> str:
    if item.encrypted_content is not None and (thought := unsealed(item.encrypted_content)) is not None:
        return thought
    return "".join(part.text for part in item.content or item.summary)
