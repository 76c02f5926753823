// Hopper: mbarriers, TMA, wgmma and setmaxnreg (PTX ISA, "mbarrier", "cp.async.bulk.tensor", "wgmma.mma_async").
#pragma once

using uint64 = unsigned long long;

// A tensor map as the driver encodes it; a kernel only passes its address on.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// A tile of 16-bit elements as TMA writes it with a swizzle of 128 bytes: panels of 64 columns, 128 bytes a row. The
// low words of the descriptors say where a wgmma operand of 16 in depth begins, in units of 16 bytes; the high word is
// the same for all: 1024 bytes from 8 rows to the next, and the swizzle (PTX ISA, "Matrix descriptor format").
// A step in depth adds a constant to the low word: computed otherwise, issuing took longer than multiplying.
template <int ROWS_, int COLS_>
struct PanelTile {
  static constexpr int ROWS = ROWS_, COLS = COLS_, PANELS = (COLS + 63) / 64;
  static constexpr int PANEL_BYTES = ROWS * 128, BYTES = PANELS * PANEL_BYTES;
  static constexpr uint32 WARPGROUP_STEP = 64 * 128 / 16;  // from the rows of one warpgroup to those of the next
  static constexpr uint32 PANEL_STEP = PANEL_BYTES / 16;   // from the 64 columns of one warpgroup to those of the next
  static __device__ __forceinline__ uint32 start(SharedAddress tile) { return tile.address() / 16; }
  // Depth runs along the rows of the tile in memory: step k is 32 bytes further, in the next panel after four.
  static __device__ __forceinline__ uint32 k_major(int k) { return (k / 4 * PANEL_BYTES + k % 4 * 32) / 16; }
  // Depth runs down the rows: step k is 16 rows further, and the panels lie PANEL_BYTES apart.
  static __device__ __forceinline__ uint32 mn_major(int k) { return (PANEL_BYTES / 16 << 16) + k * 2048 / 16; }
  // The address of a 16-byte piece of a row, of which the swizzle exchanges the last three bits with those of the row.
  static __device__ __forceinline__ uint32 piece(SharedAddress tile, int row, int piece) {
    return tile.address() + piece / 8 * PANEL_BYTES + row * 128 + (piece % 8 ^ row % 8) * 16;
  }
};

// A register tile of 64 rows that all warpgroups have: each has all of its columns, or one of ACROSS parts.
template <int M, int N, int ACROSS>
struct SameRows {
  static constexpr int ROWS = 2, COLS = N / ACROSS / 4, PAIRS = COLS / 2;
  static_assert(M == 64 && N % (64 * ACROSS) == 0 || ACROSS == 1, "whole panels for each warpgroup");
  static __device__ __forceinline__ int first_row() { return int(threadIdx.x) / 32 % 4 * 16; }
  static __device__ __forceinline__ int first_col() { return int(threadIdx.x) / 128 % ACROSS * (N / ACROSS); }
  static __device__ __forceinline__ int row(int i) { return first_row() + i % 2 * 8 + int(threadIdx.x) % 32 / 4; }
  static __device__ __forceinline__ int lane_col() { return first_col() + int(threadIdx.x) % 4 * 2; }
  static __device__ __forceinline__ int col_offset(int j) { return j / 2 * 8 + j % 2; }
  static __device__ __forceinline__ int col(int j) { return lane_col() + col_offset(j); }
};

// The same in all lanes of a warp, and known to be by the compiler.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// At every so many columns: what these and later ones load is not asked for earlier. The compiler would ask for all of
// a row at once, for which it has no registers.
template <int COLUMNS>
__device__ __forceinline__ void hold_loads(int column) {
  if (column % COLUMNS == 0) asm volatile("" ::: "memory");
}

// A number for each column of a register tile, which the lanes of a warp hold: of every 64 columns, lane l has 2 l and
// 2 l + 1. The last may be none of the tile.
template <class Fragment>
__device__ __forceinline__ constexpr int held_columns() {
  return (Fragment::COLS + 15) / 16 * 2;
}
template <class Fragment>
__device__ __forceinline__ int held_column(int k) {
  return Fragment::first_col() + k / 2 * 64 + int(threadIdx.x) % 32 * 2 + k % 2;
}
// The number for this lane's element j. Lanes with the same columns, those of 8 rows, ask the same one of their fours:
// 0x03 keeps a lane's place among four, so that which four is a constant (PTX ISA, "shfl.sync").
template <int COUNT>
__device__ __forceinline__ int ask_column(const int (&held)[COUNT], int j) {
  int value;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x031f, 0xffffffff;" : "=r"(value) : "r"(held[j / 16 * 2 + j % 2]), "r"(j / 2 % 8 * 4));
  return value;
}
template <int COUNT>
__device__ __forceinline__ float ask_column(const float (&held)[COUNT], int j) {
  float value;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x031f, 0xffffffff;" : "=f"(value) : "f"(held[j / 16 * 2 + j % 2]), "r"(j / 2 % 8 * 4));
  return value;
}

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

// Nothing, though the compiler does not know that `zero` is 0.
template <int ROWS>
__device__ __forceinline__ int no_bits(const float (&rows)[ROWS], int zero) {
  int bits = 0;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) bits |= __float_as_int(rows[i]) & zero;
  return bits;
}

__device__ __forceinline__ void arrive(uint64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// One arrival a warp: 128 of them were measurably slower.
__device__ __forceinline__ void arrive_warp(uint64* barrier) {
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

// How long what is loaded should stay in the L2 (PTX ISA, "createpolicy").
__device__ __forceinline__ uint64 keep_in_cache() {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64 leave_cache_first() {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A tile lands in its panels and ends the phase of `full`; elements out of range are zeros, and count as bytes.
// BESIDE: bytes of vectors that land in the same phase.
template <class Tile, int BESIDE = 0>
__device__ __forceinline__ void tma_load(SharedAddress tile, uint64* full, const TensorMap& map, int row, int head, int batch, uint64 policy, int column = 0) {
  const uint32 barrier = shared_address(full);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(Tile::BYTES + BESIDE) : "memory");
#pragma unroll 1  // the loading thread has few registers
  for (int panel = 0; panel < Tile::PANELS; ++panel) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::
            "r"(tile.address() + panel * Tile::PANEL_BYTES),
        "l"(&map), "r"(barrier), "r"(column + panel * 64), "r"(row), "r"(head), "r"(batch), "l"(policy)
        : "memory");
  }
}

// Rows that end before their tensor does: the map counts them in three dimensions, whose coordinates say where the rows
// begin and how many are left. From LAST_ROW on rows are out of range: it is the coordinate of the first that is none of
// them. What that is too much for the address is taken back by the next dimensions, modulo 2^64: row + rows of the same
// stride, and LAST_ROW of 2^34 bytes less the stride. (Triton's ragged descriptors rest on the same.)
constexpr int LAST_ROW = 1 << 30;

// As tma_load, of a tile of which `rows` rows from `row` on are there, none where negative.
template <class Tile, int BESIDE = 0>
__device__ __forceinline__ void tma_load_rows(SharedAddress tile, uint64* full, const TensorMap& map, int row, int rows, int head, uint64 policy) {
  const uint32 barrier = shared_address(full);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(Tile::BYTES + BESIDE) : "memory");
#pragma unroll 1  // the loading thread has few registers
  for (int panel = 0; panel < Tile::PANELS; ++panel) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::
            "r"(tile.address() + panel * Tile::PANEL_BYTES),
        "l"(&map), "r"(barrier), "r"(panel * 64), "r"(LAST_ROW - rows), "r"(head), "r"(row + rows), "r"(LAST_ROW), "l"(policy)
        : "memory");
  }
}

// A piece of a vector lands beside the tile that `full` belongs to.
template <int COUNT>
__device__ __forceinline__ void load_vector(float* target, uint64* full, const float* source) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(target)),
      "l"(source), "n"(COUNT * 4), "r"(shared_address(full))
      : "memory");
}

// The number of this warp in the order of a tile, of which ACROSS warpgroups have a part of the columns each: what
// converts the tile later counts its warps along the columns first.
template <int ACROSS>
__device__ __forceinline__ int warp_of_tile() {
  const int warp = int(threadIdx.x) / 32;
  return ACROSS == 1 ? warp : warp % 4 * ACROSS + warp / 4;
}

// This thread's writes to shared memory will be seen by TMA and by products, which read through another proxy.
__device__ __forceinline__ void fence_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What this thread has read of shared memory has arrived, before TMA is told that it may write there again: an arrival at
// an mbarrier overtakes reads (a bias at head_dim 64, backward: wrong in the first step of most launches).
__device__ __forceinline__ void fence_reads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// One thread starts the copy of a warpgroup's 64 rows; what is out of range is not written. Of a tile that several heads
// share, POSITIONS rows of each, these are whole heads, or a part of one. ACROSS warpgroups have the same rows, and each
// the panels of one part.
template <class Tile, int POSITIONS = Tile::ROWS, int ACROSS = 1>
__device__ __forceinline__ void tma_store(const TensorMap& map, int row, int head, int batch, SharedAddress tile, int warpgroup) {
  if (threadIdx.x % 128 != 0) return;
  constexpr bool ONE_HEAD = POSITIONS == Tile::ROWS;
  static_assert(ONE_HEAD || 64 % POSITIONS == 0 || POSITIONS % 64 == 0, "the 64 rows are a box");
  const int first = Tile::ROWS == 64 ? 0 : 64 * warpgroup;  // all of a tile that one warpgroup has to itself
  if (ONE_HEAD) {  // the compiler does not know that `first` is less than the rows of a tile, and would divide
    row += first;
  } else {
    row += first % POSITIONS;
    head += first / POSITIONS;
  }
#pragma unroll
  for (int part = 0; part < Tile::PANELS / ACROSS; ++part) {
    const int panel = warpgroup % ACROSS * (Tile::PANELS / ACROSS) + part;
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
        "r"(tile.address() + panel * Tile::PANEL_BYTES + first * 128), "r"(panel * 64), "r"(row), "r"(head), "r"(batch)
        : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// As tma_store, of a tile of which `rows` rows from `row` on are there; of each head, where several share it.
template <class Tile, int POSITIONS = Tile::ROWS, int ACROSS = 1>
__device__ __forceinline__ void tma_store_rows(const TensorMap& map, int row, int rows, int head, SharedAddress tile, int warpgroup) {
  if (threadIdx.x % 128 != 0) return;
  constexpr bool ONE_HEAD = POSITIONS == Tile::ROWS;
  static_assert(ONE_HEAD || 64 % POSITIONS == 0 || POSITIONS % 64 == 0, "the 64 rows are a box");
  const int first = Tile::ROWS == 64 ? 0 : 64 * warpgroup;
  const int end = row + rows;
  if (ONE_HEAD) {
    rows -= first;
  } else {
    rows -= first % POSITIONS;
    head += first / POSITIONS;
  }
#pragma unroll
  for (int part = 0; part < Tile::PANELS / ACROSS; ++part) {
    const int panel = warpgroup % ACROSS * (Tile::PANELS / ACROSS) + part;
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
        "r"(tile.address() + panel * Tile::PANEL_BYTES + first * 128), "r"(panel * 64), "r"(LAST_ROW - rows), "r"(head), "r"(end), "r"(LAST_ROW)
        : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_stored() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Adds a register tile to a float32 accumulator in its order, without holding up the warp: each warp writes its stretch to
// its own part of shared memory, from where it is added as one bulk copy. It first waits for its last stretch to be read.
template <int WIDTH, int ROWS, int COLS>
__device__ __forceinline__ void reduce_fragment(float* target, float* through, const float (&tile)[ROWS][COLS], int warp) {
  static_assert(WIDTH == 4, "a lane stores 16 bytes at a time");
  constexpr int STRETCH = ROWS * COLS * 32;
  const bool issues = threadIdx.x % 32 == 0;
  float* const own = through + fragment_start<WIDTH, ROWS, COLS>(warp);
  if (issues) wait_stored();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLS; j += WIDTH) {
      *reinterpret_cast<float4*>(own + (i * COLS + j) * 32) = make_float4(tile[i][j], tile[i][j + 1], tile[i][j + 2], tile[i][j + 3]);
    }
  }
  fence_stores();
  __syncwarp();
  if (issues) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target + warp * STRETCH),
                 "r"(shared_address(through + warp * STRETCH)), "n"(STRETCH * int(sizeof(float)))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

// A packed accumulator goes to a tile in panels: the 16-byte piece of a row is swizzled as TMA expects it.
template <class Fragment, class Tile, int ROWS, int PAIRS>
__device__ __forceinline__ void store_panels(SharedAddress tile, const uint32 (&values)[ROWS][PAIRS]) {
  static_assert(ROWS == 2 && PAIRS % 2 == 0, "a warp holds 16 rows, and an instruction stores 16 columns");
  const int lane = threadIdx.x % 32;
  const int row = Fragment::first_row() + lane % 16;
  tile = tile + Fragment::first_col() / 64 * Tile::PANEL_BYTES;
#pragma unroll
  for (int j = 0; j < PAIRS; j += 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     Tile::piece(tile, row, j + lane / 16)),
                 "r"(values[0][j]), "r"(values[1][j]), "r"(values[0][j + 1]), "r"(values[1][j + 1])
                 : "memory");
  }
}

// The same of the transpose: columns of the accumulator are rows of the tile.
template <class Fragment, class Tile, int ROWS, int PAIRS>
__device__ __forceinline__ void store_panels_transposed(SharedAddress tile, const uint32 (&values)[ROWS][PAIRS]) {
  static_assert(ROWS == 2 && PAIRS % 2 == 0, "a warp holds 16 rows, and an instruction stores 16 columns");
  const int lane = threadIdx.x % 32;
  const int row = Fragment::first_col() + lane / 16 * 8 + lane % 8, piece = Fragment::first_row() / 8 + lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < PAIRS; j += 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     Tile::piece(tile, row + 8 * j, piece)),
                 "r"(values[0][j]), "r"(values[1][j]), "r"(values[0][j + 1]), "r"(values[1][j + 1])
                 : "memory");
  }
}

// One of the two numbers of a register.
template <class T>
__device__ __forceinline__ float unpacked(uint32 pair, int which);
template <>
__device__ __forceinline__ float unpacked<bf16>(uint32 pair, int which) {
  return __uint_as_float(which ? pair & 0xffff0000 : pair << 16);
}
template <>
__device__ __forceinline__ float unpacked<fp16>(uint32 pair, int which) {
  return to_float(fp16{static_cast<unsigned short>(which ? pair >> 16 : pair)});
}

// A warp's part of a tile in panels, packed, in the order of an accumulator.
template <class Fragment, class Tile, int ROWS, int PAIRS>
__device__ __forceinline__ void load_matrix(uint32 (&values)[ROWS][PAIRS], SharedAddress tile) {
  static_assert(ROWS == 2 && PAIRS % 2 == 0, "a warp holds 16 rows, and an instruction loads 16 columns");
  const int lane = threadIdx.x % 32;
  const int row = Fragment::first_row() + lane % 16;
#pragma unroll
  for (int j = 0; j < PAIRS; j += 2) {
    uint32 part[4];
    ldmatrix(part, Tile::piece(tile, row, j + lane / 16));
    values[0][j] = part[0], values[1][j] = part[1], values[0][j + 1] = part[2], values[1][j + 1] = part[3];
  }
}

// The same of a tile whose transpose is wanted: rows of the part are columns of the tile.
template <class Fragment, class Tile, int ROWS, int PAIRS>
__device__ __forceinline__ void load_matrix_transposed(uint32 (&values)[ROWS][PAIRS], SharedAddress tile) {
  static_assert(ROWS == 2 && PAIRS % 2 == 0, "a warp holds 16 rows, and an instruction loads 16 columns");
  const int lane = threadIdx.x % 32;
  const int piece = Fragment::first_row() / 8 + lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < PAIRS; j += 2) {
    uint32 part[4];
    ldmatrix_transposed(part, Tile::piece(tile, 8 * (j + lane / 16) + lane % 8, piece));
    values[0][j] = part[0], values[1][j] = part[1], values[0][j + 1] = part[2], values[1][j + 1] = part[3];
  }
}

// A register tile as it is, for the same threads of another warpgroup: pieces of 16 bytes, those of the 128 threads side
// by side.
template <int ROWS, int COLS>
__device__ __forceinline__ void hand_over(float* tile, const float (&values)[ROWS][COLS]) {
  static_assert(COLS % 4 == 0, "whole pieces");
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLS; j += 4) {
      *reinterpret_cast<float4*>(tile + ((i * COLS + j) / 4 * 128 + threadIdx.x % 128) * 4) =
          make_float4(values[i][j], values[i][j + 1], values[i][j + 2], values[i][j + 3]);
    }
  }
}
template <int ROWS, int COLS>
__device__ __forceinline__ void take_over(float (&values)[ROWS][COLS], const float* tile) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLS; j += 4) {
      const float4 piece = *reinterpret_cast<const float4*>(tile + ((i * COLS + j) / 4 * 128 + threadIdx.x % 128) * 4);
      values[i][j] = piece.x, values[i][j + 1] = piece.y, values[i][j + 2] = piece.z, values[i][j + 3] = piece.w;
    }
  }
}

// The next tile behind those of the first round. As many questions in a launch as tiles: the counter, which goes round
// behind the last of them, is zero for the next launch.
__device__ __forceinline__ int ask_tile(int* counter, int tiles, int blocks) {
  return atomicInc(reinterpret_cast<uint32*>(counter), tiles - 1) + blocks;
}
template <int COUNT>
__device__ __forceinline__ void publish_tile(int* next, uint64* full, const int (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) next[i] = values[i];
  arrive(full);
}
__device__ __forceinline__ int take_tile(const int* next, int index) {
  int value;  // volatile: what is taken late is not to be kept in registers until then
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(shared_address(next + index)) : "memory");
  return uniform(value);
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
// What is computed before stays before, and what uses the tile stays behind: waits mean nothing to the compiler.
template <int ROWS, int COLS>
__device__ __forceinline__ void settle(float (&tile)[ROWS][COLS]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLS; ++j) asm volatile("" : "+f"(tile[i][j])::"memory");
  }
}
__device__ __forceinline__ void settle(int& number) { asm volatile("" : "+r"(number)::"memory"); }

// Whether an element of a packed tile of numbers that are not negative is 2 or more, or is no number: the highest bit of
// its exponent is then set, in bfloat16 as in float16. In any lane of the warp.
template <int ROWS, int PAIRS>
__device__ __forceinline__ bool any_large(const uint32 (&tile)[ROWS][PAIRS]) {
  uint32 bits = 0;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) bits |= tile[i][j];
  }
  return __any_sync(0xffffffffu, bits & 0x40004000);
}

// A warp's 16 rows of scores = q k^T, without the other warps of its warpgroup: slow, and seldom needed.
template <class Rows, class Cols, class T, int ROWS, int COLS>
__device__ __forceinline__ void rescore(float (&scores)[ROWS][COLS], SharedAddress q, SharedAddress k) {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // volatile, or addresses are computed ahead, and take registers
  const int lane = thread % 32, first_row = (Rows::ROWS == 64 ? thread / 32 % 4 : thread / 32) * 16;
#pragma unroll
  for (int j = 0; j < COLS; ++j) scores[0][j] = scores[1][j] = 0.0f;
#pragma unroll 1
  for (int depth = 0; depth < (Rows::COLS + 15) / 16; ++depth) {
    uint32 a[4], b[4];
    ldmatrix(a, Rows::piece(q, first_row + lane % 16, 2 * depth + lane / 16));
#pragma unroll
    for (int j = 0; j < COLS; j += 4) {
      ldmatrix(b, Cols::piece(k, 4 * j + lane / 16 * 8 + lane % 8, 2 * depth + lane / 8 % 2));
      mma<T>(scores[0][j], scores[0][j + 1], scores[1][j], scores[1][j + 1], a, b[0], b[1]);
      mma<T>(scores[0][j + 2], scores[0][j + 3], scores[1][j + 2], scores[1][j + 3], a, b[2], b[3]);
    }
  }
}

// Named barriers; number 0 is that of the whole block. One for each warpgroup of the last two kinds.
enum NamedBarrier { CONSUMERS = 1, WARPGROUP = 2, TURN = 5 };

// The computing warps meet.
template <int THREADS>
__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(int(CONSUMERS)), "n"(THREADS) : "memory");
}
// The four warps of a warpgroup meet.
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(WARPGROUP + warpgroup) : "memory");
}
// One warpgroup at a time issues its products: it meets at its barrier with the one before, which does not wait there.
__device__ __forceinline__ void wait_turn(int warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(TURN + warpgroup) : "memory");
}
template <int WARPGROUPS>
__device__ __forceinline__ void pass_turn(int warpgroup) {
  asm volatile("" : "+r"(warpgroup));  // or the number of the next barrier is kept in a register
  asm volatile("bar.arrive %0, 256;" ::"r"(TURN + (warpgroup + 1 < WARPGROUPS ? warpgroup + 1 : 0)) : "memory");
}
template <int WARPGROUPS>
__device__ __forceinline__ void first_turn(int warpgroup) {
  if (warpgroup == WARPGROUPS - 1) pass_turn<WARPGROUPS>(warpgroup);
}
