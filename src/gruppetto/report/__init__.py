"""Tables, plots, one HTML page: reads traces, knows nothing of training or engines.

``write_page`` is in :mod:`gruppetto.report.page` and the figures are in
:mod:`gruppetto.report.plots`, so that a table in the terminal does not wait for matplotlib.
"""

from gruppetto.report.data import ReportedRun, distinct_labels
from gruppetto.report.load import load_runs
from gruppetto.report.table import results_table

__all__ = ["ReportedRun", "distinct_labels", "load_runs", "results_table"]
