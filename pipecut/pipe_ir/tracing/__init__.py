"""Run a model once under torch.export and freeze what happened."""
