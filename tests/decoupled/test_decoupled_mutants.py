"""Random runs notice every broken rule of a schedule that they claim to watch."""

from __future__ import annotations

import pytest
from schedule_mutants import MUTANTS, SOURCE, Mutant, judge


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_schedule_mutant_is_killed(mutant: Mutant) -> None:
    count = SOURCE.read_text(encoding="utf-8").count(mutant.old)
    assert count == 1, f"{mutant.name}: {mutant.old!r} must occur once"
    by = judge(mutant)
    assert by is not None, f"{mutant.name} lives: nothing checks {mutant.breaks!r}"
    # It is to break its rule, not to be code that no longer fits what is around it.
    broken = [error for error in ("AttributeError", "NameError", "TypeError") if error in by]
    assert not broken, f"{mutant.name} does not run: {by}"


def test_the_unmutated_schedule_survives_the_same_loader_and_seeds() -> None:
    assert judge(None) is None
