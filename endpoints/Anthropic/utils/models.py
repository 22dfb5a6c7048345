"""Models, as Anthropic's API lists them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from fastapi import Request

from endpoints.Anthropic.types.response import Model, ModelPage

_VERSION_HEADER: Final = "anthropic-version"


def is_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's API asks, of a route that more than one API has."""
    return _VERSION_HEADER in request.headers


def anthropic_model(name: str, created: int) -> Model:
    """
    Args:
        created: seconds since the epoch.
    """
    return Model(id=name, display_name=name, created_at=datetime.fromtimestamp(created, UTC).isoformat())


def anthropic_models(created: Mapping[str, int]) -> ModelPage:
    """
    Args:
        created: seconds since the epoch, by the names of the models.
    """
    names = list(created)
    return ModelPage(
        data=[anthropic_model(name, created[name]) for name in names],
        first_id=names[0] if names else None,
        last_id=names[-1] if names else None,
    )
