"""What should come out: parameters, FLOPs, bytes and seconds predicted from specs. Imports no torch.

params, flops, rotary                     what a model is and computes
memory, kv_cache                          what training and inference hold
roofline, collectives, sizes              what a device and a ring allow
parallel_limits                           how far one layer can be cut, in symbols and numbers
execution, calibration, step_time         what a step asks of a device, and how fast devices were measured to
be network, layout, planner, search          a step on many devices, and the best way of cutting it
simulation, pipeline_bubble, validation   the same event by event, and beside measured steps
question, large_models                    from names to a question
scaling_law, compute_optimal, mup         what to train, and how to carry settings over widths
"""
