"""Mistral up to version 7 of its tokenizer: `[TOOL_CALLS]` and a list of calls in JSON."""

from __future__ import annotations

from common.parsing.formats.base import Call
from common.parsing.formats.tagged_json import TaggedJson
from common.parsing.json_text import quoted


class MistralOld(TaggedJson):
    """
    [TOOL_CALLS][{"name": NAME, "arguments": {...}, "id": ID}]
    """

    names = ("mistral_old", "mistral_v3", "mistral_nemo")
    starts = ("[TOOL_CALLS]",)
    trigger = "[TOOL_CALLS]"
    layout = ("[", "]")
    late_ids = True

    def _written(self, index: int, call: Call) -> str:
        without_id = super()._written(index, call)
        return without_id if call.id is None else f'{without_id[:-1]}, "id": {quoted(call.id)}}}'
