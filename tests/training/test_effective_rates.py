"""What each update's gradients counted on average is told, whichever way factors are applied."""

from __future__ import annotations

from pathlib import Path

import pytest

import gruppetto as gp
from gruppetto.testing import reference
from gruppetto.trace import UpdateRow, read_trace
from gruppetto.trace.rows import decode_row, encode_row


@pytest.mark.parametrize("apply_to", ["learning-rate", "gradient"])
def test_effective_rate_of_both_forms(tmp_path: Path, apply_to: str) -> None:
    run = gp.train(
        reference(), protocol="k-async:k=2", learners=5, epochs=3, delay="exponential:mean=1",
        optimizer="sgd:lr=0.04", modulation=f"inverse:apply_to={apply_to}", engine="virtual",
        progress=False, out=tmp_path / "run",
    )  # fmt: skip
    rows = read_trace(run.folder.trace).updates
    means = [
        sum(n * s for n, s in zip(row.num_samples, row.factors, strict=True)) / sum(row.num_samples)
        for row in rows
    ]
    assert min(means) < 0.8 and max(means) == 1.0, "else nothing is shown"
    # The first parameter group has half the rate.
    assert [row.effective_rate for row in rows] == pytest.approx([0.02 * mean for mean in means])
    told = [row.learning_rate for row in rows]
    if apply_to == "gradient":
        assert told == pytest.approx([0.02] * len(rows))
    else:
        assert told == pytest.approx([row.effective_rate for row in rows])


def test_a_row_of_before_is_read(tmp_path: Path) -> None:
    row = UpdateRow(1, 1.0, 4, 0.1, 0.1, [0], [4], [1.0], [0], [2.0], 1, 0, 0, 0,
                    effective_rate=0.1)  # fmt: skip
    line = encode_row(row)
    assert decode_row(line) == row
    old = decode_row(line.replace(b',"effective_rate":0.1', b""))
    assert isinstance(old, UpdateRow) and old.effective_rate is None
