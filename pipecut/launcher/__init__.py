"""Local processes as ranks, for scripts and notebooks without torchrun."""

from .launch import launch as launch
