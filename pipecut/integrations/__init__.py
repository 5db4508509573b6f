"""Other libraries' trainers on top of pipecut; each is imported only when it is used, and has an extra of its own."""
