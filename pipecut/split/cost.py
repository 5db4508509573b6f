def program_flops(program): return 0
