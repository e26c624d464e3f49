// What decides between kernels that are launched one after the other for the same batch: only one of them goes on.
#pragma once

#include "instructions.cuh"

#ifndef GATE
#define GATE 0  // 0: always run; 1: only if what was found is not negative; 2: only if it is
#endif

// Whether this kernel is the one to run. What is found is not negative where neighbouring query rows share enough
// (sparse_mla_sample.cu), or where a copy has room for all rows (sparse_mla_copy.cu).
DEVICE bool goes_on(const int* __restrict__ found) { return (__ldg(found) >= 0) == (GATE == 1); }
