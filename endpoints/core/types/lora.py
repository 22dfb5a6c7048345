"""Bodies of the LoRA routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from common.config_models import LoraInstance, Section

MOST_LORAS = 64  # in a request; each costs a product more in every layer that it changes


class LoraCard(BaseModel):
    id: str
    object: Literal["lora"] = "lora"
    created: int
    owned_by: str = "Waypoint"
    scaling: float | None = None  # None: not applied
    error: str | None = Field(
        None, description="Why the model is without it, though it had it before its engine was started again."
    )


class LoraList(BaseModel):
    object: Literal["list"] = "list"
    data: list[LoraCard]


class LoraLoadRequest(Section):
    """Body of `POST /v1/lora/load`."""

    loras: Annotated[list[LoraInstance], Field(min_length=1, max_length=MOST_LORAS)]
    """Adapters to apply beside those that are, each with a name and a scaling. One that is applied already gets the new
    scaling."""

    skip_queue: bool = False
    """Cancel the requests in flight instead of waiting for them."""


class LoraLoadAnswer(BaseModel):
    success: list[str]
    failure: list[str]
    errors: dict[str, str] = Field(description="Why, for each of the failures.")
