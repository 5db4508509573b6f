"""Modules that torch.export cannot trace: they stay as they are, and the rest of the model is traced around them."""
