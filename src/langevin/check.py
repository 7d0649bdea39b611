"""`langevin check`: does a mixer, or a saved causal model, keep its promises?

langevin.check("heat(t='adaptive')").passed
langevin.check("mine.py:Mixer", against="ssmax(s=0.43)").failures
"""

from langevin.callable_module import callable_module
from langevin.checks import Report, Row, check

__all__ = ["Report", "Row", "check"]

callable_module(__name__, check)
