"""What a model is tried on, one file a task.

A file dropped into this folder registers itself; installed packages may add theirs through the entry-point
group `langevin.tasks`.
"""

from langevin.tasks.task import TASKS, Task, register

__all__ = ["TASKS", "Task", "register"]

TASKS.discover(__name__, __path__)
