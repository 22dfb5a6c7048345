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
NEVER_TRUE = {"shell", "trust_remote_code", "allow_pickle"}  # as an argument, or as a member of a dict of arguments

ALLOWED = {"backends/exllamav3/cpu/install.py": {"importlib.import_module"}}  # of kernels, which it names itself


def calls(name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Each call in a file: what is called, and the arguments by name."""
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {item.arg: ast.unparse(item.value) for item in node.keywords if item.arg}


def members(name: str) -> Iterator[tuple[object, str]]:
    """Each member of a dict in a file: its name and its value."""
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield key.value, ast.unparse(value)


@pytest.mark.parametrize("name", sorted(sources()))
def test_nothing_runs_what_it_reads(name: str) -> None:
    assert not top_level(imported_modules(sources()[name])) & FORBIDDEN_MODULES
    for called, arguments in calls(name):
        assert called not in FORBIDDEN_CALLS - ALLOWED.get(name, set())
        if required := REQUIRED_ARGUMENTS.get(called):
            assert arguments.get(required[0]) == required[1], called
        assert not {name for name in NEVER_TRUE & arguments.keys() if arguments[name] != "False"}, called
    assert not {name for name, value in members(name) if name in NEVER_TRUE and value != "False"}


def test_the_checks_find_something() -> None:
    found = {called for name in sources() for called, _ in calls(name)}
    assert {"YAML", "subprocess.run"} <= found
    assert ("trust_remote_code", "False") in {member for name in sources() for member in members(name)}
