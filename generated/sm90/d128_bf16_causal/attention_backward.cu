// attention_backward: d128_bf16_causal.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_backward for sm_90a
//   tile kv 128 x q 80, 12 warps, 2 stages, late, dQ transposed (chosen by measurement: NVIDIA H200, 2026-12-03, 1.05 times 64 queries at 16384 (566 TFLOP/s): python -m flashgen tune --direction bwd --head-dim 128 --causal --seqlen 16384)
//   block_q = 80, block_kv = 128, head_dim = 128, head_dim_v = 128
//   384 threads, about 240 registers each, 1 a multiprocessor
//   shared memory 230736 of 232448 bytes
//          0 ..  40960  q_tile, 2 x 20480 bytes, 256 bytes a row
//      40960 ..  81920  dout_tile, 2 x 20480 bytes, 256 bytes a row
//      81920 .. 114688  dk_tile, 1 x 32768 bytes, 256 bytes a row
//      81920 .. 114688  k_tile, 1 x 32768 bytes, 256 bytes a row
//     114688 .. 147456  dv_tile, 1 x 32768 bytes, 256 bytes a row
//     114688 .. 147456  v_tile, 1 x 32768 bytes, 256 bytes a row
//     147456 .. 188416  ds_tile, 2 x 20480 bytes, 256 bytes a row
//     188416 .. 189056  lse_tile, 2 x 320 bytes, 4 bytes a row
//     189056 .. 189696  delta_tile, 2 x 320 bytes, 4 bytes a row
//     189696 .. 230656  dq_part, 1 x 40960 bytes, 320 bytes a row
//   warps of s: 8 along rows, 1 along columns
//   warps of p: 8 along rows, 1 along columns
//   warps of dp: 8 along rows, 1 along columns
//   warps of ds: 8 along rows, 1 along columns
//   warps of p_operand: 8 along rows, 1 along columns
//   warps of ds_operand: 8 along rows, 1 along columns
//   warps of dk_acc: 8 along rows, 1 along columns
//   warps of dv_acc: 8 along rows, 1 along columns
//   warps of dk_out: 8 along rows, 1 along columns
//   warps of dv_out: 8 along rows, 1 along columns
//   warps of dq_acc: 8 along rows, 1 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm90.cuh"

using element = bf16;

constexpr int THREADS = 256;  // 8 warps
constexpr int MIN_BLOCKS = 1;  // blocks a multiprocessor
constexpr int PRODUCER_THREADS = 128;  // of which one loads
constexpr int BLOCK_Q = 80;
constexpr int BLOCK_KV = 128;
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int REDUCTION_WIDTH = 4;  // floats in one atomic addition

// shared memory: rows x columns, bytes from row to row
using QTile = PanelTile<BLOCK_Q, HEAD_DIM>;
constexpr int Q_TILE_OFFSET = 0;
using DoutTile = PanelTile<BLOCK_Q, HEAD_DIM_V>;
constexpr int DOUT_TILE_OFFSET = 40960;
using DkTile = PanelTile<BLOCK_KV, HEAD_DIM>;
constexpr int DK_TILE_OFFSET = 81920;
using KTile = PanelTile<BLOCK_KV, HEAD_DIM>;
constexpr int K_TILE_OFFSET = 81920;
using DvTile = PanelTile<BLOCK_KV, HEAD_DIM_V>;
constexpr int DV_TILE_OFFSET = 114688;
using VTile = PanelTile<BLOCK_KV, HEAD_DIM_V>;
constexpr int V_TILE_OFFSET = 114688;
using DsTile = PanelTile<BLOCK_Q, BLOCK_KV>;
constexpr int DS_TILE_OFFSET = 147456;
constexpr int LSE_TILE_OFFSET = 188416;
constexpr int DELTA_TILE_OFFSET = 189056;
constexpr int DQ_PART_OFFSET = 189696;
constexpr int K_TILE_FULL_OFFSET = 230656;
constexpr int V_TILE_FULL_OFFSET = 230664;
constexpr int Q_TILE_FULL_OFFSET = 230672;
constexpr int Q_TILE_EMPTY_OFFSET = 230688;
constexpr int DOUT_TILE_FULL_OFFSET = 230704;
constexpr int DOUT_TILE_EMPTY_OFFSET = 230720;

// register tiles: rows x columns, warps along each
using S = Fragment<BLOCK_KV, BLOCK_Q, 8, 1>;
using DkAcc = Fragment<BLOCK_KV, HEAD_DIM, 8, 1>;
using DvAcc = Fragment<BLOCK_KV, HEAD_DIM_V, 8, 1>;
using DqAcc = Fragment<HEAD_DIM, BLOCK_Q, 8, 1>;

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
// acc (+)= a b, 64 x 80 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x80x16_shared_transposed(float (&acc)[2][20], uint32 a, uint32 a_step, uint32 b, uint32 b_step, int accumulate) {
  asm volatile("{ .reg .pred p; .reg .b32 low; .reg .b64 a_desc, b_desc; setp.ne.b32 p, %44, 0;\n"
    "add.u32 low, %40, %41; mov.b64 a_desc, {low, 1073741888};\n"
    "add.u32 low, %42, %43; mov.b64 b_desc, {low, 1073741888};\n"
    "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39"
      "}, a_desc, b_desc, p, 1, 1, 1, 0; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]), "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]), "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]), "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15]),
  "+f"(acc[0][16]), "+f"(acc[0][17]), "+f"(acc[1][16]), "+f"(acc[1][17]), "+f"(acc[0][18]), "+f"(acc[0][19]), "+f"(acc[1][18]), "+f"(acc[1][19])
  : "r"(a), "r"(a_step), "r"(b), "r"(b_step), "r"(accumulate));
}

struct Args {
  TensorMap q;  // batches, heads, seqlen_q, head_dim
  TensorMap k;  // batches, heads, seqlen_k, head_dim
  TensorMap v;  // batches, heads, seqlen_k, head_dim_v
  TensorMap dout;  // batches, heads, seqlen_q, head_dim_v
  Vector<float> lse_log2;  // batches, heads, seqlen_q_padded
  Vector<float> delta;  // batches, heads, seqlen_q_padded
  TensorMap dk;  // batches, heads, seqlen_k, head_dim
  TensorMap dv;  // batches, heads, seqlen_k, head_dim_v
  Tensor<float> dq_workspace;  // batches, heads, seqlen_q_padded, head_dim
  int seqlen_q;
  int seqlen_k;
  int heads;
  int heads_kv;
  int group;
  int batches;
  float scale_log2;
  float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_THREADS, MIN_BLOCKS) attention_backward(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const SharedAddress q_tile = {shared + Q_TILE_OFFSET};
  const SharedAddress dout_tile = {shared + DOUT_TILE_OFFSET};
  const SharedAddress dk_tile = {shared + DK_TILE_OFFSET};
  const SharedAddress k_tile = {shared + K_TILE_OFFSET};
  const SharedAddress dv_tile = {shared + DV_TILE_OFFSET};
  const SharedAddress v_tile = {shared + V_TILE_OFFSET};
  const SharedAddress ds_tile = {shared + DS_TILE_OFFSET};
  float* const lse_tile = reinterpret_cast<float*>(shared + LSE_TILE_OFFSET);
  float* const delta_tile = reinterpret_cast<float*>(shared + DELTA_TILE_OFFSET);
  float* const dq_part = reinterpret_cast<float*>(shared + DQ_PART_OFFSET);
  uint64* const k_tile_full = reinterpret_cast<uint64*>(shared + K_TILE_FULL_OFFSET);
  uint64* const v_tile_full = reinterpret_cast<uint64*>(shared + V_TILE_FULL_OFFSET);
  uint64* const q_tile_full = reinterpret_cast<uint64*>(shared + Q_TILE_FULL_OFFSET);
  uint64* const q_tile_empty = reinterpret_cast<uint64*>(shared + Q_TILE_EMPTY_OFFSET);
  uint64* const dout_tile_full = reinterpret_cast<uint64*>(shared + DOUT_TILE_FULL_OFFSET);
  uint64* const dout_tile_empty = reinterpret_cast<uint64*>(shared + DOUT_TILE_EMPTY_OFFSET);

  const int warpgroup = uniform(threadIdx.x / 128);
  const int head_kv = blockIdx.x;
  const int kv_block = blockIdx.y;
  const int batch = blockIdx.z;

  float s[S::ROWS][S::COLS];
  float p[S::ROWS][S::COLS];
  float dp[S::ROWS][S::COLS];
  float ds[S::ROWS][S::COLS];
  uint32 p_operand[S::ROWS][S::PAIRS];
  uint32 ds_operand[S::ROWS][S::PAIRS];
  float dk_acc[DkAcc::ROWS][DkAcc::COLS];
  float dv_acc[DvAcc::ROWS][DvAcc::COLS];
  uint32 dk_out[DkAcc::ROWS][DkAcc::PAIRS];
  uint32 dv_out[DvAcc::ROWS][DvAcc::PAIRS];
  float dq_acc[DqAcc::ROWS][DqAcc::COLS];

  if (threadIdx.x == 0) {
    init_barriers<1>(k_tile_full, 1);
    init_barriers<1>(v_tile_full, 1);
    init_barriers<2>(q_tile_full, 1);
    init_barriers<2>(q_tile_empty, 8);
    init_barriers<2>(dout_tile_full, 1);
    init_barriers<2>(dout_tile_empty, 8);
    fence_barrier_init();
  }
  __syncthreads();
  const int kv_start = kv_block * BLOCK_KV;
  // one thread keeps the stages full
  if (threadIdx.x >= THREADS) {
    give_registers<24>();
    if (threadIdx.x == THREADS) {
      tma_load<KTile>(k_tile, k_tile_full, args.k, kv_start, head_kv, batch, leave_cache_first());
      tma_load<VTile>(v_tile, v_tile_full, args.v, kv_start, head_kv, batch, leave_cache_first());
      int step = 0;
      for (int head_in_group = 0; head_in_group < args.group; ++head_in_group) {
        // earlier blocks see nothing
        const int first_q_block = max(0, max(BLOCK_Q - 1 - (args.seqlen_k - args.seqlen_q + (BLOCK_Q - 1) - kv_start), 0) / BLOCK_Q);
        #pragma unroll 1  // the loading thread has few registers
        for (int q_block = first_q_block; q_block < (args.seqlen_q + BLOCK_Q - 1) / BLOCK_Q; ++q_block) {
          const int head = head_kv * args.group + head_in_group;
          const int q_start = q_block * BLOCK_Q;
          wait_barrier(q_tile_empty + step % 2, (step / 2 % 2 + 1) % 2);
          tma_load<QTile, BLOCK_Q * 4>(q_tile + step % 2 * QTile::BYTES, q_tile_full + step % 2, args.q, q_start, head, batch, keep_in_cache());
          load_vector<BLOCK_Q>(lse_tile + step % 2 * BLOCK_Q, q_tile_full + step % 2, args.lse_log2.at(batch, head, q_start));
          wait_barrier(dout_tile_empty + step % 2, (step / 2 % 2 + 1) % 2);
          tma_load<DoutTile, BLOCK_Q * 4>(dout_tile + step % 2 * DoutTile::BYTES, dout_tile_full + step % 2, args.dout, q_start, head, batch, keep_in_cache());
          load_vector<BLOCK_Q>(delta_tile + step % 2 * BLOCK_Q, dout_tile_full + step % 2, args.delta.at(batch, head, q_start));
          step = step + 1;
        }
      }
    }
    return;
  }

  if (threadIdx.x < THREADS) {
    take_registers<240>();
    const uint32 k_tile_own_rows = uniform(KTile::start(k_tile) + warpgroup * KTile::WARPGROUP_STEP);
    const uint32 v_tile_operand = uniform(VTile::start(v_tile) + warpgroup * VTile::WARPGROUP_STEP);
    const uint32 k_tile_own_columns = uniform(KTile::start(k_tile) + warpgroup * KTile::PANEL_STEP);
    wait_barrier(k_tile_full, 0);
    wait_barrier(v_tile_full, 0);
    fill(dk_acc, 0.0f);
    fill(dv_acc, 0.0f);
    int step = 0;
    for (int head_in_group = 0; head_in_group < args.group; ++head_in_group) {
      // earlier blocks see nothing
      const int first_q_block = max(0, max(BLOCK_Q - 1 - (args.seqlen_k - args.seqlen_q + (BLOCK_Q - 1) - kv_start), 0) / BLOCK_Q);
      for (int q_block = first_q_block; q_block < (args.seqlen_q + BLOCK_Q - 1) / BLOCK_Q; ++q_block) {
        const int head = head_kv * args.group + head_in_group;
        const int q_start = q_block * BLOCK_Q;
        const uint32 q_tile_operand = uniform(QTile::start(q_tile + step % 2 * QTile::BYTES));
        const uint32 dout_tile_operand = uniform(DoutTile::start(dout_tile + step % 2 * DoutTile::BYTES));
        const uint32 ds_tile_operand = uniform(DsTile::start(ds_tile + step % 2 * DsTile::BYTES));
        wait_barrier(q_tile_full + step % 2, step / 2 % 2);
        // keys are rows: s is the transpose of Q K^T
        begin_products();
        #pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
          wgmma_64x80x16_shared(s, k_tile_own_rows, KTile::k_major(k), q_tile_operand, QTile::k_major(k), k > 0);
        }
        commit_products();
        wait_barrier(dout_tile_full + step % 2, step / 2 % 2);
        begin_products();
        #pragma unroll
        for (int k = 0; k < HEAD_DIM_V / 16; ++k) {
          wgmma_64x80x16_shared(dp, v_tile_operand, VTile::k_major(k), dout_tile_operand, DoutTile::k_major(k), k > 0);
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
              s[i][j] = S::col_offset(j) >= (kv_start + S::row(i) < args.seqlen_k ? kv_start + S::row(i) - (q_start + (args.seqlen_k - args.seqlen_q)) : 1048576) - S::lane_col() ? s[i][j] : -INF;
            }
          }
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::COLS; ++j) {
            p[i][j] = exp2_approx(s[i][j] * args.scale_log2 - lse_tile[step % 2 * BLOCK_Q + S::col(j)]);
          }
        }
        wait_products<0>();
        settle(dp);
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::COLS; ++j) {
            ds[i][j] = p[i][j] * (dp[i][j] - delta_tile[step % 2 * BLOCK_Q + S::col(j)]);
          }
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::PAIRS; ++j) {
            p_operand[i][j] = pack<element>(p[i][2 * j], p[i][2 * j + 1]);
          }
        }
        #pragma unroll
        for (int i = 0; i < S::ROWS; ++i) {
          #pragma unroll
          for (int j = 0; j < S::PAIRS; ++j) {
            ds_operand[i][j] = pack<element>(ds[i][2 * j], ds[i][2 * j + 1]);
          }
        }
        // dQ needs every key of the block
        store_panels_transposed<S, DsTile>(ds_tile + step % 2 * DsTile::BYTES, ds_operand);
        begin_products();
        #pragma unroll
        for (int k = 0; k < BLOCK_Q / 16; ++k) {
          wgmma_64x128x16_registers(dv_acc, p_operand[0][2 * k], p_operand[1][2 * k], p_operand[0][2 * k + 1], p_operand[1][2 * k + 1], dout_tile_operand, DoutTile::mn_major(k), 1);
        }
        commit_products();
        fence_stores();
        // ds_tile is whole
        consumer_barrier<THREADS>();
        begin_products();
        #pragma unroll
        for (int k = 0; k < BLOCK_KV / 16; ++k) {
          wgmma_64x80x16_shared_transposed(dq_acc, k_tile_own_columns, KTile::mn_major(k), ds_tile_operand, DsTile::k_major(k), k > 0);
        }
        commit_products();
        begin_products();
        #pragma unroll
        for (int k = 0; k < BLOCK_Q / 16; ++k) {
          wgmma_64x128x16_registers(dk_acc, ds_operand[0][2 * k], ds_operand[1][2 * k], ds_operand[0][2 * k + 1], ds_operand[1][2 * k + 1], q_tile_operand, QTile::mn_major(k), 1);
        }
        commit_products();
        wait_products<1>();
        settle(dv_acc);
        settle(dq_acc);
        __syncwarp();  // every lane has read the vectors that came with it
        arrive_warp(dout_tile_empty + step % 2);
        // other blocks of keys add to the same rows
        reduce_fragment<REDUCTION_WIDTH>(args.dq_workspace.at(batch, head, q_start), dq_part, dq_acc, warp_of_tile<1>());
        wait_products<0>();
        settle(dk_acc);
        __syncwarp();  // every lane has read the vectors that came with it
        arrive_warp(q_tile_empty + step % 2);
        step = step + 1;
      }
    }

    #pragma unroll
    for (int i = 0; i < DkAcc::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < DkAcc::PAIRS; ++j) {
        dk_out[i][j] = pack<element>(dk_acc[i][2 * j] * args.scale, dk_acc[i][2 * j + 1] * args.scale);
      }
    }
    #pragma unroll
    for (int i = 0; i < DvAcc::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < DvAcc::PAIRS; ++j) {
        dv_out[i][j] = pack<element>(dv_acc[i][2 * j], dv_acc[i][2 * j + 1]);
      }
    }
    // every warp is done with the tiles that this one lies over
    consumer_barrier<THREADS>();
    store_panels<DkAcc, DkTile>(dk_tile, dk_out);
    fence_stores();
    warpgroup_barrier(warpgroup);
    // every warp is done with the tiles that this one lies over
    consumer_barrier<THREADS>();
    store_panels<DvAcc, DvTile>(dv_tile, dv_out);
    fence_stores();
    warpgroup_barrier(warpgroup);
    tma_store<DkTile>(args.dk, kv_start, head_kv, batch, dk_tile, warpgroup);
    tma_store<DvTile>(args.dv, kv_start, head_kv, batch, dv_tile, warpgroup);
    // shared memory outlives the copies from it
    wait_stored();
  }
}
