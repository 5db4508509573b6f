"""plan(): search the cut, schedule, size of microbatches and recomputation together; and cuts by measured times.

search.py, the file to read first, makes candidates (candidate.py) of all choices (choices.py) from the costs of stages
(costs.py) and of their copies (replicas.py), ranks them (ranking.py) and returns a TrainingPlan (training_plan.py),
which plan_file.py saves. measure.py measures stages and links; measured_chain.py cuts by measured times; group.py is
for ranks that plan together.
"""

from .measured_chain import measured_cut as measured_cut
from .search import plan as plan
from .training_plan import TrainingPlan as TrainingPlan
