// attention_backward_dq: d128_bf16_causal_deterministic.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_backward_dq for sm_80
//   tile q 128 x kv 80, 8 warps, 2 stages (chosen by cost model)
//   block_q = 128, block_kv = 80, head_dim = 128, head_dim_v = 128
//   256 threads, about 188 registers each, 1 a multiprocessor
//   shared memory 156672 of 166912 bytes
//          0 ..  34816  dq_tile, 1 x 34816 bytes, 272 bytes a row
//          0 ..  43520  k_tile, 2 x 21760 bytes, 272 bytes a row
//      43520 ..  87040  v_tile, 2 x 21760 bytes, 272 bytes a row
//      87040 .. 121856  dout_tile, 1 x 34816 bytes, 272 bytes a row
//     121856 .. 156672  q_tile, 1 x 34816 bytes, 272 bytes a row
//   warps of s: 8 along rows, 1 along columns
//   warps of p: 8 along rows, 1 along columns
//   warps of dp: 8 along rows, 1 along columns
//   warps of ds: 8 along rows, 1 along columns
//   warps of ds_operand: 8 along rows, 1 along columns
//   warps of dq_acc: 8 along rows, 1 along columns
//   warps of dq_out: 8 along rows, 1 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm80.cuh"

using element = bf16;

constexpr int THREADS = 256;  // 8 warps
constexpr int MIN_BLOCKS = 1;  // blocks a multiprocessor
constexpr int UNROLLED_DEPTH = 4;  // steps of 16 in depth, of products from shared memory
constexpr int BLOCK_Q = 128;
constexpr int BLOCK_KV = 80;
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int TRUE_HEAD_DIM = 128;  // before padding
constexpr int TRUE_HEAD_DIM_V = 128;  // before padding

// shared memory: rows x columns, bytes from row to row
using DqTile = SharedTile<BLOCK_Q, HEAD_DIM, 272>;
constexpr int DQ_TILE_OFFSET = 0;
using KTile = SharedTile<BLOCK_KV, HEAD_DIM, 272>;
constexpr int K_TILE_OFFSET = 0;
using VTile = SharedTile<BLOCK_KV, HEAD_DIM_V, 272>;
constexpr int V_TILE_OFFSET = 43520;
using DoutTile = SharedTile<BLOCK_Q, HEAD_DIM_V, 272>;
constexpr int DOUT_TILE_OFFSET = 87040;
using QTile = SharedTile<BLOCK_Q, HEAD_DIM, 272>;
constexpr int Q_TILE_OFFSET = 121856;

// register tiles: rows x columns, warps along each
using S = Fragment<BLOCK_Q, BLOCK_KV, 8, 1>;
using DqAcc = Fragment<BLOCK_Q, HEAD_DIM, 8, 1>;

struct Args {
  Tensor<element> q;  // batches, heads, seqlen_q, head_dim
  Tensor<element> k;  // batches, heads, seqlen_k, head_dim
  Tensor<element> v;  // batches, heads, seqlen_k, head_dim_v
  Tensor<element> dout;  // batches, heads, seqlen_q, head_dim_v
  Vector<float> lse_log2;  // batches, heads, seqlen_q
  Vector<float> delta;  // batches, heads, seqlen_q
  Tensor<element> dq;  // batches, heads, seqlen_q, head_dim
  int seqlen_q;
  int seqlen_k;
  int heads;
  int heads_kv;
  int group;
  int batches;
  float scale_log2;
  float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward_dq(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const SharedAddress dq_tile = {shared + DQ_TILE_OFFSET};
  const SharedAddress k_tile = {shared + K_TILE_OFFSET};
  const SharedAddress v_tile = {shared + V_TILE_OFFSET};
  const SharedAddress dout_tile = {shared + DOUT_TILE_OFFSET};
  const SharedAddress q_tile = {shared + Q_TILE_OFFSET};

  const int q_block_count = (args.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
  const int q_block = q_block_count - 1 - blockIdx.x;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;

  float lse_row[S::ROWS];
  float delta_row[S::ROWS];
  float s[S::ROWS][S::COLS];
  float p[S::ROWS][S::COLS];
  float dp[S::ROWS][S::COLS];
  float ds[S::ROWS][S::COLS];
  uint32 ds_operand[S::ROWS][S::PAIRS];
  float dq_acc[DqAcc::ROWS][DqAcc::COLS];
  uint32 dq_out[DqAcc::ROWS][DqAcc::PAIRS];

  const int head_kv = head / args.group;
  const int q_start = q_block * BLOCK_Q;
  copy_tile_async<QTile, TRUE_HEAD_DIM, THREADS>(q_tile, args.q.at(batch, head, q_start), args.q.row_stride, args.seqlen_q - q_start);
  copy_tile_async<DoutTile, TRUE_HEAD_DIM_V, THREADS>(dout_tile, args.dout.at(batch, head, q_start), args.dout.row_stride, args.seqlen_q - q_start);
  commit_group();
  load_rows<S>(lse_row, args.lse_log2.at(batch, head, q_start), args.seqlen_q - q_start);
  load_rows<S>(delta_row, args.delta.at(batch, head, q_start), args.seqlen_q - q_start);
  fill(dq_acc, 0.0f);
  // later blocks are not seen
  const int last_kv_block = min((args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV, max(q_start + (args.seqlen_k - args.seqlen_q) + (BLOCK_Q - 1) + BLOCK_KV, 0) / BLOCK_KV);
  if (0 < last_kv_block) {
    copy_tile_async<KTile, TRUE_HEAD_DIM, THREADS>(k_tile, args.k.at(batch, head_kv, 0), args.k.row_stride, args.seqlen_k);
  }
  commit_group();
  if (0 < last_kv_block) {
    copy_tile_async<VTile, TRUE_HEAD_DIM_V, THREADS>(v_tile, args.v.at(batch, head_kv, 0), args.v.row_stride, args.seqlen_k);
  }
  commit_group();
  for (int kv_block = 0; kv_block < last_kv_block; ++kv_block) {
    const int kv_start = kv_block * BLOCK_KV;
    wait_group<0>();
    // k_tile and v_tile landed; the slot of k_tile and v_tile is free
    __syncthreads();
    if (kv_block + 1 < last_kv_block) {
      copy_tile_async<KTile, TRUE_HEAD_DIM, THREADS>(k_tile + (kv_block + 1) % 2 * KTile::BYTES, args.k.at(batch, head_kv, (kv_block + 1) * BLOCK_KV), args.k.row_stride, args.seqlen_k - (kv_block + 1) * BLOCK_KV);
    }
    commit_group();
    if (kv_block + 1 < last_kv_block) {
      copy_tile_async<VTile, TRUE_HEAD_DIM_V, THREADS>(v_tile + (kv_block + 1) % 2 * VTile::BYTES, args.v.at(batch, head_kv, (kv_block + 1) * BLOCK_KV), args.v.row_stride, args.seqlen_k - (kv_block + 1) * BLOCK_KV);
    }
    commit_group();
    fill(s, 0.0f);
    multiply_shared<element, UNROLLED_DEPTH, S, QTile, false, KTile, true>(s, q_tile, k_tile + kv_block % 2 * KTile::BYTES);
    // only tiles on a boundary are masked
    if (kv_start + (BLOCK_KV - 1) >= args.seqlen_k || kv_start + (BLOCK_KV - 1) > q_start + (args.seqlen_k - args.seqlen_q)) {
      #pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        #pragma unroll
        for (int j = 0; j < S::COLS; ++j) {
          s[i][j] = kv_start + S::col(j) < args.seqlen_k && kv_start + S::col(j) <= q_start + S::row(i) + (args.seqlen_k - args.seqlen_q) ? s[i][j] : -INF;
        }
      }
    }
    #pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < S::COLS; ++j) {
        p[i][j] = exp2_approx(s[i][j] * args.scale_log2 - lse_row[i]);
      }
    }
    fill(dp, 0.0f);
    multiply_shared<element, UNROLLED_DEPTH, S, DoutTile, false, VTile, true>(dp, dout_tile, v_tile + kv_block % 2 * VTile::BYTES);
    #pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < S::COLS; ++j) {
        ds[i][j] = p[i][j] * (dp[i][j] - delta_row[i]);
      }
    }
    #pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < S::PAIRS; ++j) {
        ds_operand[i][j] = pack<element>(ds[i][2 * j], ds[i][2 * j + 1]);
      }
    }
    multiply_packed<element, DqAcc, KTile, false>(dq_acc, ds_operand, k_tile + kv_block % 2 * KTile::BYTES);
  }

  #pragma unroll
  for (int i = 0; i < DqAcc::ROWS; ++i) {
    #pragma unroll
    for (int j = 0; j < DqAcc::PAIRS; ++j) {
      dq_out[i][j] = pack<element>(dq_acc[i][2 * j] * args.scale, dq_acc[i][2 * j + 1] * args.scale);
    }
  }
  wait_group<0>();
  // nothing is in flight any more
  __syncthreads();
  store_fragment<DqAcc, DqTile>(dq_tile, dq_out);
  __syncthreads();
  store_tile<DqTile, TRUE_HEAD_DIM, THREADS>(args.dq.at(batch, head, q_start), args.dq.row_stride, args.seqlen_q - q_start, dq_tile);
}
