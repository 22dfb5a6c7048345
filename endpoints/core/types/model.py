"""Bodies of the model routes."""

from __future__ import annotations

from typing import Any

from loguru import logger
from pydantic import BaseModel, model_validator

from common.config_models import DraftModelParameters, LoraParameters, ModelParameters
from common.sampling import RequestModel
from common.settings_catalog import unknown_keys


def _warn_of_unknown_keys(model: type[BaseModel], name: str, values: Any) -> None:
    if isinstance(values, dict):
        for warning in unknown_keys(name, map(str, values), model.model_fields, "a load request"):
            logger.warning("{}", warning)


class DraftModelLoadRequest(DraftModelParameters):
    """The `draft_model` object of a load request."""

    @model_validator(mode="before")
    @classmethod
    def _warn(cls, values: Any) -> Any:
        _warn_of_unknown_keys(cls, "draft_model", values)
        return values


class ModelUnloadRequest(RequestModel):
    """Body of `POST /v1/model/unload`, which may be left out."""

    model_name: str | None = None
    """The model to unload. Empty: that which answers requests that name none."""


class ModelLoadRequest(ModelParameters, LoraParameters):
    """Body of `POST /v1/model/load`: every per-model setting, with the limits that it has in config.yml.

    Only the fields that a request gives count; the rest comes from `use_as_default` and the model's tabby_config.yml,
    so the defaults shown here are those of a server that has neither.
    """

    model_name: str
    """Folder in model_dir of the model to load."""

    skip_queue: bool = False
    """Cancel the requests in flight instead of waiting for them."""

    draft_model: DraftModelLoadRequest | None = None
    """How answers are drafted; the folder is taken from the server's draft_model_dir."""

    @model_validator(mode="before")
    @classmethod
    def _warn(cls, values: Any) -> Any:
        _warn_of_unknown_keys(cls, "model", values)
        return values

    def parameters(self) -> dict[str, Any]:
        """The settings that the request gives, `draft_model` nested among them."""
        return self.model_dump(exclude_unset=True, exclude={"model_name", "skip_queue"})
