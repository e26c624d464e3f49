// What decides between kernels that are launched one after the other for the same batch: only one of them goes on.
#pragma once

#include "instructions.cuh"

#ifndef GATE
#define GATE 0  // 0: always run; 1: only if neighbouring query rows share enough; 2: only if they do not
#endif

// Whether this kernel is the one to run, by what `sample` found: not negative where neighbours share enough.
DEVICE bool goes_on(const int* __restrict__ found) { return (__ldg(found) >= 0) == (GATE == 1); }
