"""The report of a comparison: one HTML page that needs nothing else, and its numbers as files."""

from langevin.studies.report.write import write_report

__all__ = ["write_report"]
