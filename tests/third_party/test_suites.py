"""How a suite's results are read and judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.third_party.suites import (
    AllowList,
    ExpectedFailures,
    Outcome,
    PackageCache,
    Results,
    SuiteError,
    run_command,
    run_pytest,
)

SUITE = """
import pytest

class TestNumbers:
    @pytest.mark.parametrize("value", ["1", "x[y]", "a.b::c"])
    def test_one(self, value):
        assert value == "1"

@pytest.fixture
def broken():
    yield
    raise OSError("at the end")

def test_teardown(broken):
    assert False, "at the test"

@pytest.mark.skip
def test_skipped():
    pass

def test_passes():
    pass
"""

NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    (tmp_path / "suite" / "unit").mkdir(parents=True)
    (tmp_path / "suite" / "unit" / "test_a.py").write_text(SUITE, encoding="utf-8")
    report = tmp_path / "report.xml"
    return run_pytest(Path(sys.executable), tmp_path / "suite", report=report, timeout=60, variables=NO_PLUGINS)


def test_results_carry_the_ids_of_pytest(results: Results) -> None:
    assert {test: outcome.status for test, outcome in results.items()} == {
        "unit/test_a.py::TestNumbers::test_one[1]": "passed",
        "unit/test_a.py::TestNumbers::test_one[x[y]]": "failed",
        "unit/test_a.py::TestNumbers::test_one[a.b::c]": "failed",
        "unit/test_a.py::test_teardown": "failed",
        "unit/test_a.py::test_skipped": "skipped",
        "unit/test_a.py::test_passes": "passed",
    }
    assert results["unit/test_a.py::TestNumbers::test_one[x[y]]"].message.startswith("AssertionError: assert 'x[y]' ==")


def test_a_suite_that_does_not_run_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import no_such_module", encoding="utf-8")
    with pytest.raises(SuiteError, match="no_such_module"):
        run_pytest(Path(sys.executable), tmp_path, report=tmp_path / "report.xml", timeout=60, variables=NO_PLUGINS)


def test_a_program_that_hangs_is_stopped() -> None:
    with pytest.raises(SuiteError, match="more than"):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.5)


RESULTS = {
    "a::one": Outcome("failed", "why"),
    "a::two[x]": Outcome("failed"),
    "a::two[y]": Outcome("passed"),
    "a::three": Outcome("skipped"),
}


def listed(*tests: str, may_pass: bool = False) -> ExpectedFailures:
    return ExpectedFailures(reason="for the sake of it", tests=list(tests), may_pass=may_pass)


@pytest.mark.parametrize(
    ("expected", "complaints"),
    [
        ([listed("a::one", "a::two[x]")], []),
        ([listed("a::one"), listed("a::two[*", may_pass=True)], []),
        ([listed("a::two[x]")], ["FAILS: a::one: why"]),
        ([listed("a::one", "a::two*")], ["PASSES, but 'a::two*' expects a failure: a::two[y]"]),
        ([listed("a::*", "a::three", may_pass=True)], ["NOT RUN: no test matches 'a::three', or only skipped ones"]),
        ([listed("a::*", "a::four", may_pass=True)], ["NOT RUN: no test matches 'a::four', or only skipped ones"]),
    ],
)
def test_only_what_is_not_as_listed_is_a_complaint(expected: list[ExpectedFailures], complaints: list[str]) -> None:
    found = AllowList(expected=expected).complaints(RESULTS)
    assert found[:-1] == complaints
    if complaints:
        with pytest.raises(pytest.fail.Exception, match="1 passed, 2 failed"):
            AllowList(expected=expected).judge(RESULTS)


def test_an_entry_needs_a_reason(tmp_path: Path) -> None:
    (tmp_path / "list.toml").write_text('[[expected]]\nreason = ""\ntests = ["a::one"]\n', encoding="utf-8")
    with pytest.raises(ValidationError, match="reason"):
        AllowList.read(tmp_path / "list.toml")


def test_an_environment_is_made_once_and_again_if_it_was_not_finished(tmp_path: Path) -> None:
    cache = PackageCache(tmp_path)
    python = cache.environment("empty")
    made = python.lstat().st_mtime_ns
    assert cache.environment("empty").lstat().st_mtime_ns == made
    (finished,) = tmp_path.glob("*.finished")
    finished.unlink()
    assert cache.environment("empty").lstat().st_mtime_ns != made
    assert subprocess.run([python, "-c", ""]).returncode == 0
