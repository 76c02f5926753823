// attention_forward: d128_bf16_causal_softcap50.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_forward for sm_90a
//   tile q 128 x kv 128, 12 warps, 2 stages, Q ahead, dynamic, in turns, guessed maximum (chosen by measurement: NVIDIA H200, 2026-12-02, 337 to 522 TFLOP/s: python -m flashgen tune --direction fwd --head-dim 128 --causal --preset full --rounds 3, without the mask and score functions)
//   block_q = 128, block_kv = 128, head_dim = 128, head_dim_v = 128
//   384 threads, about 198 registers each, 1 a multiprocessor
//   shared memory 229568 of 232448 bytes
//          0 ..  65536  q_tile, 2 x 32768 bytes, 256 bytes a row
//      65536 .. 131072  k_tile, 2 x 32768 bytes, 256 bytes a row
//     131072 .. 196608  v_tile, 2 x 32768 bytes, 256 bytes a row
//     196608 .. 229376  o_tile, 1 x 32768 bytes, 256 bytes a row
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
constexpr int BLOCK_KV = 128;
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;

// shared memory: rows x columns, bytes from row to row
using QTile = PanelTile<BLOCK_Q, HEAD_DIM>;
constexpr int Q_TILE_OFFSET = 0;
using KTile = PanelTile<BLOCK_KV, HEAD_DIM>;
constexpr int K_TILE_OFFSET = 65536;
using VTile = PanelTile<BLOCK_KV, HEAD_DIM_V>;
constexpr int V_TILE_OFFSET = 131072;
using OTile = PanelTile<BLOCK_Q, HEAD_DIM_V>;
constexpr int O_TILE_OFFSET = 196608;
constexpr int NEXT_TILE_OFFSET = 229376;
constexpr int K_TILE_FULL_OFFSET = 229440;
constexpr int K_TILE_EMPTY_OFFSET = 229456;
constexpr int V_TILE_FULL_OFFSET = 229472;
constexpr int V_TILE_EMPTY_OFFSET = 229488;
constexpr int Q_TILE_FULL_OFFSET = 229504;
constexpr int Q_TILE_EMPTY_OFFSET = 229520;
constexpr int NEXT_TILE_FULL_OFFSET = 229536;
constexpr int NEXT_TILE_EMPTY_OFFSET = 229552;

// register tiles: rows x columns, warps along each
using S = Fragment<BLOCK_Q, BLOCK_KV, 8, 1>;
using OAcc = Fragment<BLOCK_Q, HEAD_DIM_V, 8, 1>;

// acc (+)= a b, 64 x 128 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x128x16_shared(float (&acc)[2][32], uint32 a, uint32 a_step, uint32 b, uint32 b_step, int accumulate) {
  asm volatile("{ .reg .pred p; .reg .b32 low; .reg .b64 a_desc, b_desc; setp.ne.b32 p, %68, 0;\n"
    "add.u32 low, %64, %65; mov.b64 a_desc, {low, 1073741888};\n"
    "add.u32 low, %66, %67; mov.b64 b_desc, {low, 1073741888};\n"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, a_desc, b_desc, p, 1, 1, 0, 0; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]), "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]), "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]), "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15]),
  "+f"(acc[0][16]), "+f"(acc[0][17]), "+f"(acc[1][16]), "+f"(acc[1][17]), "+f"(acc[0][18]), "+f"(acc[0][19]), "+f"(acc[1][18]), "+f"(acc[1][19]),
  "+f"(acc[0][20]), "+f"(acc[0][21]), "+f"(acc[1][20]), "+f"(acc[1][21]), "+f"(acc[0][22]), "+f"(acc[0][23]), "+f"(acc[1][22]), "+f"(acc[1][23]),
  "+f"(acc[0][24]), "+f"(acc[0][25]), "+f"(acc[1][24]), "+f"(acc[1][25]), "+f"(acc[0][26]), "+f"(acc[0][27]), "+f"(acc[1][26]), "+f"(acc[1][27]),
  "+f"(acc[0][28]), "+f"(acc[0][29]), "+f"(acc[1][28]), "+f"(acc[1][29]), "+f"(acc[0][30]), "+f"(acc[0][31]), "+f"(acc[1][30]), "+f"(acc[1][31])
  : "r"(a), "r"(a_step), "r"(b), "r"(b_step), "r"(accumulate));
}
// acc (+)= a b, 64 x 128 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x128x16_registers(float (&acc)[2][32], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b, uint32 b_step, int accumulate) {
  asm volatile("{ .reg .pred p; .reg .b32 low; .reg .b64 b_desc; setp.ne.b32 p, %70, 0;\n"
    "add.u32 low, %68, %69; mov.b64 b_desc, {low, 1073741888};\n"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, b_desc, p, 1, 1, 1; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]), "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]), "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]), "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15]),
  "+f"(acc[0][16]), "+f"(acc[0][17]), "+f"(acc[1][16]), "+f"(acc[1][17]), "+f"(acc[0][18]), "+f"(acc[0][19]), "+f"(acc[1][18]), "+f"(acc[1][19]),
  "+f"(acc[0][20]), "+f"(acc[0][21]), "+f"(acc[1][20]), "+f"(acc[1][21]), "+f"(acc[0][22]), "+f"(acc[0][23]), "+f"(acc[1][22]), "+f"(acc[1][23]),
  "+f"(acc[0][24]), "+f"(acc[0][25]), "+f"(acc[1][24]), "+f"(acc[1][25]), "+f"(acc[0][26]), "+f"(acc[0][27]), "+f"(acc[1][26]), "+f"(acc[1][27]),
  "+f"(acc[0][28]), "+f"(acc[0][29]), "+f"(acc[1][28]), "+f"(acc[1][29]), "+f"(acc[0][30]), "+f"(acc[0][31]), "+f"(acc[1][30]), "+f"(acc[1][31])
  : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(b_step), "r"(accumulate));
}

struct Args {
  TensorMap q;  // batches, heads, seqlen_q, head_dim
  TensorMap k;  // batches, heads, seqlen_k, head_dim
  TensorMap v;  // batches, heads, seqlen_k, head_dim_v
  TensorMap o;  // batches, heads, seqlen_q, head_dim_v
  Vector<float> lse;  // batches, heads, seqlen_q
  int* tile_counter;  // one
  int seqlen_q;
  int seqlen_k;
  int heads;
  int heads_kv;
  int group;
  int batches;
  float scale;
  int multiprocessors;
  int zero;
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_THREADS, MIN_BLOCKS) attention_forward(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const SharedAddress q_tile = {shared + Q_TILE_OFFSET};
  const SharedAddress k_tile = {shared + K_TILE_OFFSET};
  const SharedAddress v_tile = {shared + V_TILE_OFFSET};
  const SharedAddress o_tile = {shared + O_TILE_OFFSET};
  int* const next_tile = reinterpret_cast<int*>(shared + NEXT_TILE_OFFSET);
  uint64* const k_tile_full = reinterpret_cast<uint64*>(shared + K_TILE_FULL_OFFSET);
  uint64* const k_tile_empty = reinterpret_cast<uint64*>(shared + K_TILE_EMPTY_OFFSET);
  uint64* const v_tile_full = reinterpret_cast<uint64*>(shared + V_TILE_FULL_OFFSET);
  uint64* const v_tile_empty = reinterpret_cast<uint64*>(shared + V_TILE_EMPTY_OFFSET);
  uint64* const q_tile_full = reinterpret_cast<uint64*>(shared + Q_TILE_FULL_OFFSET);
  uint64* const q_tile_empty = reinterpret_cast<uint64*>(shared + Q_TILE_EMPTY_OFFSET);
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
    init_barriers<2>(q_tile_full, 1);
    init_barriers<2>(q_tile_empty, 8);
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
        // heads whose keys and values stay in the L2
        const int heads_at_once = min(max(32768 / max(args.seqlen_k, 1), 1) * args.group, args.heads * args.batches);
        const int section = tile / (heads_at_once * q_blocks);
        const int within = tile - section * (heads_at_once * q_blocks);
        const int width = min(heads_at_once, args.heads * args.batches - section * heads_at_once);
        // the longest tiles first
        const int q_block = q_blocks - 1 - within / width;
        const int pair = section * heads_at_once + within % width;
        const int head = pair % args.heads;
        const int batch = pair / args.heads;
        const int head_kv = head / args.group;
        const int q_start = q_block * BLOCK_Q;
        // later blocks are not seen
        const int last_kv_block = min((args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV, max(q_start + (args.seqlen_k - args.seqlen_q) + (BLOCK_Q - 1) + BLOCK_KV, 0) / BLOCK_KV);
        wait_barrier(next_tile_empty + tiles_done % 2, (tiles_done / 2 % 2 + 1) % 2);
        publish_tile(next_tile + tiles_done % 2 * 8, next_tile_full + tiles_done % 2, {q_block, head, batch, last_kv_block});
        wait_barrier(q_tile_empty + tiles_done % 2, (tiles_done / 2 % 2 + 1) % 2);
        tma_load<QTile>(q_tile + tiles_done % 2 * QTile::BYTES, q_tile_full + tiles_done % 2, args.q, q_start, head, batch, leave_cache_first());
        #pragma unroll 1  // the loading thread has few registers
        for (int kv_block = 0; kv_block < last_kv_block; ++kv_block) {
          const int kv_start = kv_block * BLOCK_KV;
          wait_barrier(k_tile_empty + (kv_blocks_done + kv_block) % 2, ((kv_blocks_done + kv_block) / 2 % 2 + 1) % 2);
          tma_load<KTile>(k_tile + (kv_blocks_done + kv_block) % 2 * KTile::BYTES, k_tile_full + (kv_blocks_done + kv_block) % 2, args.k, kv_start, head_kv, batch, keep_in_cache());
          wait_barrier(v_tile_empty + (kv_blocks_done + kv_block) % 2, ((kv_blocks_done + kv_block) / 2 % 2 + 1) % 2);
          tma_load<VTile>(v_tile + (kv_blocks_done + kv_block) % 2 * VTile::BYTES, v_tile_full + (kv_blocks_done + kv_block) % 2, args.v, kv_start, head_kv, batch, keep_in_cache());
        }

        kv_blocks_done = kv_blocks_done + max(last_kv_block, 0);
        // not before this one is loaded: who asks early may get more than its share
        tile = ask_tile(args.tile_counter, tiles, blocks);
        tiles_done = tiles_done + 1;
      }

      wait_barrier(next_tile_empty + tiles_done % 2, (tiles_done / 2 % 2 + 1) % 2);
      // no more
      publish_tile(next_tile + tiles_done % 2 * 8, next_tile_full + tiles_done % 2, {-1, -1, -1, -1});
    }
    return;
  }

  if (threadIdx.x < THREADS) {
    take_registers<232>();
    first_turn<THREADS / 128>(warpgroup);
    int tiles_done = 0;
    int kv_blocks_done = 0;
    int q_block = -1;
    int head = -1;
    int batch = -1;
    int last_kv_block = -1;
    wait_barrier(next_tile_full + tiles_done % 2, tiles_done / 2 % 2);
    // the next tile, as the producer has published it
    q_block = take_tile(next_tile + tiles_done % 2 * 8, 0);
    last_kv_block = take_tile(next_tile + tiles_done % 2 * 8, 3);
    while (q_block >= 0) {
      const int q_start = q_block * BLOCK_Q;
      const uint32 q_tile_operand = uniform(QTile::start(q_tile + tiles_done % 2 * QTile::BYTES) + warpgroup * QTile::WARPGROUP_STEP);
      wait_barrier(q_tile_full + tiles_done % 2, tiles_done / 2 % 2);
      fill(o_acc, 0.0f);
      fill(row_max, -INF);
      fill(row_sum, 0.0f);
      fill(offset, 0.0f);
      // the first step has no product to overlap with
      if (0 < last_kv_block) {
        const uint32 k_tile_operand = uniform(KTile::start(k_tile + kv_blocks_done % 2 * KTile::BYTES));
        wait_barrier(k_tile_full + kv_blocks_done % 2, kv_blocks_done / 2 % 2);
        begin_products();
        #pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
          wgmma_64x128x16_shared(s, q_tile_operand, QTile::k_major(k), k_tile_operand, KTile::k_major(k), k > 0);
        }
        commit_products();
        wait_products<0>();
        settle(s);
        arrive_warp(k_tile_empty + kv_blocks_done % 2);
        // softcap50
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::COLS; ++j) {
            s[i][j] = tanh_accurate(s[i][j] * (args.scale * 0.02f)) * 50.0f;
          }
        }
        // only tiles on a boundary are masked
        if (BLOCK_KV - 1 >= args.seqlen_k || BLOCK_KV - 1 > q_start + (args.seqlen_k - args.seqlen_q)) {
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            #pragma unroll
            for (int j = 0; j < S::COLS; ++j) {
              s[i][j] = S::col_offset(j) < min(args.seqlen_k, q_start + S::row(i) + (args.seqlen_k - args.seqlen_q) + 1) - S::lane_col() ? s[i][j] : -INF;
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
          offset[i] = (row_max[i] == -INF ? 0.0f : row_max[i] * 1.4426950408889634f) + 30.0f;
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          rescale[i] = exp2_approx(row_max_old[i] * 1.4426950408889634f + 30.0f - offset[i]);
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::COLS; ++j) {
            p[i][j] = exp2_approx(s[i][j] * 1.4426950408889634f - offset[i]);
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
      for (int kv_block = 1; kv_block < last_kv_block; ++kv_block) {
        const int kv_start = kv_block * BLOCK_KV;
        const uint32 k_tile_operand = uniform(KTile::start(k_tile + (kv_blocks_done + kv_block) % 2 * KTile::BYTES));
        const uint32 v_tile_operand = uniform(VTile::start(v_tile + (kv_blocks_done + (kv_block - 1)) % 2 * VTile::BYTES));
        // one warpgroup multiplies at a time, under the softmax of the others
        wait_turn(warpgroup);
        wait_barrier(k_tile_full + (kv_blocks_done + kv_block) % 2, (kv_blocks_done + kv_block) / 2 % 2);
        begin_products();
        #pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
          wgmma_64x128x16_shared(s, q_tile_operand, QTile::k_major(k), k_tile_operand, KTile::k_major(k), k > 0);
        }
        commit_products();
        begin_products();
        #pragma unroll
        for (int k = 0; k < BLOCK_KV / 16; ++k) {
          wgmma_64x128x16_registers(o_acc, p_operand[0][2 * k], p_operand[1][2 * k], p_operand[0][2 * k + 1], p_operand[1][2 * k + 1], v_tile_operand, VTile::mn_major(k), 1);
        }
        commit_products();
        pass_turn<THREADS / 128>(warpgroup);
        // by the last maxima computed; a row that has seen no key makes NaN, which is found below
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          offset[i] = row_max[i] * 1.4426950408889634f + 30.0f;
        }
        wait_products<1>();
        settle(s);
        // softcap50
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::COLS; ++j) {
            s[i][j] = tanh_accurate(s[i][j] * (args.scale * 0.02f)) * (1.4426950408889634f * 50.0f) - offset[i];
          }
        }
        // only tiles on a boundary are masked
        if (kv_start + (BLOCK_KV - 1) >= args.seqlen_k || kv_start + (BLOCK_KV - 1) > q_start + (args.seqlen_k - args.seqlen_q)) {
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            #pragma unroll
            for (int j = 0; j < S::COLS; ++j) {
              s[i][j] = S::col_offset(j) < min(args.seqlen_k - kv_start, q_start + S::row(i) + (args.seqlen_k - args.seqlen_q) - kv_start + 1) - S::lane_col() ? s[i][j] : -INF;
            }
          }
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::COLS; ++j) {
            p[i][j] = exp2_approx(s[i][j]);
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
          rescore<QTile, KTile, element>(s, q_tile + tiles_done % 2 * QTile::BYTES, k_tile + (kv_blocks_done + kv_block) % 2 * KTile::BYTES);
          fence_reads();
          // softcap50
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            #pragma unroll
            for (int j = 0; j < S::COLS; ++j) {
              s[i][j] = tanh_accurate(s[i][j] * (args.scale * 0.02f)) * 50.0f;
            }
          }
          // only tiles on a boundary are masked
          if (kv_start + (BLOCK_KV - 1) >= args.seqlen_k || kv_start + (BLOCK_KV - 1) > q_start + (args.seqlen_k - args.seqlen_q)) {
            #pragma unroll
            for (int i = 0; i < S::ROWS; ++i) {
              #pragma unroll
              for (int j = 0; j < S::COLS; ++j) {
                s[i][j] = S::col_offset(j) < min(args.seqlen_k - kv_start, q_start + S::row(i) + (args.seqlen_k - args.seqlen_q) - kv_start + 1) - S::lane_col() ? s[i][j] : -INF;
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
            offset[i] = (row_max[i] == -INF ? 0.0f : row_max[i] * 1.4426950408889634f) + 30.0f;
          }
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            rescale[i] = exp2_approx(row_max_old[i] * 1.4426950408889634f + 30.0f - offset[i]);
          }
          #pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            #pragma unroll
            for (int j = 0; j < S::COLS; ++j) {
              p[i][j] = exp2_approx(s[i][j] * 1.4426950408889634f - offset[i]);
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

      arrive_warp(q_tile_empty + tiles_done % 2);
      // the product of the last step
      if (0 < last_kv_block) {
        const uint32 v_tile_operand = uniform(VTile::start(v_tile + (kv_blocks_done + (last_kv_block - 1)) % 2 * VTile::BYTES));
        begin_products();
        #pragma unroll
        for (int k = 0; k < BLOCK_KV / 16; ++k) {
          wgmma_64x128x16_registers(o_acc, p_operand[0][2 * k], p_operand[1][2 * k], p_operand[0][2 * k + 1], p_operand[1][2 * k + 1], v_tile_operand, VTile::mn_major(k), 1);
        }
        commit_products();
        wait_products<0>();
        settle(o_acc);
        arrive_warp(v_tile_empty + (kv_blocks_done + (last_kv_block - 1)) % 2);
      }
      kv_blocks_done = kv_blocks_done + max(last_kv_block, 0);
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
      // the O of the last tile has left
      wait_stored();
      warpgroup_barrier(warpgroup);
      store_panels<OAcc, OTile>(o_tile, o_out);
      fence_stores();
      warpgroup_barrier(warpgroup);
      tma_store<OTile>(args.o, q_block * BLOCK_Q, head, batch, o_tile, warpgroup);
      arrive_warp(next_tile_empty + tiles_done % 2);
      tiles_done = tiles_done + 1;
      wait_barrier(next_tile_full + tiles_done % 2, tiles_done / 2 % 2);
      // the next tile, as the producer has published it
      q_block = take_tile(next_tile + tiles_done % 2 * 8, 0);
      last_kv_block = take_tile(next_tile + tiles_done % 2 * 8, 3);
    }

    // shared memory outlives the copies from it
    wait_stored();
  }
}
