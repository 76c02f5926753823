// attention_forward: d64_bf16_causal_short.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_forward for sm_90a
//   tile q 64 x kv 64, 8 warps, 2 stages, dynamic, guessed maximum, 3 blocks a multiprocessor (chosen by measurement: NVIDIA H200, 2026-12-03, 269, 352 and 383 TFLOP/s beside 230, 307 and 378 with one block of 128 x 128 or, at 2048, 192 x 128, at 512, 1024 and 2048: python -m flashgen tune --direction fwd --head-dim 64 --causal --seqlen 512 --seqlen 1024 --seqlen 2048)
//   block_q = 64, block_kv = 64, head_dim = 64, head_dim_v = 64
//   256 threads, about 110 registers each, 3 a multiprocessor
//   shared memory 49328 of 76800 bytes
//          0 ..   8192  q_tile, 1 x 8192 bytes, 128 bytes a row
//       8192 ..  24576  k_tile, 2 x 8192 bytes, 128 bytes a row
//      24576 ..  40960  v_tile, 2 x 8192 bytes, 128 bytes a row
//      40960 ..  49152  o_tile, 1 x 8192 bytes, 128 bytes a row
//      49152 ..  49216  next_tile, 2 x 32 bytes, 32 bytes a row
//   warps of s: 4 along rows, 1 along columns
//   warps of p: 4 along rows, 1 along columns
//   warps of p_operand: 4 along rows, 1 along columns
//   warps of o_acc: 4 along rows, 1 along columns
//   warps of o_out: 4 along rows, 1 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm90.cuh"

using element = bf16;

constexpr int THREADS = 128;  // 4 warps
constexpr int MIN_BLOCKS = 3;  // blocks a multiprocessor
constexpr int PRODUCER_THREADS = 128;  // of which one loads
constexpr int BLOCK_Q = 64;
constexpr int BLOCK_KV = 64;
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;

// shared memory: rows x columns, bytes from row to row
using QTile = PanelTile<BLOCK_Q, HEAD_DIM>;
constexpr int Q_TILE_OFFSET = 0;
using KTile = PanelTile<BLOCK_KV, HEAD_DIM>;
constexpr int K_TILE_OFFSET = 8192;
using VTile = PanelTile<BLOCK_KV, HEAD_DIM_V>;
constexpr int V_TILE_OFFSET = 24576;
using OTile = PanelTile<BLOCK_Q, HEAD_DIM_V>;
constexpr int O_TILE_OFFSET = 40960;
constexpr int NEXT_TILE_OFFSET = 49152;
constexpr int K_TILE_FULL_OFFSET = 49216;
constexpr int K_TILE_EMPTY_OFFSET = 49232;
constexpr int V_TILE_FULL_OFFSET = 49248;
constexpr int V_TILE_EMPTY_OFFSET = 49264;
constexpr int Q_TILE_FULL_OFFSET = 49280;
constexpr int Q_TILE_EMPTY_OFFSET = 49288;
constexpr int NEXT_TILE_FULL_OFFSET = 49296;
constexpr int NEXT_TILE_EMPTY_OFFSET = 49312;

// register tiles: rows x columns, warps along each
using S = Fragment<BLOCK_Q, BLOCK_KV, 4, 1>;
using OAcc = Fragment<BLOCK_Q, HEAD_DIM_V, 4, 1>;

// acc (+)= a b, 64 x 64 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x64x16_shared(float (&acc)[2][16], uint32 a, uint32 a_step, uint32 b, uint32 b_step, int accumulate) {
  asm volatile("{ .reg .pred p; .reg .b32 low; .reg .b64 a_desc, b_desc; setp.ne.b32 p, %36, 0;\n"
    "add.u32 low, %32, %33; mov.b64 a_desc, {low, 1073741888};\n"
    "add.u32 low, %34, %35; mov.b64 b_desc, {low, 1073741888};\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, a_desc, b_desc, p, 1, 1, 0, 0; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]), "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]), "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]), "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15])
  : "r"(a), "r"(a_step), "r"(b), "r"(b_step), "r"(accumulate));
}
// acc (+)= a b, 64 x 64 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x64x16_registers(float (&acc)[2][16], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b, uint32 b_step, int accumulate) {
  asm volatile("{ .reg .pred p; .reg .b32 low; .reg .b64 b_desc; setp.ne.b32 p, %38, 0;\n"
    "add.u32 low, %36, %37; mov.b64 b_desc, {low, 1073741888};\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, b_desc, p, 1, 1, 1; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]), "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]), "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]), "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15])
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
  float scale_log2;
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
    init_barriers<2>(k_tile_empty, 4);
    init_barriers<2>(v_tile_full, 1);
    init_barriers<2>(v_tile_empty, 4);
    init_barriers<1>(q_tile_full, 1);
    init_barriers<1>(q_tile_empty, 4);
    init_barriers<2>(next_tile_full, 1);
    init_barriers<2>(next_tile_empty, 4);
    fence_barrier_init();
  }
  __syncthreads();
  const int q_blocks = (args.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
  const int tiles = q_blocks * args.heads * args.batches;
  // of this grid: as many as run at once
  const int blocks = min(tiles, args.multiprocessors * 3);
  // one thread keeps the stages full
  if (threadIdx.x >= THREADS) {
    give_registers<24>();
    if (threadIdx.x == THREADS) {
      // the first tile of each block is that of its number
      int tile = block;
      int tiles_done = 0;
      int kv_blocks_done = 0;
      while (tile < tiles) {
        // heads whose keys and values stay in the L2
        const int heads_at_once = min(max(65536 / max(args.seqlen_k, 1), 1) * args.group, args.heads * args.batches);
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
        wait_barrier(q_tile_empty, (tiles_done % 2 + 1) % 2);
        tma_load<QTile>(q_tile, q_tile_full, args.q, q_start, head, batch, leave_cache_first());
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
    take_registers<136>();
    const uint32 q_tile_operand = uniform(QTile::start(q_tile));
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
      wait_barrier(q_tile_full, tiles_done % 2);
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
          wgmma_64x64x16_shared(s, q_tile_operand, QTile::k_major(k), k_tile_operand, KTile::k_major(k), k > 0);
        }
        commit_products();
        wait_products<0>();
        settle(s);
        arrive_warp(k_tile_empty + kv_blocks_done % 2);
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
      for (int kv_block = 1; kv_block < last_kv_block; ++kv_block) {
        const int kv_start = kv_block * BLOCK_KV;
        const uint32 k_tile_operand = uniform(KTile::start(k_tile + (kv_blocks_done + kv_block) % 2 * KTile::BYTES));
        const uint32 v_tile_operand = uniform(VTile::start(v_tile + (kv_blocks_done + (kv_block - 1)) % 2 * VTile::BYTES));
        wait_barrier(k_tile_full + (kv_blocks_done + kv_block) % 2, (kv_blocks_done + kv_block) / 2 % 2);
        begin_products();
        #pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
          wgmma_64x64x16_shared(s, q_tile_operand, QTile::k_major(k), k_tile_operand, KTile::k_major(k), k > 0);
        }
        commit_products();
        begin_products();
        #pragma unroll
        for (int k = 0; k < BLOCK_KV / 16; ++k) {
          wgmma_64x64x16_registers(o_acc, p_operand[0][2 * k], p_operand[1][2 * k], p_operand[0][2 * k + 1], p_operand[1][2 * k + 1], v_tile_operand, VTile::mn_major(k), 1);
        }
        commit_products();
        wait_products<1>();
        settle(s);
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
      if (0 < last_kv_block) {
        const uint32 v_tile_operand = uniform(VTile::start(v_tile + (kv_blocks_done + (last_kv_block - 1)) % 2 * VTile::BYTES));
        begin_products();
        #pragma unroll
        for (int k = 0; k < BLOCK_KV / 16; ++k) {
          wgmma_64x64x16_registers(o_acc, p_operand[0][2 * k], p_operand[1][2 * k], p_operand[0][2 * k + 1], p_operand[1][2 * k + 1], v_tile_operand, VTile::mn_major(k), 1);
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
