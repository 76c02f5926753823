// Ampere: cp.async into shared memory, and products of tiles there (PTX ISA, "Warp-level matrix instructions").
#pragma once

__device__ __forceinline__ void commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// 16 bytes, or zeros where `valid` does not hold (the source is then not read). Past L1: tiles are read once a block.
__device__ __forceinline__ void copy_16_async(uint32 target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

// A tile of global memory into shared memory, zeros from row rows_left and from column TRUE_COLS on. Each thread
// compares what is left from its own first row on with constants: the rows themselves would take a register each.
template <class Tile, int TRUE_COLS, int THREADS, class T>
__device__ __forceinline__ void copy_tile_async(SharedAddress tile, const T* source, int row_stride, int rows_left) {
  using Split = Pieces<Tile, THREADS>;
  const uint32 target = tile.address() + Split::row() * Tile::ROW_BYTES + Split::col() * Tile::ELEMENT_BYTES;
  const T* line = source + int64(Split::row()) * row_stride + Split::col();
#pragma unroll
  for (int r = 0; r < Split::ROW_PASSES; ++r) {
    if (Split::inside(Split::row() + r * Split::ROW_STEP)) {
#pragma unroll
      for (int c = 0; c < Split::COL_PASSES; ++c) {
        const bool column = TRUE_COLS == Tile::COLS || Split::col() + c * Split::LANES * Split::ELEMENTS < TRUE_COLS;
        copy_16_async(target + r * Split::ROW_STEP * Tile::ROW_BYTES + c * Split::LANES * 16,
                      line + c * Split::LANES * Split::ELEMENTS, Split::row() + r * Split::ROW_STEP < rows_left && column);
      }
    }
    line += int64(Split::ROW_STEP) * row_stride;
  }
}

// The same for rows that do not start on 16-byte boundaries: element by element, through registers.
template <class Tile, int TRUE_COLS, int THREADS, class T>
__device__ __forceinline__ void copy_tile_elements(SharedAddress tile, const T* source, int row_stride, int rows_left) {
#pragma unroll 4
  for (int at = threadIdx.x; at < Tile::ROWS * Tile::COLS; at += THREADS) {
    const int row = at / Tile::COLS, col = at % Tile::COLS;
    const bool valid = row < rows_left && col < TRUE_COLS;
    *reinterpret_cast<T*>(tile.data + row * Tile::ROW_BYTES + col * Tile::ELEMENT_BYTES) =
        valid ? source[int64(row) * row_stride + col] : T{};
  }
}

// float32 rows into shared memory, zeros from rows_left on.
template <int ROWS, int THREADS>
__device__ __forceinline__ void copy_vector_async(float* target, const float* source, int rows_left) {
#pragma unroll
  for (int first = 0; first < ROWS; first += THREADS) {
    const int row = first + int(threadIdx.x);
    if (ROWS % THREADS && row >= ROWS) continue;
    const bool valid = row < rows_left;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(target + row)),
                 "l"(valid ? source + row : source), "r"(valid ? 4 : 0)
                 : "memory");
  }
}

// acc += a[:, 16 rows of depth] b[16 rows of depth, :]. `b_first` is this lane's ldmatrix address for depth 0, column 0.
template <class T, class BTile, bool B_IS_NK, int ROWS, int COLS>
__device__ __forceinline__ void multiply_depth(float (&acc)[ROWS][COLS], const uint32 (&a)[ROWS / 2][4], uint32 b_first,
                                               int depth) {
#pragma unroll
  for (int j = 0; j < COLS / 4; ++j) {
    uint32 b[4];
    if (B_IS_NK) {
      ldmatrix(b, b_first + j * 16 * BTile::ROW_BYTES + depth * 32);
    } else {
      ldmatrix_transposed(b, b_first + depth * 16 * BTile::ROW_BYTES + j * 32);
    }
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
      float(&top)[COLS] = acc[2 * i];
      float(&low)[COLS] = acc[2 * i + 1];
      mma<T>(top[4 * j], top[4 * j + 1], low[4 * j], low[4 * j + 1], a[i], b[0], b[1]);
      mma<T>(top[4 * j + 2], top[4 * j + 3], low[4 * j + 2], low[4 * j + 3], a[i], b[2], b[3]);
    }
  }
}

// This lane's address within an operand B kept as [n][k] (B_IS_NK) or as [k][n].
template <class Layout, class BTile, bool B_IS_NK>
__device__ __forceinline__ uint32 b_address(SharedAddress b) {
  const int lane = int(threadIdx.x) % 32;
  const int n = Layout::first_col() + lane / 16 * 8, k = lane / 8 % 2 * 8, r = lane % 8;
  return b.address() + (B_IS_NK ? (n + r) * BTile::ROW_BYTES + k * 2 : (k + r) * BTile::ROW_BYTES + n * 2);
}

// acc += A B with A in shared memory, kept as [m][k], or as [k][m] where A_IS_KM. Unrolled no further than UNROLLED
// steps of depth: fragments loaded ahead cost registers that wide accumulators leave no room for.
template <class T, int UNROLLED, class Layout, class ATile, bool A_IS_KM, class BTile, bool B_IS_NK, int ROWS, int COLS>
__device__ __forceinline__ void multiply_shared(float (&acc)[ROWS][COLS], SharedAddress a, SharedAddress b) {
  constexpr int DEPTH = A_IS_KM ? ATile::ROWS : ATile::COLS;
  const int lane = int(threadIdx.x) % 32;
  const uint32 b_first = b_address<Layout, BTile, B_IS_NK>(b);
  const int m = Layout::first_row();
  const uint32 a_first = a.address() + (A_IS_KM ? (lane / 16 * 8 + lane % 8) * ATile::ROW_BYTES + (m + lane / 8 % 2 * 8) * 2
                                                : (m + lane % 16) * ATile::ROW_BYTES + lane / 16 * 16);
#pragma unroll UNROLLED
  for (int depth = 0; depth < DEPTH / 16; ++depth) {
    uint32 a_part[ROWS / 2][4];
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
      if (A_IS_KM) {
        ldmatrix_transposed(a_part[i], a_first + depth * 16 * ATile::ROW_BYTES + i * 32);
      } else {
        ldmatrix(a_part[i], a_first + i * 16 * ATile::ROW_BYTES + depth * 32);
      }
    }
    multiply_depth<T, BTile, B_IS_NK>(acc, a_part, b_first, depth);
  }
}

// acc += A B with A packed in registers: an accumulator's layout, rounded, is the layout of an A operand.
template <class T, class Layout, class BTile, bool B_IS_NK, int ROWS, int COLS, int PAIRS>
__device__ __forceinline__ void multiply_packed(float (&acc)[ROWS][COLS], const uint32 (&a)[ROWS][PAIRS], SharedAddress b) {
  const uint32 b_first = b_address<Layout, BTile, B_IS_NK>(b);
#pragma unroll
  for (int depth = 0; depth < PAIRS / 2; ++depth) {
    uint32 a_part[ROWS / 2][4];
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
      a_part[i][0] = a[2 * i][2 * depth];
      a_part[i][1] = a[2 * i + 1][2 * depth];
      a_part[i][2] = a[2 * i][2 * depth + 1];
      a_part[i][3] = a[2 * i + 1][2 * depth + 1];
    }
    multiply_depth<T, BTile, B_IS_NK>(acc, a_part, b_first, depth);
  }
}
