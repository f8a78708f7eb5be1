"""The tests of modules notice every broken rule of theirs; a third of them here, each by the test
that it names. ``make mutants`` tries all."""

from __future__ import annotations

import sys

import pytest
from module_mutants import JUDGES, MODULES, MUTANTS, SOURCE, Mutant, judges, verdict

CHOSEN = MUTANTS[::3]


@pytest.mark.parametrize("mutant", CHOSEN, ids=lambda mutant: mutant.name)
def test_module_mutant_is_killed(mutant: Mutant) -> None:
    by = verdict(mutant, [mutant.by])
    assert by is not None, f"{mutant.name} lives: {mutant.by} does not notice it"
    # It is to break its rule, not to be code that no longer fits what is around it.
    broken = [error for error in ("AttributeError", "NameError", "TypeError") if error in by]
    assert not broken, f"{mutant.name} does not run: {by}"


def test_unmutated_modules_survive_the_same_loader_and_tests() -> None:
    assert verdict(None, {mutant.by for mutant in CHOSEN}) is None


def test_each_mutant_is_an_edit_of_what_there_is_and_names_a_test_that_there_is() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        count = (SOURCE / f"{mutant.module}.py").read_text(encoding="utf-8").count(mutant.old)
        assert count == 1, f"{mutant.name}: {mutant.old!r} must occur once"
    with judges(None) as tests:
        for mutant in MUTANTS:
            assert any(name.startswith(mutant.by) for name in tests), mutant.name


def test_the_real_modules_are_back_afterwards() -> None:
    names = [*(f"gruppetto.decoupled.{module}" for module in MODULES), *JUDGES]
    real = {name: sys.modules.get(name) for name in names}
    with judges(MUTANTS[0]) as tests:
        assert len(tests) > 70
        assert all(sys.modules[name] is not module for name, module in real.items())
    assert all(sys.modules.get(name) is module for name, module in real.items())
