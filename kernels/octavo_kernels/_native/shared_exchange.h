// Processes of one machine that exchange tensors through a memory that they share.
#pragma once

#include <cstdint>

// One process's end. As NativeExchange in shared_exchange.py.
struct SharedExchange {
    char* memory;  // as shared_exchange.cpp draws it
    int64_t rank, size;
    // Asked now and then while `peer` is waited for: not 0 to give up.
    int (*gives_up)(int64_t peer, double waited_s);
    int64_t sent_bytes;  // what this process has written for each of the others
    uint32_t round;      // rounds that this process has begun
};

extern "C" {

// Replace `data` by the sum over all processes, added in float32 in the order of ranks and rounded
// once. Returns 0, or 1 if a process was given up.
int octavo_shared_sum(int element, SharedExchange* exchange, void* data, int64_t count);

}  // extern "C"
