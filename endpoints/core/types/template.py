"""Chat templates by name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from common.sampling import RequestModel


class TemplateList(BaseModel):
    object: Literal["list"] = "list"
    data: list[str]


class TemplateSwitch(RequestModel):
    prompt_template_name: Annotated[str, Field(min_length=1)]
