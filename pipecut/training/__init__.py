"""Parts of a training job around the step: norms, checkpoints, mixed precision, metrics and meshes."""
