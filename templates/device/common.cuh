// Element types, tensors in global memory, register tiles and mma.sync on them: what every family of kernels shares.
#pragma once

using uint32 = unsigned int;
using int64 = long long;

#define INF __int_as_float(0x7f800000)

// 16-bit element types, kept as bits: the CUDA headers for them would double the compile time.
struct bf16 {
  unsigned short bits;
};
struct fp16 {
  unsigned short bits;
};

// Two floats rounded to nearest even and packed, `low` in the low half.
template <class T>
__device__ __forceinline__ uint32 pack(float low, float high);
template <>
__device__ __forceinline__ uint32 pack<bf16>(float low, float high) {
  uint32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ __forceinline__ uint32 pack<fp16>(float low, float high) {
  uint32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(uint32(x.bits) << 16); }
__device__ __forceinline__ float to_float(fp16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

// 2^x; accurate to 2 ulp, subnormal results flushed to zero, exp2(-inf) = 0 (PTX ISA, ex2.approx.ftz.f32).
__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// What score functions are made of, all without a branch: where a thread may take one, the compiler lets no product of
// wgmma run meanwhile.

#define NAN __int_as_float(0x7fc00000)

// c ? x : y, of which both are computed.
__device__ __forceinline__ float select(bool c, float x, float y) {
  float result;
  asm("{ .reg .pred p; setp.ne.b32 p, %3, 0; selp.f32 %0, %1, %2, p; }" : "=f"(result) : "f"(x), "f"(y), "r"(int(c)));
  return result;
}

// log2(x), 1 / x and sqrt(x), accurate to about 2^-22; subnormal operands count as zero.
__device__ __forceinline__ float log2_approx(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float sqrt_approx(float x) {
  float result;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// tanh(x) to 2^-19 of its value. tanh.approx is off by 2^-11, which in the LSE of a row of few keys is ten times what
// float32 sums cost. 1 - 2 / (e^2x + 1) loses the digits of a small x, whose series ends soon.
__device__ __forceinline__ float tanh_accurate(float x) {
  const float square = x * x;
  const float series = x + x * square * (-0.333333333f + square * (0.133333333f + square * -0.053968254f));
  const float quotient = 1.0f - 2.0f * reciprocal(exp2_approx(x * 2.885390082f) + 1.0f);
  return square < 0.04f ? series : quotient;
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exp2_approx(x * -1.442695041f)); }

// The angle without whole turns, 2 pi in two parts: sin.approx holds its 2^-20 between -pi and pi only.
__device__ __forceinline__ float without_turns(float x) {
  const float turns = rintf(x * 0.159154943f);
  return fmaf(turns, -1.93530718e-3f, fmaf(turns, -6.28125f, x));
}
__device__ __forceinline__ float sin_reduced(float x) {
  float result;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(without_turns(x)));
  return result;
}
__device__ __forceinline__ float cos_reduced(float x) {
  float result;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(without_turns(x)));
  return result;
}

__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ int absolute(int x) { return max(x, -x); }

// The quotient towards minus infinity and its remainder, for a positive y. A power of two, which is known where this is
// inlined, takes one instruction.
__device__ __forceinline__ int floor_mod(int x, int y) {
  if ((y & (y - 1)) == 0) return x & (y - 1);
  const int rest = x % y;
  return rest + (rest < 0 ? y : 0);
}
__device__ __forceinline__ int floor_div(int x, int y) {
  if ((y & (y - 1)) == 0) return x >> (31 - __clz(y));
  return (x - floor_mod(x, y)) / y;
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four words for each counter.
struct Words {
  int word[4];
};
__device__ __forceinline__ Words philox(uint32 k0, uint32 k1, uint32 c0, uint32 c1, uint32 c2, uint32 c3) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    c0 = uint32(p1 >> 32) ^ c1 ^ k0, c1 = uint32(p1);
    c2 = uint32(p0 >> 32) ^ c3 ^ k1, c3 = uint32(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{int(c0), int(c1), int(c2), int(c3)}};
}

// The words that an element of the scores shares with those 8 queries and 8 keys away in its 16 x 16, and its own one.
__device__ __forceinline__ Words random_words(int seed_low, int seed_high, int offset, int sequence, int q_idx, int kv_idx) {
  return philox(seed_low, seed_high, kv_idx / 16 * 8 + kv_idx % 8, q_idx / 16 * 8 + q_idx % 8, sequence, offset);
}
__device__ __forceinline__ int random_word(int seed_low, int seed_high, int offset, int sequence, int q_idx, int kv_idx) {
  const Words four = random_words(seed_low, seed_high, offset, sequence, q_idx, kv_idx);
  const int own_half = kv_idx / 8 % 2;
  return q_idx / 8 % 2 ? (own_half ? four.word[3] : four.word[2]) : (own_half ? four.word[1] : four.word[0]);
}

// A (batch, head, row, column) array with contiguous columns; strides count elements. The row stride has 32 bits, so
// that a row's offset is one multiply-add to 64 bits, which needs no register beyond its result.
template <class T>
struct Tensor {
  T* data;
  int64 batch_stride, head_stride;
  int row_stride, unused;
  __device__ __forceinline__ T* at(int batch, int head, int row) const {
    return data + batch * batch_stride + head * head_stride + int64(row) * row_stride;
  }
};

// A (batch, head, row) array with contiguous rows.
template <class T>
struct Vector {
  T* data;
  int64 batch_stride, head_stride;
  __device__ __forceinline__ T* at(int batch, int head, int row) const {
    return data + batch * batch_stride + head * head_stride + row;
  }
};

// What is computed with of an element.
__device__ __forceinline__ int loaded(int x) { return x; }
__device__ __forceinline__ float loaded(float x) { return x; }
__device__ __forceinline__ float loaded(bf16 x) { return to_float(x); }
__device__ __forceinline__ float loaded(fp16 x) { return to_float(x); }

// An array that expressions read element by element; strides count elements. Functions are evaluated beyond the ends of
// the sequences too, so an index out of range, also a negative one, reads the last of its axis: one instruction, and no
// branch.
template <class T, int RANK>
struct Array {
  const T* data;
  int64 strides[RANK], last[RANK];
  template <class... Index>
  __device__ __forceinline__ auto at(Index... index) const {
    static_assert(sizeof...(Index) == RANK, "an index for each axis");
    int64 offset = 0;
    int axis = 0;
    ((offset += min(uint32(index), uint32(last[axis])) * strides[axis], axis++), ...);
    return loaded(data[offset]);
  }
};

// The sequence in which a block of rows lies: the last one below `count` with offsets[sequence] / rows + sequence <= block.
__device__ __forceinline__ int sequence_of(const Array<int, 1>& offsets, int count, int rows, int block) {
  int found = 0;
  for (int behind = count; behind - found > 1;) {
    const int middle = (found + behind) / 2;
    if (offsets.at(middle) / rows + middle <= block) {
      found = middle;
    } else {
      behind = middle;
    }
  }
  return found;
}

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// A place in shared memory, as a pointer for ordinary accesses and as the 32-bit address that asm takes.
struct SharedAddress {
  unsigned char* data;
  __device__ __forceinline__ uint32 address() const { return shared_address(data); }
  __device__ __forceinline__ SharedAddress operator+(int bytes) const { return {data + bytes}; }
};

// A tile of elements in shared memory. The bytes from row to row hold an odd number of 16-byte pieces, so that eight rows
// read at one column lie in different banks.
template <int ROWS_, int COLS_, int ROW_BYTES_, int ELEMENT_BYTES_ = 2>
struct SharedTile {
  static constexpr int ROWS = ROWS_, COLS = COLS_, ROW_BYTES = ROW_BYTES_, ELEMENT_BYTES = ELEMENT_BYTES_;
  static constexpr int BYTES = ROWS * ROW_BYTES;
  static_assert(COLS % 8 == 0 && ROW_BYTES % 32 == 16 && ROW_BYTES >= ELEMENT_BYTES * COLS, "rows of an odd number of pieces");
  template <class T>
  static __device__ __forceinline__ float at(SharedAddress tile, int row, int col) {
    return to_float(*reinterpret_cast<const T*>(tile.data + row * ROW_BYTES + col * ELEMENT_BYTES));
  }
};

// A float32 tile in the registers of all threads, as mma.m16n8 leaves it: a warp owns M / WARPS_M rows by N / WARPS_N
// columns; a lane holds rows lane / 4 and lane / 4 + 8 of every 16, and columns 2 * (lane % 4) and the next of every 8.
// Of several groups of warps each has tiles of its own, from its FIRST_WARP on. COPIES warps side by side hold the same.
template <int M, int N, int WARPS_M, int WARPS_N, int FIRST_WARP = 0, int COPIES = 1>
struct Fragment {
  static constexpr int ROWS = M / WARPS_M / 8, COLS = N / WARPS_N / 4, PAIRS = COLS / 2;
  static_assert(M % (16 * WARPS_M) == 0 && N % (16 * WARPS_N) == 0, "whole matrix instructions for each warp");
  static __device__ __forceinline__ int part() { return (int(threadIdx.x) / 32 - FIRST_WARP) / COPIES; }
  static __device__ __forceinline__ int first_row() { return part() / WARPS_N * (M / WARPS_M); }
  static __device__ __forceinline__ int first_col() { return part() % WARPS_N * (N / WARPS_N); }
  static __device__ __forceinline__ int row(int i) {
    return first_row() + i / 2 * 16 + i % 2 * 8 + int(threadIdx.x) % 32 / 4;
  }
  static __device__ __forceinline__ int col(int j) { return lane_col() + col_offset(j); }
  // The column of element j is the lane's first one and a constant: comparing constants keeps no column in a register.
  static __device__ __forceinline__ int lane_col() { return first_col() + int(threadIdx.x) % 4 * 2; }
  static __device__ __forceinline__ int col_offset(int j) { return j / 2 * 8 + j % 2; }
};

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix(uint32 (&m)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

// Four matrices as by ldmatrix, each transposed.
__device__ __forceinline__ void ldmatrix_transposed(uint32 (&m)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

// acc[0..1][0..1] += a (16 x 16) b (16 x 8), where acc[h][c] is row lane / 4 + 8 h, column 2 * (lane % 4) + c.
template <class T>
__device__ __forceinline__ void mma(float& c0, float& c1, float& c2, float& c3, const uint32 (&a)[4], uint32 b0, uint32 b1);
template <>
__device__ __forceinline__ void mma<bf16>(float& c0, float& c1, float& c2, float& c3, const uint32 (&a)[4], uint32 b0,
                                          uint32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<fp16>(float& c0, float& c1, float& c2, float& c3, const uint32 (&a)[4], uint32 b0,
                                          uint32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <int ROWS, int COLS>
__device__ __forceinline__ void fill(float (&tile)[ROWS][COLS], float value) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLS; ++j) tile[i][j] = value;
  }
}
template <int ROWS>
__device__ __forceinline__ void fill(float (&rows)[ROWS], float value) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) rows[i] = value;
}

struct Row_max {
  static __device__ __forceinline__ float combine(float x, float y) { return fmaxf(x, y); }
};
struct Row_sum {
  static __device__ __forceinline__ float combine(float x, float y) { return x + y; }
};

// rows[i] = op(rows[i], this thread's elements of row i)
template <class Op, int ROWS, int COLS>
__device__ __forceinline__ void reduce_rows(float (&rows)[ROWS], const float (&tile)[ROWS][COLS]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLS; ++j) rows[i] = Op::combine(rows[i], tile[i][j]);
  }
}

// The four lanes that hold a row combine their results.
template <class Op, int ROWS>
__device__ __forceinline__ void combine_lanes(float (&rows)[ROWS]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    rows[i] = Op::combine(rows[i], __shfl_xor_sync(0xffffffffu, rows[i], 1));
    rows[i] = Op::combine(rows[i], __shfl_xor_sync(0xffffffffu, rows[i], 2));
  }
}

template <class Layout, int ROWS>
__device__ __forceinline__ void load_rows(float (&rows)[ROWS], const float* source, int rows_left) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = Layout::row(i);
    rows[i] = row < rows_left ? source[row] : 0.0f;
  }
}

template <class Layout, int ROWS>
__device__ __forceinline__ void store_rows(float* target, const float (&rows)[ROWS], int rows_left) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = Layout::row(i);
    if (threadIdx.x % 4 == 0 && Layout::first_col() == 0 && row < rows_left) target[row] = rows[i];
  }
}

// The rows of several heads, POSITIONS of each; rows_left: positions from the first one on.
template <class Layout, int POSITIONS, int ROWS>
__device__ __forceinline__ void store_rows_of_heads(float* target, int64 head_stride, const float (&rows)[ROWS], int rows_left) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int head = Layout::row(i) / POSITIONS, position = Layout::row(i) % POSITIONS;
    if (threadIdx.x % 4 == 0 && Layout::first_col() == 0 && position < rows_left) {
      target[head * head_stride + position] = rows[i];
    }
  }
}

// Packed pairs of a register tile go to their places in a shared tile.
template <class Layout, class Tile, int ROWS, int PAIRS>
__device__ __forceinline__ void store_fragment(SharedAddress tile, const uint32 (&packed)[ROWS][PAIRS]) {
  unsigned char* first = tile.data + Layout::row(0) * Tile::ROW_BYTES + Layout::col(0) * 2;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      *reinterpret_cast<uint32*>(first + (i / 2 * 16 + i % 2 * 8) * Tile::ROW_BYTES + j * 16) = packed[i][j];
    }
  }
}

// The same of the transpose: columns of the accumulator are rows of the tile.
template <class Layout, class Tile, int ROWS, int PAIRS>
__device__ __forceinline__ void store_fragment_transposed(SharedAddress tile, const uint32 (&packed)[ROWS][PAIRS]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      unsigned short* const place = reinterpret_cast<unsigned short*>(tile.data + Layout::col(2 * j) * Tile::ROW_BYTES + Layout::row(i) * 2);
      place[0] = static_cast<unsigned short>(packed[i][j]);
      place[Tile::ROW_BYTES / 2] = static_cast<unsigned short>(packed[i][j] >> 16);
    }
  }
}

// How the threads divide a tile into pieces of 16 bytes: LANES threads side by side on a row, the rest on other rows.
template <class Tile, int THREADS>
struct Pieces {
  static constexpr int ELEMENTS = 16 / Tile::ELEMENT_BYTES;
  static constexpr int PER_ROW = Tile::COLS / ELEMENTS;
  static constexpr int LANES = PER_ROW % 16 == 0 ? 16 : PER_ROW % 8 == 0 ? 8 : PER_ROW % 4 == 0 ? 4 : 2;
  static constexpr int ROW_STEP = THREADS / LANES;
  static constexpr int ROW_PASSES = (Tile::ROWS + ROW_STEP - 1) / ROW_STEP, COL_PASSES = PER_ROW / LANES;
  static_assert(PER_ROW % LANES == 0 && THREADS % LANES == 0, "whole passes");
  static __device__ __forceinline__ int row() { return int(threadIdx.x) / LANES; }
  static __device__ __forceinline__ int col() { return int(threadIdx.x) % LANES * ELEMENTS; }
  // True for rows of the tile: with more threads than pieces the last pass is not whole.
  static __device__ __forceinline__ bool inside(int row) { return Tile::ROWS % ROW_STEP == 0 || row < Tile::ROWS; }
};

// A shared tile goes to global memory; rows from rows_left on and columns from TRUE_COLS on stay behind.
template <class Tile, int TRUE_COLS, int THREADS, class T>
__device__ __forceinline__ void store_tile(T* target, int row_stride, int rows_left, SharedAddress tile) {
  using Split = Pieces<Tile, THREADS>;
  const int left = rows_left - Split::row();
#pragma unroll
  for (int r = 0; r < Split::ROW_PASSES; ++r) {
    const int row = Split::row() + r * Split::ROW_STEP;
    if (r * Split::ROW_STEP >= left || !Split::inside(row)) continue;
#pragma unroll
    for (int c = 0; c < Split::COL_PASSES; ++c) {
      const int col = Split::col() + c * Split::LANES * Split::ELEMENTS;
      if (col >= TRUE_COLS) continue;
      *reinterpret_cast<uint4*>(target + int64(row) * row_stride + col) =
          *reinterpret_cast<const uint4*>(tile.data + row * Tile::ROW_BYTES + col * Tile::ELEMENT_BYTES);
    }
  }
}

// The float32 accumulator of dQ is kept in the order of the register tile that is added to it. Each warp has a stretch of
// its own, in it WIDTH values of a lane, then the lanes, then the next values: additions are whole lines.
template <int WIDTH>
__device__ __forceinline__ void reduce_add(float* target, const float* values);
template <>
__device__ __forceinline__ void reduce_add<1>(float* target, const float* values) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(target), "f"(values[0]) : "memory");
}
#if __CUDA_ARCH__ >= 900
template <>
__device__ __forceinline__ void reduce_add<4>(float* target, const float* values) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
}
#endif

template <int WIDTH, int ROWS, int COLS>
__device__ __forceinline__ int fragment_start(int warp) {
  return warp * (ROWS * COLS * 32) + int(threadIdx.x) % 32 * WIDTH;
}

template <int WIDTH, int ROWS, int COLS>
__device__ __forceinline__ void add_fragment(float* target, const float (&tile)[ROWS][COLS]) {
  target += fragment_start<WIDTH, ROWS, COLS>(int(threadIdx.x) / 32);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLS; j += WIDTH) {
      reduce_add<WIDTH>(target + (i * COLS + j) * 32, &tile[i][j]);
    }
  }
}

template <int WIDTH, int ROWS, int COLS>
__device__ __forceinline__ void load_fragment(float (&tile)[ROWS][COLS], const float* source) {
  source += fragment_start<WIDTH, ROWS, COLS>(int(threadIdx.x) / 32);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLS; ++j) {
      tile[i][j] = source[(i * COLS + j / WIDTH * WIDTH) * 32 + j % WIDTH];
    }
  }
}

template <int COUNT, int THREADS>
__device__ __forceinline__ void zero_window(float* target) {
#pragma unroll 4
  for (int at = int(threadIdx.x) * 4; at < COUNT; at += THREADS * 4) {
    *reinterpret_cast<float4*>(target + at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}
