"""Hugging Face's Trainer over a pipeline: `PipelineTrainer`, which takes one more argument, `PipelineArguments`.

trainer.py, the file to read first, overrides the few methods of `Trainer` that run the model, move it, or count
processes. cut_model.py holds the stages and their schedule; loss.py makes the loss of a microbatch by Trainer's own
`compute_loss`; accelerator.py gives all ranks of a pipeline the same batches; exchange.py brings weights and optimizer
state of all stages together; arguments.py checks what was asked for.
"""

from .arguments import PipelineArguments as PipelineArguments
from .trainer import PipelineTrainer as PipelineTrainer
