"""The interval of a forecast keeps what it promises: recorded runs are replayed, and the docs show the outcome."""

from __future__ import annotations

from bench.calibration import Calibration, on_the_page, recorded, table
from bench.forecast import MOMENTS, SHAPES

LOOKS = recorded()


def test_the_recording_has_two_hundred_runs_of_mixed_shapes() -> None:
    assert len({(look.run, look.outlook.total) for look in LOOKS}) >= 200
    assert len({look.shape for look in LOOKS}) == len(SHAPES)
    assert {look.at for look in LOOKS} == set(MOMENTS)
    assert {50, 50_000} <= {look.outlook.total for look in LOOKS}


def test_nine_in_ten_recorded_ends_lie_within_the_interval() -> None:
    """And nearly so do those of runs that it was not fitted on. An interval that is wide enough would hold them all."""
    both = Calibration.of(LOOKS)
    tuned, others = (Calibration.of([look for look in LOOKS if look.tuned is which]) for which in (True, False))
    assert both.within >= 0.90 and others.within >= 0.88, (tuned, others)
    assert both.before <= 0.10 and both.after <= 0.10
    assert both.width <= 2


def test_the_docs_show_the_calibration_as_it_is() -> None:
    assert on_the_page() == table(LOOKS), "python -m bench.calibration writes it"
