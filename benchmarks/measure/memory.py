def describe_out_of_memory(error): return str(error).splitlines()[0]
