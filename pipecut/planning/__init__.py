"""Cut, schedule, size of microbatches and recomputation, searched together."""

from .measured_chain import AutomaticCuts as AutomaticCuts
from .measured_chain import Balancing as Balancing
from .measured_chain import CostName as CostName
from .search import plan as plan
from .training_plan import TrainingPlan as TrainingPlan
