def describe(pipe): return "Pipe"
def readable(pipe): return "\n".join(f"# stage {i.index}: {k}\n{v}" for i in pipe.stage_infos for k,v in i.code.items())
