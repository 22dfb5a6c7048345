"""What the server says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from common.auth import Permission
from common.sampling import Override, RequestModel


class Health(BaseModel):
    status: Literal["healthy"] = "healthy"
    issues: list[str] = []


class Readiness(BaseModel):
    """
    Attributes:
        model: that answers requests which name none; None: they have to name one, which is loaded for them.
    """

    status: Literal["ready"] = "ready"
    model: str | None


class PermissionAnswer(BaseModel):
    permission: Permission


class Version(BaseModel):
    version: str


class SamplerOverrides(BaseModel):
    """What the presets in force say, those that every model has and those of the loaded one.

    Attributes:
        selected_preset: None without one, or with overrides that were given directly.
        presets: names to choose from, for administrators.
        model_preset: the loaded model's `sampler_preset`.
        model_overrides: they win over `overrides`, parameter by parameter.
    """

    selected_preset: str | None
    overrides: Mapping[str, Override]
    presets: list[str]
    model_preset: str | None
    model_overrides: Mapping[str, Override]


class SamplerOverrideSwitch(RequestModel):
    preset: str | None = None
    overrides: dict[str, Any] | None = None


class Service(BaseModel):
    name: str


class ServiceApi(BaseModel):
    name: str
    relative_url: str
    version: int = 1


class ServiceInfo(BaseModel):
    """Which APIs are here, for clients that speak several (nodeinfo-like, as AI Horde's tools read it)."""

    version: float = 0.1
    software: Service
    api: dict[str, ServiceApi]
