"""Which sequences a step feeds: the host's half of the engine, plain Python and numpy, no JAX.

Called by the engine alone.
"""

from jaxinfer.scheduler.plan import LoadPlan, StepOutput, StepPlan
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.scheduler.sequence import Sequence, Status, Update
from jaxinfer.scheduler.stats import KindStats, SchedulerStats

__all__ = [
    "KindStats",
    "LoadPlan",
    "Scheduler",
    "SchedulerStats",
    "Sequence",
    "Status",
    "StepOutput",
    "StepPlan",
    "Update",
]
