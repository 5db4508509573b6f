"""Cut and uncut side by side: whether the stages compute what the model computes."""
