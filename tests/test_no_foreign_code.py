"""Nothing that comes with a model or a request is ever run: a file of the product that could do so fails here."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_imports import imported_modules, sources, top_level

# Formats whose files can run code when they are read.
FORBIDDEN_MODULES = {"cPickle", "cloudpickle", "code", "dill", "jsonpickle", "joblib", "marshal", "pickle", "shelve"}
FORBIDDEN_MODULES |= {"yaml"}  # whose load() makes any object; ours is ruamel.yaml, with typ="safe"
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "importlib.import_module"}
FORBIDDEN_CALLS |= {"subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"}
FORBIDDEN_CALLS |= {"numpy.load", "np.load", "ctypes.CDLL"}
# What a name is called with, where that makes it harmless.
REQUIRED_ARGUMENTS = {"torch.load": ("weights_only", "True"), "YAML": ("typ", "'safe'")}
FORBIDDEN_ARGUMENTS = {"shell": "True", "trust_remote_code": None, "allow_pickle": None}  # None: any value

ALLOWED = {"backends/exllamav3/cpu/install.py": {"importlib.import_module"}}  # of kernels, which it names itself


def calls(name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Each call in a file: what is called, and the arguments by name."""
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {item.arg: ast.unparse(item.value) for item in node.keywords if item.arg}


@pytest.mark.parametrize("name", sorted(sources()))
def test_nothing_runs_what_it_reads(name: str) -> None:
    assert not top_level(imported_modules(sources()[name])) & FORBIDDEN_MODULES
    for called, arguments in calls(name):
        assert called not in FORBIDDEN_CALLS - ALLOWED.get(name, set())
        if required := REQUIRED_ARGUMENTS.get(called):
            assert arguments.get(required[0]) == required[1], called
        for argument, value in FORBIDDEN_ARGUMENTS.items():
            assert argument not in arguments or value not in (None, arguments[argument]), called


def test_the_checks_find_something() -> None:
    found = {called for name in sources() for called, _ in calls(name)}
    assert {"YAML", "subprocess.run"} <= found
    text = "\n".join(ast.unparse(tree) for tree in sources().values())
    assert "trust_remote_code" not in text
