// attention_forward: d256_bf16.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_forward for sm_90a
//   tile q 128 x kv 80, 12 warps, 2 stages, persistent, in turns, guessed maximum (chosen by measurement: NVIDIA H200, 2026-12-02, 596 to 735 TFLOP/s: python -m flashgen tune --direction fwd --head-dim 256 --full --preset full --rounds 3)
//   block_q = 128, block_kv = 80, head_dim = 256, head_dim_v = 256
//   384 threads, about 218 registers each, 1 a multiprocessor
//   shared memory 229560 of 232448 bytes
//          0 ..  65536  q_tile, 1 x 65536 bytes, 512 bytes a row
//      65536 .. 147456  k_tile, 2 x 40960 bytes, 512 bytes a row
//     147456 .. 212992  o_tile, 1 x 65536 bytes, 512 bytes a row
//     147456 .. 229376  v_tile, 2 x 40960 bytes, 512 bytes a row
//     229376 .. 229440  next_tile, 2 x 32 bytes, 32 bytes a row
//   warps of s: 8 along rows, 1 along columns
//   warps of p: 8 along rows, 1 along columns
//   warps of p_operand: 8 along rows, 1 along columns
//   warps of o_acc: 8 along rows, 1 along columns
//   warps of o_out: 8 along rows, 1 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm90.cuh"

using element = bf16;

constexpr int THREADS = 256;  // 8 warps
constexpr int MIN_BLOCKS = 1;  // blocks a multiprocessor
constexpr int PRODUCER_THREADS = 128;  // of which one loads
constexpr int BLOCK_Q = 128;
constexpr int BLOCK_KV = 80;
constexpr int HEAD_DIM = 256;
constexpr int HEAD_DIM_V = 256;

// shared memory: rows x columns, bytes from row to row
using QTile = PanelTile<BLOCK_Q, HEAD_DIM>;
constexpr int Q_TILE_OFFSET = 0;
using KTile = PanelTile<BLOCK_KV, HEAD_DIM>;
constexpr int K_TILE_OFFSET = 65536;
using OTile = PanelTile<BLOCK_Q, HEAD_DIM_V>;
constexpr int O_TILE_OFFSET = 147456;
using VTile = PanelTile<BLOCK_KV, HEAD_DIM_V>;
constexpr int V_TILE_OFFSET = 147456;
constexpr int NEXT_TILE_OFFSET = 229376;
constexpr int K_TILE_FULL_OFFSET = 229440;
constexpr int K_TILE_EMPTY_OFFSET = 229456;
constexpr int V_TILE_FULL_OFFSET = 229472;
constexpr int V_TILE_EMPTY_OFFSET = 229488;
constexpr int Q_TILE_FULL_OFFSET = 229504;
constexpr int Q_TILE_EMPTY_OFFSET = 229512;
constexpr int O_TILE_EMPTY_OFFSET = 229520;
constexpr int NEXT_TILE_FULL_OFFSET = 229528;
constexpr int NEXT_TILE_EMPTY_OFFSET = 229544;

// register tiles: rows x columns, warps along each
using S = Fragment<BLOCK_Q, BLOCK_KV, 8, 1>;
using OAcc = Fragment<BLOCK_Q, HEAD_DIM_V, 8, 1>;

// acc (+)= a b, 64 x 80 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x80x16_shared(float (&acc)[2][20], uint32 a, uint32 a_step, uint32 b, uint32 b_step, int accumulate) {
  asm volatile("{ .reg .pred p; .reg .b32 low; .reg .b64 a_desc, b_desc; setp.ne.b32 p, %44, 0;\n"
    "add.u32 low, %40, %41; mov.b64 a_desc, {low, 1073741888};\n"
    "add.u32 low, %42, %43; mov.b64 b_desc, {low, 1073741888};\n"
    "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39"
      "}, a_desc, b_desc, p, 1, 1, 0, 0; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]), "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]), "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]), "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15]),
  "+f"(acc[0][16]), "+f"(acc[0][17]), "+f"(acc[1][16]), "+f"(acc[1][17]), "+f"(acc[0][18]), "+f"(acc[0][19]), "+f"(acc[1][18]), "+f"(acc[1][19])
  : "r"(a), "r"(a_step), "r"(b), "r"(b_step), "r"(accumulate));
}
// acc (+)= a b, 64 x 256 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x256x16_registers(float (&acc)[2][64], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b, uint32 b_step, int accumulate) {
  asm volatile("{ .reg .pred p; .reg .b32 low; .reg .b64 b_desc; setp.ne.b32 p, %134, 0;\n"
    "add.u32 low, %132, %133; mov.b64 b_desc, {low, 1073741888};\n"
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, {%128, %129, %130, %131}, b_desc, p, 1, 1, 1; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]), "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]), "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]), "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15]),
  "+f"(acc[0][16]), "+f"(acc[0][17]), "+f"(acc[1][16]), "+f"(acc[1][17]), "+f"(acc[0][18]), "+f"(acc[0][19]), "+f"(acc[1][18]), "+f"(acc[1][19]),
  "+f"(acc[0][20]), "+f"(acc[0][21]), "+f"(acc[1][20]), "+f"(acc[1][21]), "+f"(acc[0][22]), "+f"(acc[0][23]), "+f"(acc[1][22]), "+f"(acc[1][23]),
  "+f"(acc[0][24]), "+f"(acc[0][25]), "+f"(acc[1][24]), "+f"(acc[1][25]), "+f"(acc[0][26]), "+f"(acc[0][27]), "+f"(acc[1][26]), "+f"(acc[1][27]),
  "+f"(acc[0][28]), "+f"(acc[0][29]), "+f"(acc[1][28]), "+f"(acc[1][29]), "+f"(acc[0][30]), "+f"(acc[0][31]), "+f"(acc[1][30]), "+f"(acc[1][31]),
  "+f"(acc[0][32]), "+f"(acc[0][33]), "+f"(acc[1][32]), "+f"(acc[1][33]), "+f"(acc[0][34]), "+f"(acc[0][35]), "+f"(acc[1][34]), "+f"(acc[1][35]),
  "+f"(acc[0][36]), "+f"(acc[0][37]), "+f"(acc[1][36]), "+f"(acc[1][37]), "+f"(acc[0][38]), "+f"(acc[0][39]), "+f"(acc[1][38]), "+f"(acc[1][39]),
  "+f"(acc[0][40]), "+f"(acc[0][41]), "+f"(acc[1][40]), "+f"(acc[1][41]), "+f"(acc[0][42]), "+f"(acc[0][43]), "+f"(acc[1][42]), "+f"(acc[1][43]),
  "+f"(acc[0][44]), "+f"(acc[0][45]), "+f"(acc[1][44]), "+f"(acc[1][45]), "+f"(acc[0][46]), "+f"(acc[0][47]), "+f"(acc[1][46]), "+f"(acc[1][47]),
  "+f"(acc[0][48]), "+f"(acc[0][49]), "+f"(acc[1][48]), "+f"(acc[1][49]), "+f"(acc[0][50]), "+f"(acc[0][51]), "+f"(acc[1][50]), "+f"(acc[1][51]),
  "+f"(acc[0][52]), "+f"(acc[0][53]), "+f"(acc[1][52]), "+f"(acc[1][53]), "+f"(acc[0][54]), "+f"(acc[0][55]), "+f"(acc[1][54]), "+f"(acc[1][55]),
  "+f"(acc[0][56]), "+f"(acc[0][57]), "+f"(acc[1][56]), "+f"(acc[1][57]), "+f"(acc[0][58]), "+f"(acc[0][59]), "+f"(acc[1][58]), "+f"(acc[1][59]),
  "+f"(acc[0][60]), "+f"(acc[0][61]), "+f"(acc[1][60]), "+f"(acc[1][61]), "+f"(acc[0][62]), "+f"(acc[0][63]), "+f"(acc[1][62]), "+f"(acc[1][63])
  : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(b_step), "r"(accumulate));
}

struct Args {
  TensorMap q;  // batches, heads, seqlen_q, head_dim
  TensorMap k;  // batches, heads, seqlen_k, head_dim
  TensorMap v;  // batches, heads, seqlen_k, head_dim_v
  TensorMap o;  // batches, heads, seqlen_q, head_dim_v
  Vector<float> lse;  // batches, heads, seqlen_q
  int seqlen_q;
  int seqlen_k;
  int heads;
  int heads_kv;
  int group;
  int batches;
  float scale_log2;
  int multiprocessors;
  int zero;
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_THREADS, MIN_BLOCKS) attention_forward(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const SharedAddress q_tile = {shared + Q_TILE_OFFSET};
  const SharedAddress k_tile = {shared + K_TILE_OFFSET};
  const SharedAddress o_tile = {shared + O_TILE_OFFSET};
  const SharedAddress v_tile = {shared + V_TILE_OFFSET};
  int* const next_tile = reinterpret_cast<int*>(shared + NEXT_TILE_OFFSET);
  uint64* const k_tile_full = reinterpret_cast<uint64*>(shared + K_TILE_FULL_OFFSET);
  uint64* const k_tile_empty = reinterpret_cast<uint64*>(shared + K_TILE_EMPTY_OFFSET);
  uint64* const v_tile_full = reinterpret_cast<uint64*>(shared + V_TILE_FULL_OFFSET);
  uint64* const v_tile_empty = reinterpret_cast<uint64*>(shared + V_TILE_EMPTY_OFFSET);
  uint64* const q_tile_full = reinterpret_cast<uint64*>(shared + Q_TILE_FULL_OFFSET);
  uint64* const q_tile_empty = reinterpret_cast<uint64*>(shared + Q_TILE_EMPTY_OFFSET);
  uint64* const o_tile_empty = reinterpret_cast<uint64*>(shared + O_TILE_EMPTY_OFFSET);
  uint64* const next_tile_full = reinterpret_cast<uint64*>(shared + NEXT_TILE_FULL_OFFSET);
  uint64* const next_tile_empty = reinterpret_cast<uint64*>(shared + NEXT_TILE_EMPTY_OFFSET);

  const int warpgroup = uniform(threadIdx.x / 128);
  const int block = blockIdx.x;

  float s[S::ROWS][S::COLS];
  float p[S::ROWS][S::COLS];
  uint32 p_operand[S::ROWS][S::PAIRS];
  float o_acc[OAcc::ROWS][OAcc::COLS];
  uint32 o_out[OAcc::ROWS][OAcc::PAIRS];
  float row_max[S::ROWS];
  float row_max_old[S::ROWS];
  float offset[S::ROWS];
  float rescale[S::ROWS];
  float row_sum[S::ROWS];
  float inverse[S::ROWS];
  float lse_row[S::ROWS];
  float step_sum[S::ROWS];

  if (threadIdx.x == 0) {
    init_barriers<2>(k_tile_full, 1);
    init_barriers<2>(k_tile_empty, 8);
    init_barriers<2>(v_tile_full, 1);
    init_barriers<2>(v_tile_empty, 8);
    init_barriers<1>(q_tile_full, 1);
    init_barriers<1>(q_tile_empty, 8);
    init_barriers<1>(o_tile_empty, 8);
    init_barriers<2>(next_tile_full, 1);
    init_barriers<2>(next_tile_empty, 8);
    fence_barrier_init();
  }
  __syncthreads();
  const int q_blocks = (args.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
  const int tiles = q_blocks * args.heads * args.batches;
  // of this grid: as many as run at once
  const int blocks = min(tiles, args.multiprocessors);
  // one thread keeps the stages full
  if (threadIdx.x >= THREADS) {
    give_registers<40>();
    if (threadIdx.x == THREADS) {
      // the first tile of each block is that of its number
      int tile = block;
      int tiles_done = 0;
      int kv_blocks_done = 0;
      while (tile < tiles) {
        const int q_block = tile % q_blocks;
        const int head = tile / q_blocks % args.heads;
        const int batch = tile / q_blocks / args.heads;
        const int head_kv = head / args.group;
        const int q_start = q_block * BLOCK_Q;
        wait_barrier(next_tile_empty + tiles_done % 2, (tiles_done / 2 % 2 + 1) % 2);
        publish_tile(next_tile + tiles_done % 2 * 8, next_tile_full + tiles_done % 2, {q_block, head, batch});
        wait_barrier(q_tile_empty, (tiles_done % 2 + 1) % 2);
        tma_load<QTile>(q_tile, q_tile_full, args.q, q_start, head, batch, leave_cache_first());
        if (0 < (args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV) {
          wait_barrier(k_tile_empty + kv_blocks_done % 2, (kv_blocks_done / 2 % 2 + 1) % 2);
          tma_load<KTile>(k_tile + kv_blocks_done % 2 * KTile::BYTES, k_tile_full + kv_blocks_done % 2, args.k, 0, head_kv, batch, keep_in_cache());
          // the O of the last tile has left this memory
          wait_barrier(o_tile_empty, (tiles_done + 1) % 2);
          wait_barrier(v_tile_empty + kv_blocks_done % 2, (kv_blocks_done / 2 % 2 + 1) % 2);
          tma_load<VTile>(v_tile + kv_blocks_done % 2 * VTile::BYTES, v_tile_full + kv_blocks_done % 2, args.v, 0, head_kv, batch, keep_in_cache());
        }
        #pragma unroll 1  // the loading thread has few registers
        for (int kv_block = 1; kv_block < (args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV; ++kv_block) {
          const int kv_start = kv_block * BLOCK_KV;
          wait_barrier(k_tile_empty + (kv_blocks_done + kv_block) % 2, ((kv_blocks_done + kv_block) / 2 % 2 + 1) % 2);
          tma_load<KTile>(k_tile + (kv_blocks_done + kv_block) % 2 * KTile::BYTES, k_tile_full + (kv_blocks_done + kv_block) % 2, args.k, kv_start, head_kv, batch, keep_in_cache());
          wait_barrier(v_tile_empty + (kv_blocks_done + kv_block) % 2, ((kv_blocks_done + kv_block) / 2 % 2 + 1) % 2);
          tma_load<VTile>(v_tile + (kv_blocks_done + kv_block) % 2 * VTile::BYTES, v_tile_full + (kv_blocks_done + kv_block) % 2, args.v, kv_start, head_kv, batch, keep_in_cache());
        }

        kv_blocks_done = kv_blocks_done + max((args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV, 0);
        tile = tile + blocks;
        tiles_done = tiles_done + 1;
      }

      wait_barrier(next_tile_empty + tiles_done % 2, (tiles_done / 2 % 2 + 1) % 2);
      // no more
      publish_tile(next_tile + tiles_done % 2 * 8, next_tile_full + tiles_done % 2, {-1, -1, -1});
    }
    return;
  }

  if (threadIdx.x < THREADS) {
    take_registers<232>();
    const uint32 q_tile_operand = uniform(QTile::start(q_tile) + warpgroup * QTile::WARPGROUP_STEP);
    first_turn<THREADS / 128>(warpgroup);
    int tiles_done = 0;
    int kv_blocks_done = 0;
    int q_block = -1;
    int head = -1;
    int batch = -1;
    wait_barrier(next_tile_full + tiles_done % 2, tiles_done / 2 % 2);
    // the next tile, as the producer has published it
    q_block = take_tile(next_tile + tiles_done % 2 * 8, 0);
    while (q_block >= 0) {
      const int q_start = q_block * BLOCK_Q;
      wait_barrier(q_tile_full, tiles_done % 2);
      fill(o_acc, 0.0f);
      fill(row_max, -INF);
      fill(row_sum, 0.0f);
      fill(offset, 0.0f);
      // the first step has no product to overlap with
      if (0 < (args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV) {
        const uint32 k_tile_operand = uniform(KTile::start(k_tile + kv_blocks_done % 2 * KTile::BYTES));
        wait_barrier(k_tile_full + kv_blocks_done % 2, kv_blocks_done / 2 % 2);
        begin_products();
        #pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
          wgmma_64x80x16_shared(s, q_tile_operand, QTile::k_major(k), k_tile_operand, KTile::k_major(k), k > 0);
        }
        commit_products();
        wait_products<0>();
        settle(s);
        arrive_warp(k_tile_empty + kv_blocks_done % 2);
        // only tiles on a boundary are masked
        if (BLOCK_KV - 1 >= args.seqlen_k) {
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            #pragma unroll
            for (int j = 0; j < S::COLS; ++j) {
              s[i][j] = S::col_offset(j) < args.seqlen_k - S::lane_col() ? s[i][j] : -INF;
            }
          }
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          row_max_old[i] = row_max[i];
        }
        reduce_rows<Row_max>(row_max, s);
        combine_lanes<Row_max>(row_max);
        // a row that has seen no key yet keeps exp2(-inf - 0) = 0 instead of NaN
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          offset[i] = (row_max[i] == -INF ? 0.0f : row_max[i] * args.scale_log2) + 30.0f;
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          rescale[i] = exp2_approx(row_max_old[i] * args.scale_log2 + 30.0f - offset[i]);
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::COLS; ++j) {
            p[i][j] = exp2_approx(s[i][j] * args.scale_log2 - offset[i]);
          }
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          row_sum[i] = row_sum[i] * rescale[i];
        }
        reduce_rows<Row_sum>(row_sum, p);
        // for the next product; by its look at the sum, behind softmax
        wait_barrier(v_tile_full + kv_blocks_done % 2, kv_blocks_done / 2 % 2 | no_bits(row_sum, args.zero));
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::PAIRS; ++j) {
            p_operand[i][j] = pack<element>(p[i][2 * j], p[i][2 * j + 1]);
          }
        }
        #pragma unroll
        for (int i = 0; i < OAcc::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < OAcc::COLS; ++j) {
            o_acc[i][j] = o_acc[i][j] * rescale[i];
          }
        }
      }
      for (int kv_block = 1; kv_block < (args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV; ++kv_block) {
        const int kv_start = kv_block * BLOCK_KV;
        const uint32 k_tile_operand = uniform(KTile::start(k_tile + (kv_blocks_done + kv_block) % 2 * KTile::BYTES));
        const uint32 v_tile_operand = uniform(VTile::start(v_tile + (kv_blocks_done + (kv_block - 1)) % 2 * VTile::BYTES));
        // one warpgroup multiplies at a time, under the softmax of the others
        wait_turn(warpgroup);
        wait_barrier(k_tile_full + (kv_blocks_done + kv_block) % 2, (kv_blocks_done + kv_block) / 2 % 2);
        begin_products();
        #pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
          wgmma_64x80x16_shared(s, q_tile_operand, QTile::k_major(k), k_tile_operand, KTile::k_major(k), k > 0);
        }
        commit_products();
        begin_products();
        #pragma unroll
        for (int k = 0; k < BLOCK_KV / 16; ++k) {
          wgmma_64x256x16_registers(o_acc, p_operand[0][2 * k], p_operand[1][2 * k], p_operand[0][2 * k + 1], p_operand[1][2 * k + 1], v_tile_operand, VTile::mn_major(k), 1);
        }
        commit_products();
        pass_turn<THREADS / 128>(warpgroup);
        wait_products<1>();
        settle(s);
        // only tiles on a boundary are masked
        if (kv_start + (BLOCK_KV - 1) >= args.seqlen_k) {
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            #pragma unroll
            for (int j = 0; j < S::COLS; ++j) {
              s[i][j] = S::col_offset(j) < args.seqlen_k - kv_start - S::lane_col() ? s[i][j] : -INF;
            }
          }
        }
        // by the last maxima computed; a row that has seen no key makes NaN, which is found below
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          offset[i] = row_max[i] * args.scale_log2 + 30.0f;
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::COLS; ++j) {
            p[i][j] = exp2_approx(s[i][j] * args.scale_log2 - offset[i]);
          }
        }
        fill(step_sum, 0.0f);
        reduce_rows<Row_sum>(step_sum, p);
        // for the next product; by its look at the sum, behind softmax
        wait_barrier(v_tile_full + (kv_blocks_done + kv_block) % 2, (kv_blocks_done + kv_block) / 2 % 2 | no_bits(step_sum, args.zero));
        wait_products<0>();
        settle(o_acc);
        arrive_warp(v_tile_empty + (kv_blocks_done + (kv_block - 1)) % 2);
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::PAIRS; ++j) {
            p_operand[i][j] = pack<element>(p[i][2 * j], p[i][2 * j + 1]);
          }
        }
        // the guess was too low, or there was none: the step once more
        if (any_large(p_operand)) {
          rescore<QTile, KTile, element>(s, q_tile, k_tile + (kv_blocks_done + kv_block) % 2 * KTile::BYTES);
          fence_reads();
          // only tiles on a boundary are masked
          if (kv_start + (BLOCK_KV - 1) >= args.seqlen_k) {
            #pragma unroll
            for (int i = 0; i < S::ROWS; ++i) {
              #pragma unroll
              for (int j = 0; j < S::COLS; ++j) {
                s[i][j] = S::col_offset(j) < args.seqlen_k - kv_start - S::lane_col() ? s[i][j] : -INF;
              }
            }
          }
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            row_max_old[i] = row_max[i];
          }
          reduce_rows<Row_max>(row_max, s);
          combine_lanes<Row_max>(row_max);
          // a row that has seen no key yet keeps exp2(-inf - 0) = 0 instead of NaN
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            offset[i] = (row_max[i] == -INF ? 0.0f : row_max[i] * args.scale_log2) + 30.0f;
          }
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            rescale[i] = exp2_approx(row_max_old[i] * args.scale_log2 + 30.0f - offset[i]);
          }
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            #pragma unroll
            for (int j = 0; j < S::COLS; ++j) {
              p[i][j] = exp2_approx(s[i][j] * args.scale_log2 - offset[i]);
            }
          }
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            row_sum[i] = row_sum[i] * rescale[i];
          }
          fill(step_sum, 0.0f);
          reduce_rows<Row_sum>(step_sum, p);
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            #pragma unroll
            for (int j = 0; j < S::PAIRS; ++j) {
              p_operand[i][j] = pack<element>(p[i][2 * j], p[i][2 * j + 1]);
            }
          }
          #pragma unroll
          for (int i = 0; i < OAcc::ROWS; ++i) {
            #pragma unroll
            for (int j = 0; j < OAcc::COLS; ++j) {
              o_acc[i][j] = o_acc[i][j] * rescale[i];
            }
          }
        }
        arrive_warp(k_tile_empty + (kv_blocks_done + kv_block) % 2);
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          row_sum[i] = row_sum[i] + step_sum[i];
        }
      }

      arrive_warp(q_tile_empty);
      // the product of the last step
      if (0 < (args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV) {
        const uint32 v_tile_operand = uniform(VTile::start(v_tile + (kv_blocks_done + ((args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV - 1)) % 2 * VTile::BYTES));
        begin_products();
        #pragma unroll
        for (int k = 0; k < BLOCK_KV / 16; ++k) {
          wgmma_64x256x16_registers(o_acc, p_operand[0][2 * k], p_operand[1][2 * k], p_operand[0][2 * k + 1], p_operand[1][2 * k + 1], v_tile_operand, VTile::mn_major(k), 1);
        }
        commit_products();
        wait_products<0>();
        settle(o_acc);
        arrive_warp(v_tile_empty + (kv_blocks_done + ((args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV - 1)) % 2);
      }
      kv_blocks_done = kv_blocks_done + max((args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV, 0);
      // once, not in each step
      combine_lanes<Row_sum>(row_sum);
      // rows without keys give O = 0
      #pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        inverse[i] = row_sum[i] == 0.0f ? 0.0f : 1.0f / row_sum[i];
      }
      #pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        lse_row[i] = row_sum[i] == 0.0f ? -INF : offset[i] * 0.6931471805599453f + logf(row_sum[i]);
      }
      // again: until here it would have occupied registers
      q_block = take_tile(next_tile + tiles_done % 2 * 8, 0);
      head = take_tile(next_tile + tiles_done % 2 * 8, 1);
      batch = take_tile(next_tile + tiles_done % 2 * 8, 2);
      store_rows<S>(args.lse.at(batch, head, q_block * BLOCK_Q), lse_row, args.seqlen_q - q_block * BLOCK_Q);
      #pragma unroll
      for (int i = 0; i < OAcc::ROWS; ++i) {
        #pragma unroll
        for (int j = 0; j < OAcc::PAIRS; ++j) {
          o_out[i][j] = pack<element>(o_acc[i][2 * j] * inverse[i], o_acc[i][2 * j + 1] * inverse[i]);
        }
      }
      // every warp is done with the tiles that this one lies over
      consumer_barrier<THREADS>();
      store_panels<OAcc, OTile>(o_tile, o_out);
      fence_stores();
      warpgroup_barrier(warpgroup);
      tma_store<OTile>(args.o, q_block * BLOCK_Q, head, batch, o_tile, warpgroup);
      wait_stored();
      arrive_warp(o_tile_empty);
      arrive_warp(next_tile_empty + tiles_done % 2);
      tiles_done = tiles_done + 1;
      wait_barrier(next_tile_full + tiles_done % 2, tiles_done / 2 % 2);
      // the next tile, as the producer has published it
      q_block = take_tile(next_tile + tiles_done % 2 * 8, 0);
    }
  }
}
