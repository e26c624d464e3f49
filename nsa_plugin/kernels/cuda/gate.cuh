// What decides between kernels that are launched one after the other for the same batch: only one of them goes on.
#pragma once

#include "instructions.cuh"

#ifndef GATE
#define GATE 0  // 0: always run; 1: unless the number at `gate` is negative; 2: if it is
#endif

// Whether this kernel is the one to run. The number is negative where neighbouring query rows do not share enough
// (sparse_mla_sample.cu), or where a copy has too few pages (sparse_mla_copy.cu).
DEVICE bool goes_on(const int* __restrict__ gate) { return (__ldg(gate) >= 0) == (GATE == 1); }

// The last parameter and the first statement of a kernel that may have a gate.
#if GATE
#define GATE_PARAMETER , const int* __restrict__ gate
#define END_AT_GATE if (!goes_on(gate)) return;
#else
#define GATE_PARAMETER
#define END_AT_GATE
#endif
