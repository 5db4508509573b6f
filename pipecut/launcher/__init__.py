"""Local processes as ranks, for scripts and notebooks without torchrun."""
