"""``nsa-plugin bench``: ops timed across providers and shapes on this machine's GPU, beside their floor.

cases      what is measured: the suites and their cases, as data
floors     bytes and operations that an op cannot do without
timing     the clock, and the device's own copy and matmul rates
inputs     random caches, queries and indices
judges     a timed result against the float32 reference, on a sample of its rows
stock      what the engines run today, to compare with
suites/    a case made into calls, one module a family of ops
runner     every contender of every case: refused, failed, or measured and judged
record     the JSON record
tables     the terminal's tables
report     the documentation's tables, from records
plots      the documentation's plots, from records
"""
