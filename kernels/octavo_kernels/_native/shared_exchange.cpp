// Sums and gathers over processes of one machine, through a memory that they share.
//
//     line 0 .. size - 1   how far each process is, and how many sleep until it is further
//     slots                kPieceBytes for each process, twice: round r uses those of r % 2
//
// A round is at most one piece: each process waits until all have begun the round before, writes
// its own slot and says so, and those that want the others' wait for them. Whoever has begun a
// round has read all that it wants of the one before it, so a slot is free again two rounds later.

#include "shared_exchange.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "elements.h"

namespace {

constexpr int64_t kPieceBytes = 1 << 18;  // as PIECE_BYTES in shared_exchange.py
constexpr int64_t kLineBytes = 64;
constexpr double kSpinS = 200e-6;  // about what lies between two sums of a step
constexpr long kSleepNs = 20'000'000;

struct Line {
    uint32_t round;     // of the last slot that is written
    uint32_t sleepers;  // who may wait for it in the kernel
};

INLINE Line* line_of(const SharedExchange& exchange, int64_t rank) {
    return reinterpret_cast<Line*>(exchange.memory + rank * kLineBytes);
}

INLINE char* slot_of(const SharedExchange& exchange, int64_t rank) {
    const int64_t index = (exchange.round & 1) * exchange.size + rank;
    return exchange.memory + exchange.size * kLineBytes + index * kPieceBytes;
}

INLINE bool has_begun(const Line* line, uint32_t round) {
    const uint32_t found = __atomic_load_n(&line->round, __ATOMIC_SEQ_CST);
    return static_cast<int32_t>(found - round) >= 0;  // rounds may wrap around
}

double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

INLINE void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Look often for a short time: a sleeper takes longer to wake than most rounds take.
bool sees_soon(const Line* line, uint32_t round, double until_s) {
    do {
        for (int look = 0; look < 100; ++look) {
            if (has_begun(line, round)) return true;
            pause_briefly();
        }
        sched_yield();  // where there are more processes than cores, the other one may need this
    } while (now_s() < until_s);
    return false;
}

// Returns whether a process has begun a round, or false if it is given up.
bool wait_for(const SharedExchange& exchange, int64_t peer, uint32_t round) {
    Line* line = line_of(exchange, peer);
    if (has_begun(line, round)) return true;
    const double began_s = now_s();
    if (sees_soon(line, round, began_s + kSpinS)) return true;
    const timespec limit = {0, kSleepNs};
    while (true) {
        __atomic_add_fetch(&line->sleepers, 1, __ATOMIC_SEQ_CST);
        const uint32_t seen = __atomic_load_n(&line->round, __ATOMIC_SEQ_CST);
        if (static_cast<int32_t>(seen - round) < 0)
            syscall(SYS_futex, &line->round, FUTEX_WAIT, seen, &limit, nullptr, 0);
        __atomic_sub_fetch(&line->sleepers, 1, __ATOMIC_SEQ_CST);
        if (has_begun(line, round)) return true;
        if (exchange.gives_up(peer, now_s() - began_s)) return false;
    }
}

bool wait_for_all(const SharedExchange& exchange, uint32_t round) {
    for (int64_t peer = 0; peer < exchange.size; ++peer)
        if (peer != exchange.rank && !wait_for(exchange, peer, round)) return false;
    return true;
}

// Begin a round with this process's piece. Returns whether the others are still there.
bool write_piece(SharedExchange* exchange, const void* piece, int64_t bytes) {
    if (!wait_for_all(*exchange, exchange->round)) return false;
    ++exchange->round;
    memcpy(slot_of(*exchange, exchange->rank), piece, bytes);
    Line* line = line_of(*exchange, exchange->rank);
    __atomic_store_n(&line->round, exchange->round, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&line->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &line->round, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    return true;
}

template <class T>
void add_in_order(const SharedExchange& exchange, void* piece, int64_t count) {
    using E = typename T::Element;
    E* own = static_cast<E*>(piece);
    const E* slots = reinterpret_cast<const E*>(slot_of(exchange, 0));
    constexpr int64_t stride = kPieceBytes / sizeof(E);
    for_pieces(count, [&](int64_t i, int lanes) {
        Floats sum = {};
        for (int64_t rank = 0; rank < exchange.size; ++rank) {
            const E* from = rank == exchange.rank ? own : slots + rank * stride;
            const Floats part = read<T>(from + i, lanes);
            sum = rank ? sum + part : part;
        }
        write<T>(own + i, sum, lanes);
    });
}

}  // namespace

extern "C" {

int octavo_shared_sum(int element, SharedExchange* exchange, void* data, int64_t count) {
    const auto add = for_element(element, add_in_order<Float32>, add_in_order<BFloat16>,
                                 add_in_order<Float16>);
    const int64_t element_bytes = element == kFloat32 ? 4 : 2;
    const int64_t most = kPieceBytes / element_bytes;
    for (int64_t first = 0; first < count; first += most) {
        const int64_t length = std::min(most, count - first);
        char* piece = static_cast<char*>(data) + first * element_bytes;
        if (!write_piece(exchange, piece, length * element_bytes)) return 1;
        if (!wait_for_all(*exchange, exchange->round)) return 1;
        add(*exchange, piece, length);
    }
    exchange->sent_bytes += count * element_bytes;
    return 0;
}

// Bring the parts of all processes together in `out` [size, bytes] of the first; `out` is null in
// the others. Returns as above.
int octavo_shared_gather(SharedExchange* exchange, const char* part, char* out, int64_t bytes) {
    for (int64_t first = 0; first < bytes; first += kPieceBytes) {
        const int64_t length = std::min(kPieceBytes, bytes - first);
        if (!write_piece(exchange, part + first, length)) return 1;
        if (exchange->rank != 0) continue;
        if (!wait_for_all(*exchange, exchange->round)) return 1;
        for (int64_t rank = 0; rank < exchange->size; ++rank)
            memcpy(out + rank * bytes + first, slot_of(*exchange, rank), length);
    }
    return 0;
}

}  // extern "C"
