// What decides between kernels that are launched one after the other for the same batch: only one of them goes on.
#pragma once

#include "instructions.cuh"

#ifndef GATE
#define GATE 0  // 0: always run; 1: only if neighbouring query rows share enough; 2: only if they do not
#endif

// Whether this kernel is the one to run, by what `sample` counted. From half of a row's entries on, unions are taken:
// a line through the recorded times of unions of two with 8 heads crosses those of single rows at 0.4
// (docs/benchmarks/h200/sparse-mla-prefill). On an H100 that emulates SM86 they cross there as well
// (docs/benchmarks/h100/portable-sparse-mla-prefill-beside-rivals).
DEVICE bool goes_on(const int* __restrict__ found) { return (2 * __ldg(found) >= __ldg(found + 1)) == (GATE == 1); }
