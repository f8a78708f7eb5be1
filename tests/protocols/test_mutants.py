"""The oracle, the driver and the scripts notice every broken rule they claim to watch."""

from __future__ import annotations

import sys

import pytest
from mutants import FOLDER, MUTANTS, Mutant, judge, mutated, scripts


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant) -> None:
    source = (FOLDER / f"{mutant.module}.py").read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.name}: {mutant.old!r} must occur once"
    by = judge(mutant).by
    assert by is not None, f"{mutant.name} lives: nothing checks {mutant.breaks!r}"
    # It is to break its rule, not to be code that no longer fits what is around it.
    broken = [error for error in ("AttributeError", "NameError", "TypeError") if error in by]
    assert not broken, f"{mutant.name} does not run: {by}"


def test_unmutated_code_survives_the_same_loader_and_seeds() -> None:
    assert judge(None).by is None


def test_mutants_differ_in_name_and_leave_the_real_modules_alone() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    name = "gruppetto.protocols.coordinator"
    real = sys.modules[name]
    with mutated(MUTANTS[0]):
        assert sys.modules[name] is not real
    assert sys.modules[name] is real


def test_most_scripts_judge_mutants() -> None:
    """A script that asks for another fixture would silently stop judging."""
    assert len(scripts()) >= 35
