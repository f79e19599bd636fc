#include "emulated_ops.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace fake {
namespace {

constexpr int kLanes = 32;
constexpr std::size_t kStackBytes = 128 * 1024;

// Where threads meet: the last to come computes for all, and opens the way.
struct Meeting {
  int wanted = 0;
  int come = 0;
  uint64_t round = 0;
};

struct LaneData {
  float c[4];
  uint32_t a[4];
  uint32_t b[2];
  float value;
};

struct Warp {
  Meeting meeting;
  LaneData lanes[kLanes];
  float shuffled[kLanes];
};

struct Thread {
  jmp_buf place;  // where it gave way
  int number = 0;
  bool has_begun = false;
  bool is_done = false;
};

struct Block {
  jmp_buf scheduler;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Meeting everyone;
  const std::function<void(int)>* body = nullptr;
  Thread* running = nullptr;
  uint64_t progress = 0;
};

thread_local Block* block = nullptr;

// Stacks outlive blocks: thousands of those run one after the other.
thread_local std::vector<std::unique_ptr<char[]>> stacks;

// Not swapcontext, which asks the kernel for the signal mask each time.
void give_way() {
  if (_setjmp(block->running->place) == 0) _longjmp(block->scheduler, 1);
}

template <typename Compute>
void meet(Meeting& meeting, Compute compute) {
  const uint64_t round = meeting.round;
  if (++meeting.come == meeting.wanted) {
    compute();
    meeting.come = 0;
    ++meeting.round;
    ++block->progress;
    return;
  }
  while (meeting.round == round) give_way();
}

void thread_main() {
  (*block->body)(block->running->number);
  block->running->is_done = true;
  ++block->progress;
  _longjmp(block->scheduler, 1);
}

// Begins a thread on a stack of its own, or goes on where it gave way; returns when it gives way or ends.
void resume(Thread& thread) {
  block->running = &thread;
  if (_setjmp(block->scheduler) != 0) return;
  if (thread.has_begun) _longjmp(thread.place, 1);
  thread.has_begun = true;
  ucontext_t begin;
  getcontext(&begin);
  begin.uc_stack.ss_sp = stacks[thread.number].get();
  begin.uc_stack.ss_size = kStackBytes;
  begin.uc_link = nullptr;
  makecontext(&begin, thread_main, 0);
  setcontext(&begin);
}

Warp& own_warp() { return block->warps[block->running->number / kLanes]; }
int own_lane() { return block->running->number % kLanes; }

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Half `high` of a register as a float.
float half_of(uint32_t packed, int high) { return from_bits(high ? packed & 0xffff0000u : packed << 16); }

// The layout of fragments is that of the PTX ISA's figures for mma.m16n8k16 with 16-bit elements.
void multiply_warp(Warp& warp) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane / 4, part = lane % 4;
    for (int i = 0; i < 8; ++i) {  // element i lies in half i % 2 of register i / 2
      const int row = group + (i / 2 % 2 == 1 ? 8 : 0);
      const int column = part * 2 + i % 2 + (i >= 4 ? 8 : 0);
      a[row][column] = half_of(warp.lanes[lane].a[i / 2], i % 2);
    }
    for (int i = 0; i < 4; ++i) {
      const int row = part * 2 + i % 2 + (i >= 2 ? 8 : 0);
      b[row][group] = half_of(warp.lanes[lane].b[i / 2], i % 2);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
      float sum = warp.lanes[lane].c[i];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      warp.lanes[lane].c[i] = sum;
    }
  }
}

}  // namespace

void run_block(int num_threads, const std::function<void(int)>& body) {
  Block own;
  own.threads.resize(num_threads);
  own.warps.resize((num_threads + kLanes - 1) / kLanes);
  own.everyone.wanted = num_threads;
  own.body = &body;
  for (Warp& warp : own.warps) warp.meeting.wanted = kLanes;
  block = &own;
  for (int i = 0; i < num_threads; ++i) own.threads[i].number = i;
  while (static_cast<int>(stacks.size()) < num_threads) {
    stacks.push_back(std::unique_ptr<char[]>(new char[kStackBytes]));
  }
  int left = num_threads;
  while (left > 0) {
    const uint64_t before = own.progress;
    left = 0;
    for (Thread& thread : own.threads) {
      if (thread.is_done) continue;
      resume(thread);
      if (!thread.is_done) ++left;
    }
    if (left > 0 && own.progress == before) {
      std::fprintf(stderr, "fake device: %d threads of a block wait for threads that will not come\n", left);
      std::abort();
    }
  }
  block = nullptr;
}

void EmulatedOps::multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
  Warp& warp = own_warp();
  LaneData& own = warp.lanes[own_lane()];
  own = {{c[0], c[1], c[2], c[3]}, {a0, a1, a2, a3}, {b0, b1}, 0.0f};
  meet(warp.meeting, [&] { multiply_warp(warp); });
  std::memcpy(c, own.c, sizeof(own.c));
}

float EmulatedOps::shuffle_xor(float value, int mask) {
  Warp& warp = own_warp();
  const int lane = own_lane();
  warp.lanes[lane].value = value;
  meet(warp.meeting, [&] {
    for (int i = 0; i < kLanes; ++i) warp.shuffled[i] = warp.lanes[i].value;
  });
  return warp.shuffled[lane ^ mask];
}

void EmulatedOps::sync_block() {
  meet(block->everyone, [] {});
}

float EmulatedOps::exp2(float x) { return std::exp2(x); }

uint16_t EmulatedOps::round(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint32_t EmulatedOps::pack(float low, float high) { return round(low) | static_cast<uint32_t>(round(high)) << 16; }

uint32_t EmulatedOps::byte_perm(uint32_t x, uint32_t y, uint32_t select) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (select >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return result;
}

uint4 EmulatedOps::load16(const uint16_t* from) {
  // The device refuses an address that is no multiple of the size; so does this.
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) std::abort();
  uint4 value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

uint2 EmulatedOps::load8(const uint16_t* from) {
  if (reinterpret_cast<uintptr_t>(from) % 8 != 0) std::abort();
  uint2 value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

void EmulatedOps::store16(uint16_t* to, uint4 value) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) std::abort();
  std::memcpy(to, &value, sizeof(value));
}

}  // namespace fake
