"""What stands around the step of a training job: norms, checkpoints, mixed precision, metrics and meshes."""
