"""Names of models -> their folders."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import InvalidRequest, ModelNotFound
from common.names import path_within


def model_folder(parent: Path, name: str, param: str = "model_name") -> Path:
    """Absolute path of the model `name`, a folder in `parent` or, as author/model, in a folder in it.

    Raises:
        InvalidRequest: the name is empty or leads out of `parent`. A folder that is linked into it is inside.
        ModelNotFound: there is no such folder, or it holds no config.json.
    """
    folder = path_within(parent.absolute(), name)
    if folder is None:
        raise InvalidRequest(f"{param} {name!r} must name a folder inside the model directory.", param=param)
    if not os.path.isfile(folder / "config.json"):  # unlike Path.is_file() also false for a name that is too long
        raise ModelNotFound(
            f"There is no model {name!r}: the model directory has no such folder with a config.json.", param=param
        )
    return folder
