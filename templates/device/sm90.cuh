// Hopper: mbarriers, TMA, wgmma and setmaxnreg (PTX ISA, "mbarrier", "cp.async.bulk.tensor", "wgmma.mma_async").
#pragma once

using uint64 = unsigned long long;

// A tensor map as the driver encodes it; a kernel only passes its address on.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// A tile of 16-bit elements as TMA writes it with a swizzle of 128 bytes: panels of 64 columns, 128 bytes a row. The
// descriptors say where a wgmma operand of 16 in depth begins (PTX ISA, "Matrix descriptor format").
template <int ROWS_, int COLS_>
struct PanelTile {
  static constexpr int ROWS = ROWS_, COLS = COLS_, PANELS = (COLS + 63) / 64;
  static constexpr int PANEL_BYTES = ROWS * 128, BYTES = PANELS * PANEL_BYTES;
  static __device__ __forceinline__ uint64 descriptor(uint32 address, uint32 leading, uint32 stride) {
    return uint64((address & 0x3ffff) >> 4) | uint64(leading >> 4) << 16 | uint64(stride >> 4) << 32 | 1ull << 62;
  }
  // Depth runs along the rows of the tile in memory: step k is 32 bytes further, in the next panel after four.
  static __device__ __forceinline__ uint64 k_major(SharedAddress tile, int row, int k) {
    return descriptor(tile.address() + k / 4 * PANEL_BYTES + row * 128 + k % 4 * 32, 16, 1024);
  }
  static __device__ __forceinline__ uint64 k_major(SharedAddress tile, int k) { return k_major(tile, 0, k); }
  // Depth runs down the rows: step k is 16 rows further, and the panels lie `leading` apart.
  static __device__ __forceinline__ uint64 mn_major(SharedAddress tile, int k) {
    return descriptor(tile.address() + k * 2048, PANEL_BYTES, 1024);
  }
};

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// The same in all lanes of a warp, and known to be by the compiler.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0); }

template <int COUNT>
__device__ __forceinline__ void init_barriers(uint64* barriers, int arrivals) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barriers + i)), "r"(arrivals) : "memory");
  }
}
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void wait_barrier(uint64* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// One arrival a warp: 128 of them were measurably slower.
__device__ __forceinline__ void arrive_warp(uint64* barrier) {
  if (threadIdx.x % 32 == 0) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
  }
}

// A tile lands in its panels and ends the phase of `full`; elements out of range are zeros, and count as bytes.
template <class Tile>
__device__ __forceinline__ void tma_load(SharedAddress tile, uint64* full, const TensorMap& map, int row, int head, int batch) {
  const uint32 barrier = shared_address(full);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(Tile::BYTES) : "memory");
#pragma unroll 1  // the loading thread has 24 registers
  for (int panel = 0; panel < Tile::PANELS; ++panel) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
            "r"(tile.address() + panel * Tile::PANEL_BYTES),
        "l"(&map), "r"(barrier), "r"(panel * 64), "r"(row), "r"(head), "r"(batch)
        : "memory");
  }
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Behind a wait: the compiler may not move a use of the accumulator before this.
template <int ROWS, int COLS>
__device__ __forceinline__ void settle(float (&tile)[ROWS][COLS]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLS; ++j) asm volatile("" : "+f"(tile[i][j])::"memory");
  }
}

// The computing warps meet; barrier 0 is that of the whole block.
template <int THREADS>
__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
