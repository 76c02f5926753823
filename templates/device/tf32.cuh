// float32 operands: products of TF32, which has the exponent of float32 and 10 bits of its fraction (PTX ISA, "Matrix
// fragments for mma.m16n8k8").
#pragma once

// float32 inputs, in memory the same; the type says what their products are: three of TF32, or one.
struct fp32 {
  static constexpr int PARTS = 2;
  float value;
};
struct tf32 {
  static constexpr int PARTS = 1;
  float value;
};

__device__ __forceinline__ float to_float(fp32 x) { return x.value; }
__device__ __forceinline__ float to_float(tf32 x) { return x.value; }

// Four elements of an operand: two rows (of A; columns of B), 8 apart, at each of two places in depth.
template <class T>
struct Tf32Part {
  uint32 high[4], low[4];
  __device__ __forceinline__ void set(float x0, float x1, float x2, float x3) {
    const float x[4] = {x0, x1, x2, x3};
#pragma unroll
    for (int n = 0; n < 4; ++n) split(x[n], high[n], low[n], T{});
  }
};

// x = high + low up to 2^-21 of x: what TF32 lacks of x is cut off, and of low the tensor cores ignore it. Sums of products
// are then off by 2^-22, as sums in float32 are; with high rounded by less, but the compiler spills.
__device__ __forceinline__ void split(float x, uint32& high, uint32& low, fp32) {
  high = __float_as_uint(x) & 0xffffe000;
  low = __float_as_uint(x - __uint_as_float(high));
}
// The nearest TF32, ties away from zero, as the bits of a float32.
__device__ __forceinline__ void split(float x, uint32& high, uint32&, tf32) {
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
}

// c += a (16 x 8) b (8 x 8), where c is as of mma.m16n8k16; of b those of the four elements in column n or n + 8.
__device__ __forceinline__ void mma_tf32(float& c0, float& c1, float& c2, float& c3, const uint32 (&a)[4],
                                         const uint32 (&b)[4], int column) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[column]), "r"(b[2 + column]));
}
__device__ __forceinline__ void multiply_parts(float& c0, float& c1, float& c2, float& c3, const Tf32Part<tf32>& a,
                                               const Tf32Part<tf32>& b, int column) {
  mma_tf32(c0, c1, c2, c3, a.high, b.high, column);
}
// The small terms first; low * low is below what float32 keeps.
__device__ __forceinline__ void multiply_parts(float& c0, float& c1, float& c2, float& c3, const Tf32Part<fp32>& a,
                                               const Tf32Part<fp32>& b, int column) {
  mma_tf32(c0, c1, c2, c3, a.low, b.high, column);
  mma_tf32(c0, c1, c2, c3, a.high, b.low, column);
  mma_tf32(c0, c1, c2, c3, a.high, b.high, column);
}

// What a lane reads of 16 rows (of A; columns of B) by 8 in depth of an operand in shared memory, kept as [row][k], or as
// [k][row] where K_FIRST. Of the 8 in depth lane t of four holds t and t + 4, as ldmatrix gives them; where PAIRED, 2 t
// and 2 t + 1, as an accumulator holds its columns. A sum does not care, as long as A and B agree; and of tiles kept as
// [k][row] the rows 2 t lie in different banks, which t do not.
template <class Tile, bool K_FIRST, bool PAIRED>
struct Tf32Strip {
  static constexpr bool BY_MATRIX = !K_FIRST && !PAIRED;
  uint32 first;
  __device__ __forceinline__ Tf32Strip(SharedAddress tile, int row) {
    const int lane = int(threadIdx.x) % 32, k = lane % 4 * (PAIRED ? 2 : 1), r = row + lane / 4;
    first = tile.address() + (BY_MATRIX ? (row + lane % 16) * Tile::ROW_BYTES + lane / 16 * 16
                              : K_FIRST ? k * Tile::ROW_BYTES + r * 4
                                        : r * Tile::ROW_BYTES + k * 4);
  }
  template <class T>
  __device__ __forceinline__ Tf32Part<T> load(int row, int depth) const {
    uint32 words[4];
    if (BY_MATRIX) {
      ldmatrix(words, first + row * Tile::ROW_BYTES + depth * 32);
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int k = depth * 8 + n / 2 * (PAIRED ? 1 : 4), r = row + n % 2 * 8;
        const uint32 address = first + (K_FIRST ? k * Tile::ROW_BYTES + r * 4 : r * Tile::ROW_BYTES + k * 4);
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[n]) : "r"(address));
      }
    }
    Tf32Part<T> part;
    part.set(__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]), __uint_as_float(words[3]));
    return part;
  }
};

// acc += A B with A in shared memory, kept as [m][k], or as [k][m] where A_IS_KM; B as [n][k] (B_IS_NK) or as [k][n].
template <class T, int UNROLLED, class Layout, class ATile, bool A_IS_KM, class BTile, bool B_IS_NK, int ROWS, int COLS>
__device__ __forceinline__ void multiply_shared_tf32(float (&acc)[ROWS][COLS], SharedAddress a, SharedAddress b) {
  constexpr int DEPTH = A_IS_KM ? ATile::ROWS : ATile::COLS;
  const Tf32Strip<ATile, A_IS_KM, !B_IS_NK> a_strip(a, Layout::first_row());
  const Tf32Strip<BTile, !B_IS_NK, !B_IS_NK> b_strip(b, Layout::first_col());
#pragma unroll UNROLLED
  for (int depth = 0; depth < DEPTH / 8; ++depth) {
    Tf32Part<T> a_part[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) a_part[i] = a_strip.template load<T>(i * 16, depth);
#pragma unroll
    for (int j = 0; j < COLS / 4; ++j) {
      const Tf32Part<T> b_part = b_strip.template load<T>(j * 16, depth);
#pragma unroll
      for (int n = 0; n < ROWS; ++n) {
        float* top = &acc[n / 2 * 2][4 * j + n % 2 * 2];
        float* low = &acc[n / 2 * 2 + 1][4 * j + n % 2 * 2];
        multiply_parts(top[0], top[1], low[0], low[1], a_part[n / 2], b_part, n % 2);
      }
    }
  }
}

// acc += A B with the parts of A in registers: for an accumulator that is added to in every step of a loop. The tensor
// cores cut sums off instead of rounding them, which over thousands of keys would add up. So where float32 counts the
// sums of one step start at zero, and are added, rounded to nearest, by themselves (Ootomo and Yokota, "Recovering
// single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", 2022).
template <class T, class B, int DEPTH, int ROWS, int COLS>
__device__ __forceinline__ void add_product(float (&acc)[ROWS][COLS], const Tf32Part<T> (&a)[ROWS / 2][DEPTH], const B& b) {
  constexpr bool SEPARATE = T::PARTS == 2;
#pragma unroll
  for (int j = 0; j < COLS / 4; ++j) {
    float sum[ROWS][4];
#pragma unroll
    for (int n = 0; n < ROWS * 4; ++n) {
      sum[n / 4][n % 4] = SEPARATE ? 0.0f : acc[n / 8 * 2 + n / 2 % 2][4 * j + n / 4 % 2 * 2 + n % 2];
    }
#pragma unroll
    for (int depth = 0; depth < DEPTH; ++depth) {
      const Tf32Part<T> b_part = b.template load<T>(j * 16, depth);
#pragma unroll
      for (int n = 0; n < ROWS; ++n) {
        multiply_parts(sum[n][0], sum[n][1], sum[n][2], sum[n][3], a[n / 2][depth], b_part, n % 2);
      }
    }
#pragma unroll
    for (int n = 0; n < ROWS * 4; ++n) {
      float& to = acc[n / 8 * 2 + n / 2 % 2][4 * j + n / 4 % 2 * 2 + n % 2];
      to = SEPARATE ? to + sum[n / 4][n % 4] : sum[n / 4][n % 4];
    }
  }
}

// The same with A in shared memory.
template <class T, int UNROLLED, class Layout, class ATile, bool A_IS_KM, class BTile, bool B_IS_NK, int ROWS, int COLS>
__device__ __forceinline__ void add_shared_tf32(float (&acc)[ROWS][COLS], SharedAddress a, SharedAddress b) {
  constexpr int DEPTH = (A_IS_KM ? ATile::ROWS : ATile::COLS) / 8;
  const Tf32Strip<ATile, A_IS_KM, !B_IS_NK> a_strip(a, Layout::first_row());
  Tf32Part<T> a_part[ROWS / 2][DEPTH];
#pragma unroll
  for (int n = 0; n < ROWS / 2 * DEPTH; ++n) {
    a_part[n / DEPTH][n % DEPTH] = a_strip.template load<T>(n / DEPTH * 16, n % DEPTH);
  }
  add_product(acc, a_part, Tf32Strip<BTile, !B_IS_NK, !B_IS_NK>(b, Layout::first_col()));
}

// The same with A in registers as an accumulator holds it: its columns are the depth, and B is kept as [k][n].
template <class T, class Layout, class BTile, bool B_IS_NK, int ROWS, int COLS, int A_COLS>
__device__ __forceinline__ void add_packed_tf32(float (&acc)[ROWS][COLS], const float (&a)[ROWS][A_COLS], SharedAddress b) {
  static_assert(!B_IS_NK, "the order of an accumulator's columns is that of B's rows");
  constexpr int DEPTH = A_COLS / 2;
  Tf32Part<T> a_part[ROWS / 2][DEPTH];
#pragma unroll
  for (int n = 0; n < ROWS / 2 * DEPTH; ++n) {
    const int i = n / DEPTH * 2, depth = n % DEPTH;
    a_part[i / 2][depth].set(a[i][2 * depth], a[i + 1][2 * depth], a[i][2 * depth + 1], a[i + 1][2 * depth + 1]);
  }
  add_product(acc, a_part, Tf32Strip<BTile, true, true>(b, Layout::first_col()));
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
