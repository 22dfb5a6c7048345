"""Certificates for tests, made by the program openssl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    certfile: Path
    keyfile: Path


def make_certificate(folder: Path, name: str = "localhost", *, days: int = 2) -> Certificate:
    """A certificate that signs itself, for a host and for 127.0.0.1. With days below 0 it has expired."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    certificate = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    request = folder / f"{name}.csr"
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName=DNS:{name},IP:127.0.0.1\n")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", certificate.keyfile)
    _openssl("req", *key, "-subj", f"/CN={name}", "-out", request)
    signed = ("-signkey", certificate.keyfile, "-extfile", extensions, "-days", str(days))
    _openssl("x509", "-req", "-in", request, *signed, "-out", certificate.certfile)
    return certificate


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
