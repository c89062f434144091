"""`csrc/kernel_math.h` and `kernels/hparams.py` name the same columns of `hparams`, in the same places."""

import importlib
import re

import pytest

from fastsam_kernels import rules
from fastsam_kernels.hparams import FIRST_RULE_HPARAM, NUM_HPARAMS, HParam
from fastsam_kernels.rule import MAX_STATE
from tests.helpers.places import ROOT

MATH = ROOT / "csrc" / "kernel_math.h"

pytestmark = pytest.mark.skipif(not MATH.exists(), reason=f"{MATH} is not there: the tests run outside the source tree")


def test_kernel_math_declares_the_same_columns() -> None:
    text = MATH.read_text()
    body = re.search(r"enum(?: class)? HParam[^{]*\{([^}]*)\}", text)
    assert body is not None, "kernel_math.h has no enum HParam"
    declared_columns = {name: int(value) for name, value in re.findall(r"(\w+)\s*=\s*(\d+)", body[1])}
    assert declared_columns == {name: int(column) for name, column in HParam.__members__.items()}
    assert f"kFirstRuleHParam = {FIRST_RULE_HPARAM};" in text and max(HParam) < FIRST_RULE_HPARAM
    width = re.search(r"kNumHParams\s*=\s*(\d+)", text)
    assert width is not None and int(width[1]) == NUM_HPARAMS


@pytest.mark.parametrize("name", rules.RULES)
def test_a_rule_is_the_same_in_both_files(name: str) -> None:
    """The fields of its state, which of them may be missing, whether steps are counted, and its own columns in their
    places."""
    rule, header = rules.find(name), MATH.parent / "rules" / f"{name}.h"
    text, module = header.read_text(), importlib.import_module(f"fastsam_kernels.rules.{name}")
    assert rule.name == name and f"namespace fastsam::{name} {{" in text
    assert f"kState = {len(rule.state)};" in text and len(rule.state) <= MAX_STATE
    mask = sum(is_required << i for i, is_required in enumerate(rule.required_fields))
    is_required = re.search(r"kNeeded = (0b[01]+|0);", text)
    assert is_required is not None and int(is_required[1], 0) == mask
    assert f"kCounts = {'true' if rule.counter else 'false'};" in text
    declared_enum = re.search(r"enum : int \{ (\w+) = kFirstRuleHParam,? ?([^}]*) \}", text)
    assert declared_enum is not None
    names = [declared_enum[1], *filter(None, declared_enum[2].split(", "))]
    assert [getattr(module, name) for name in names] == list(range(FIRST_RULE_HPARAM, FIRST_RULE_HPARAM + len(names)))
    assert FIRST_RULE_HPARAM + len(names) <= NUM_HPARAMS


def test_every_header_of_a_rule_has_its_module() -> None:
    assert sorted(path.stem for path in (MATH.parent / "rules").glob("*.h")) == sorted(rules.RULES)
