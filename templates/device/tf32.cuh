// float32 operands: products of TF32, which has the exponent of float32 and 10 bits of its fraction (PTX ISA, "Matrix
// fragments for mma.m16n8k8").
#pragma once

// float32 inputs, in memory the same; the type says what their products are: three of TF32, or one.
struct fp32 {
  float value;
};
struct tf32 {
  float value;
};

__device__ __forceinline__ float to_float(fp32 x) { return x.value; }
__device__ __forceinline__ float to_float(tf32 x) { return x.value; }

// The nearest TF32, ties away from zero, as the bits of a float32.
__device__ __forceinline__ uint32 round_to_tf32(float x) {
  uint32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

// Four elements of an operand: two rows (of A; columns of B), 8 apart, by two places in depth.
template <class T>
struct Part;
template <>
struct Part<tf32> {
  uint32 high[4];
  __device__ __forceinline__ void set(int n, uint32 word) { high[n] = round_to_tf32(__uint_as_float(word)); }
};
// x = high + low up to 2^-22 of x.
template <>
struct Part<fp32> {
  uint32 high[4], low[4];
  __device__ __forceinline__ void set(int n, uint32 word) {
    const float x = __uint_as_float(word);
    high[n] = round_to_tf32(x);
    low[n] = round_to_tf32(x - __uint_as_float(high[n]));
  }
};

// acc += a (16 x 8) b (8 x 8): of b those of the four elements that belong to column n or n + 8.
__device__ __forceinline__ void mma_tf32(float (&acc)[4], const uint32 (&a)[4], const uint32 (&b)[4], int column) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[column]), "r"(b[2 + column]));
}
__device__ __forceinline__ void multiply_parts(float (&acc)[4], const Part<tf32>& a, const Part<tf32>& b, int column) {
  mma_tf32(acc, a.high, b.high, column);
}
// The small terms first; low * low is below what float32 keeps. The tensor cores cut sums off instead of rounding them,
// which over thousands of keys would add up: each sum of 8 starts at zero and is added, rounded to nearest, by itself
// (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022).
__device__ __forceinline__ void multiply_parts(float (&acc)[4], const Part<fp32>& a, const Part<fp32>& b, int column) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  mma_tf32(sum, a.low, b.high, column);
  mma_tf32(sum, a.high, b.low, column);
  mma_tf32(sum, a.high, b.high, column);
#pragma unroll
  for (int n = 0; n < 4; ++n) acc[n] += sum[n];
}

// What a lane reads of 16 rows (of A; columns of B) by 8 in depth of an operand in shared memory, kept as [row][k], or as
// [k][row] where K_FIRST. Of the 8 in depth lane t of four holds t and t + 4, as ldmatrix gives them; where PAIRED, 2 t
// and 2 t + 1, as an accumulator holds its columns. A sum does not care, as long as A and B agree; and of tiles kept as
// [k][row] the rows 2 t lie in different banks, which t do not.
template <class Tile, bool K_FIRST, bool PAIRED>
struct Strip {
  static constexpr bool BY_MATRIX = !K_FIRST && !PAIRED;
  uint32 first;
  __device__ __forceinline__ Strip(SharedAddress tile, int row) {
    const int lane = int(threadIdx.x) % 32, k = lane % 4 * (PAIRED ? 2 : 1), r = row + lane / 4;
    first = tile.address() + (BY_MATRIX ? (row + lane % 16) * Tile::ROW_BYTES + lane / 16 * 16
                              : K_FIRST ? k * Tile::ROW_BYTES + r * 4
                                        : r * Tile::ROW_BYTES + k * 4);
  }
  __device__ __forceinline__ void load(uint32 (&words)[4], int row, int depth) const {
    if (BY_MATRIX) {
      ldmatrix(words, first + row * Tile::ROW_BYTES + depth * 32);
      return;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int k = depth * 8 + n / 2 * (PAIRED ? 1 : 4), r = row + n % 2 * 8;
      const uint32 address = first + (K_FIRST ? k * Tile::ROW_BYTES + r * 4 : r * Tile::ROW_BYTES + k * 4);
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[n]) : "r"(address));
    }
  }
};

// acc += a[:, 8 of depth] b[8 of depth, :].
template <class T, class B, int ROWS, int COLS>
__device__ __forceinline__ void multiply_depth_tf32(float (&acc)[ROWS][COLS], const Part<T> (&a)[ROWS / 2], const B& b,
                                                    int depth) {
#pragma unroll
  for (int j = 0; j < COLS / 4; ++j) {
    uint32 words[4];
    b.load(words, j * 16, depth);
    Part<T> part;
#pragma unroll
    for (int n = 0; n < 4; ++n) part.set(n, words[n]);
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float* top = &acc[2 * i][4 * j + 2 * column];
        float* low = &acc[2 * i + 1][4 * j + 2 * column];
        float sum[4] = {top[0], top[1], low[0], low[1]};
        multiply_parts(sum, a[i], part, column);
        top[0] = sum[0], top[1] = sum[1], low[0] = sum[2], low[1] = sum[3];
      }
    }
  }
}

// acc += A B with A in shared memory, kept as [m][k], or as [k][m] where A_IS_KM; B as [n][k] (B_IS_NK) or as [k][n].
template <class T, int UNROLLED, class Layout, class ATile, bool A_IS_KM, class BTile, bool B_IS_NK, int ROWS, int COLS>
__device__ __forceinline__ void multiply_shared_tf32(float (&acc)[ROWS][COLS], SharedAddress a, SharedAddress b) {
  constexpr int DEPTH = A_IS_KM ? ATile::ROWS : ATile::COLS;
  const Strip<ATile, A_IS_KM, !B_IS_NK> a_strip(a, Layout::first_row());
  const Strip<BTile, !B_IS_NK, !B_IS_NK> b_strip(b, Layout::first_col());
#pragma unroll UNROLLED
  for (int depth = 0; depth < DEPTH / 8; ++depth) {
    Part<T> a_part[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
      uint32 words[4];
      a_strip.load(words, i * 16, depth);
#pragma unroll
      for (int n = 0; n < 4; ++n) a_part[i].set(n, words[n]);
    }
    multiply_depth_tf32(acc, a_part, b_strip, depth);
  }
}

// acc += A B with A in registers as an accumulator holds it: its columns are the depth, B is kept as [k][n].
template <class T, class Layout, class BTile, bool B_IS_NK, int ROWS, int COLS, int DEPTH>
__device__ __forceinline__ void multiply_packed_tf32(float (&acc)[ROWS][COLS], const float (&a)[ROWS][DEPTH], SharedAddress b) {
  static_assert(!B_IS_NK, "the order of an accumulator's columns is that of B's rows");
  const Strip<BTile, true, true> b_strip(b, Layout::first_col());
#pragma unroll
  for (int depth = 0; depth < DEPTH / 2; ++depth) {
    Part<T> a_part[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) a_part[i].set(n, __float_as_uint(a[2 * i + n % 2][2 * depth + n / 2]));
    }
    multiply_depth_tf32(acc, a_part, b_strip, depth);
  }
}

// A register tile of float32 goes to its places in a shared tile.
template <class Layout, class Tile, int ROWS, int COLS>
__device__ __forceinline__ void store_fragment(SharedAddress tile, const float (&values)[ROWS][COLS]) {
  unsigned char* first = tile.data + Layout::row(0) * Tile::ROW_BYTES + Layout::col(0) * 4;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLS; j += 2) {
      *reinterpret_cast<float2*>(first + (i / 2 * 16 + i % 2 * 8) * Tile::ROW_BYTES + j * 16) =
          make_float2(values[i][j], values[i][j + 1]);
    }
  }
}
