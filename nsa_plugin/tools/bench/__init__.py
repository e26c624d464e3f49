"""``nsa-plugin bench``: time ops across kernel providers and shapes on this machine's GPU.

cases      what is measured: the suites and their cases, as data
floors     the fewest bytes and operations an op needs
timing     the clock, and the device's own copy and matmul rates
inputs     random caches, queries and indices
judges     check a timed result against the float32 reference, on a sample of its rows
stock      the kernels that the engines run today: the baselines
suites/    make calls from cases, one module per family of ops
runner     run every contender of every case
record     the JSON record
tables     the terminal's tables
"""
