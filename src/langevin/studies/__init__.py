"""Comparing arms on equal terms: plans, runs, statistics, verdicts and reports."""
