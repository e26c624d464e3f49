// A paged cache as the sparse MLA kernels get it from their host side (`CudaScope` of sparse_mla.py).
#pragma once

#include "instructions.cuh"

// One cache and the rows of it that the queries name.
struct Scope {
    const u8* data;
    i64 page_stride;      // bytes
    const int* indices;
    i64 indices_stride;   // entries between query rows
    const int* lengths;   // entries that count, by query row / lengths_divisor; null: all
    int lengths_divisor;
    int page_size;
    int page_shift;       // log2 of the page size, or -1
    int num_slots;
    int topk;
};

DEVICE int page_of(const Scope& scope, int slot) {
    return scope.page_shift >= 0 ? slot >> scope.page_shift : slot / scope.page_size;
}

// Where the record of a slot lies, where those of a page follow each other.
DEVICE const u8* find_record(const Scope& scope, int slot, int bytes) {
    int page = page_of(scope, slot);
    return scope.data + page * scope.page_stride + (i64)(slot - page * scope.page_size) * bytes;
}

DEVICE int scope_length(const Scope& scope, int row) {
    if (!scope.lengths) return scope.topk;
    int length = scope.lengths[row / scope.lengths_divisor];
    return min(max(length, 0), scope.topk);
}
