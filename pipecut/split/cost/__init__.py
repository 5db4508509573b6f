"""Costs of operations: FLOPs, bytes, times on a machine. Read operation.py first."""

from .machine import Machine as Machine
from .machine import MachineLike as MachineLike
from .machine import machine_of as machine_of
from .operation import ConcreteCosts as ConcreteCosts
from .operation import CostFinder as CostFinder
from .operation import OperationTimes as OperationTimes
from .operation import Times as Times
from .operation import flops_between as flops_between
from .operation import mean_of as mean_of
from .operation import operation_flops as operation_flops
from .saved import bytes_of as bytes_of
