"""What the server says about itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from common.auth import Permission
from common.sampling import Override, RequestModel


class Health(BaseModel):
    status: Literal["healthy"] = "healthy"
    issues: list[str] = []


class Readiness(BaseModel):
    status: Literal["ready"] = "ready"
    model: str


class PermissionAnswer(BaseModel):
    permission: Permission


class GenerationDefaults(BaseModel):
    n_ctx: int


class Props(BaseModel):
    """As llama.cpp's server says it; front ends read the template and the context length here."""

    total_slots: int
    chat_template: str
    default_generation_settings: GenerationDefaults


class SamplerOverrides(BaseModel):
    selected_preset: str | None
    overrides: dict[str, Override]
    presets: list[str]  # for administrators


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
