"""The page of a study and its numbers as files."""

from langevin.studies.report.page import Page, render
from langevin.studies.report.study import study_page
from langevin.studies.report.write import write_report

__all__ = ["Page", "render", "study_page", "write_report"]
