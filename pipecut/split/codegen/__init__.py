"""Python source of the stages."""
