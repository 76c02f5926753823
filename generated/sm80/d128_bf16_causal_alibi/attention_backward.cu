// attention_backward: d128_bf16_causal_alibi.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_backward for sm_80
//   tile kv 128 x q 64, 8 warps, 2 and 1 stages, scores 4 x 2 among the warps (chosen by cost model)
//   block_q = 64, block_kv = 128, head_dim = 128, head_dim_v = 128
//   256 threads, about 248 registers each, 1 a multiprocessor
//   shared memory 159488 of 166912 bytes
//          0 ..  34816  dk_tile, 1 x 34816 bytes, 272 bytes a row
//          0 ..  34816  k_tile, 1 x 34816 bytes, 272 bytes a row
//      34816 ..  69632  dv_tile, 1 x 34816 bytes, 272 bytes a row
//      34816 ..  69632  q_tile, 2 x 17408 bytes, 272 bytes a row
//      69632 .. 104448  v_tile, 1 x 34816 bytes, 272 bytes a row
//     104448 .. 122880  ds_tile, 1 x 18432 bytes, 144 bytes a row
//     122880 .. 141312  p_tile, 1 x 18432 bytes, 144 bytes a row
//     141312 .. 158720  dout_tile, 1 x 17408 bytes, 272 bytes a row
//     158720 .. 159232  lse_tile, 2 x 256 bytes, 4 bytes a row
//     159232 .. 159488  delta_tile, 1 x 256 bytes, 4 bytes a row
//   warps of s: 4 along rows, 2 along columns
//   warps of p: 4 along rows, 2 along columns
//   warps of dp: 4 along rows, 2 along columns
//   warps of ds: 4 along rows, 2 along columns
//   warps of p_operand: 4 along rows, 2 along columns
//   warps of ds_operand: 4 along rows, 2 along columns
//   warps of dk_acc: 4 along rows, 2 along columns
//   warps of dv_acc: 4 along rows, 2 along columns
//   warps of dk_out: 4 along rows, 2 along columns
//   warps of dv_out: 4 along rows, 2 along columns
//   warps of dq_acc: 2 along rows, 4 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm80.cuh"

using element = bf16;

constexpr int THREADS = 256;  // 8 warps
constexpr int MIN_BLOCKS = 1;  // blocks a multiprocessor
constexpr int UNROLLED_DEPTH = 4;  // steps of 16 in depth, of products from shared memory
constexpr int BLOCK_Q = 64;
constexpr int BLOCK_KV = 128;
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int TRUE_HEAD_DIM = 128;  // before padding
constexpr int TRUE_HEAD_DIM_V = 128;  // before padding
constexpr int REDUCTION_WIDTH = 1;  // floats in one atomic addition

// shared memory: rows x columns, bytes from row to row
using DkTile = SharedTile<BLOCK_KV, HEAD_DIM, 272>;
constexpr int DK_TILE_OFFSET = 0;
using KTile = SharedTile<BLOCK_KV, HEAD_DIM, 272>;
constexpr int K_TILE_OFFSET = 0;
using DvTile = SharedTile<BLOCK_KV, HEAD_DIM_V, 272>;
constexpr int DV_TILE_OFFSET = 34816;
using QTile = SharedTile<BLOCK_Q, HEAD_DIM, 272>;
constexpr int Q_TILE_OFFSET = 34816;
using VTile = SharedTile<BLOCK_KV, HEAD_DIM_V, 272>;
constexpr int V_TILE_OFFSET = 69632;
using DsTile = SharedTile<BLOCK_KV, BLOCK_Q, 144>;
constexpr int DS_TILE_OFFSET = 104448;
using PTile = SharedTile<BLOCK_KV, BLOCK_Q, 144>;
constexpr int P_TILE_OFFSET = 122880;
using DoutTile = SharedTile<BLOCK_Q, HEAD_DIM_V, 272>;
constexpr int DOUT_TILE_OFFSET = 141312;
constexpr int LSE_TILE_OFFSET = 158720;
constexpr int DELTA_TILE_OFFSET = 159232;

// register tiles: rows x columns, warps along each
using S = Fragment<BLOCK_KV, BLOCK_Q, 4, 2>;
using DkAcc = Fragment<BLOCK_KV, HEAD_DIM, 4, 2>;
using DvAcc = Fragment<BLOCK_KV, HEAD_DIM_V, 4, 2>;
using DqAcc = Fragment<BLOCK_Q, HEAD_DIM, 2, 4>;

struct Args {
  Tensor<element> q;  // batches, heads, seqlen_q, head_dim
  Tensor<element> k;  // batches, heads, seqlen_k, head_dim
  Tensor<element> v;  // batches, heads, seqlen_k, head_dim_v
  Tensor<element> dout;  // batches, heads, seqlen_q, head_dim_v
  Vector<float> lse_log2;  // batches, heads, seqlen_q_padded
  Vector<float> delta;  // batches, heads, seqlen_q_padded
  Tensor<element> dk;  // batches, heads, seqlen_k, head_dim
  Tensor<element> dv;  // batches, heads, seqlen_k, head_dim_v
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const SharedAddress dk_tile = {shared + DK_TILE_OFFSET};
  const SharedAddress k_tile = {shared + K_TILE_OFFSET};
  const SharedAddress dv_tile = {shared + DV_TILE_OFFSET};
  const SharedAddress q_tile = {shared + Q_TILE_OFFSET};
  const SharedAddress v_tile = {shared + V_TILE_OFFSET};
  const SharedAddress ds_tile = {shared + DS_TILE_OFFSET};
  const SharedAddress p_tile = {shared + P_TILE_OFFSET};
  const SharedAddress dout_tile = {shared + DOUT_TILE_OFFSET};
  float* const lse_tile = reinterpret_cast<float*>(shared + LSE_TILE_OFFSET);
  float* const delta_tile = reinterpret_cast<float*>(shared + DELTA_TILE_OFFSET);

  const int kv_block = blockIdx.x;
  const int head_kv = blockIdx.y;
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

  const int kv_start = kv_block * BLOCK_KV;
  copy_tile_async<KTile, TRUE_HEAD_DIM, THREADS>(k_tile, args.k.at(batch, head_kv, kv_start), args.k.row_stride, args.seqlen_k - kv_start);
  copy_tile_async<VTile, TRUE_HEAD_DIM_V, THREADS>(v_tile, args.v.at(batch, head_kv, kv_start), args.v.row_stride, args.seqlen_k - kv_start);
  commit_group();
  fill(dk_acc, 0.0f);
  fill(dv_acc, 0.0f);
  // earlier blocks see nothing
  const int first_q_block = max(0, max(BLOCK_Q - 1 - (args.seqlen_k - args.seqlen_q + (BLOCK_Q - 1) - kv_start), 0) / BLOCK_Q);
  const int q_blocks = (args.seqlen_q + BLOCK_Q - 1) / BLOCK_Q - first_q_block;
  if (0 < args.group * q_blocks) {
    copy_tile_async<QTile, TRUE_HEAD_DIM, THREADS>(q_tile, args.q.at(batch, head_kv * args.group, first_q_block * BLOCK_Q), args.q.row_stride, args.seqlen_q - first_q_block * BLOCK_Q);
    copy_vector_async<BLOCK_Q, THREADS>(lse_tile, args.lse_log2.at(batch, head_kv * args.group, first_q_block * BLOCK_Q), BLOCK_Q);
  }
  commit_group();
  // head_in_group x q_block
  for (int step = 0; step < args.group * q_blocks; ++step) {
    const int head_in_group = step / q_blocks;
    const int q_block = first_q_block + step % q_blocks;
    const int head = head_kv * args.group + head_in_group;
    const int q_start = q_block * BLOCK_Q;
    wait_group<0>();
    // q_tile landed; the slot of q_tile and dout_tile is free
    __syncthreads();
    if (step + 1 < args.group * q_blocks) {
      copy_tile_async<QTile, TRUE_HEAD_DIM, THREADS>(q_tile + (step + 1) % 2 * QTile::BYTES, args.q.at(batch, head_kv * args.group + (step + 1) / q_blocks, (first_q_block + (step + 1) % q_blocks) * BLOCK_Q), args.q.row_stride, args.seqlen_q - (first_q_block + (step + 1) % q_blocks) * BLOCK_Q);
      copy_vector_async<BLOCK_Q, THREADS>(lse_tile + (step + 1) % 2 * BLOCK_Q, args.lse_log2.at(batch, head_kv * args.group + (step + 1) / q_blocks, (first_q_block + (step + 1) % q_blocks) * BLOCK_Q), BLOCK_Q);
    }
    commit_group();
    copy_tile_async<DoutTile, TRUE_HEAD_DIM_V, THREADS>(dout_tile, args.dout.at(batch, head, q_start), args.dout.row_stride, args.seqlen_q - q_start);
    copy_vector_async<BLOCK_Q, THREADS>(delta_tile, args.delta.at(batch, head, q_start), BLOCK_Q);
    commit_group();
    // keys are rows: s is the transpose of Q K^T
    fill(s, 0.0f);
    multiply_shared<element, UNROLLED_DEPTH, S, KTile, false, QTile, true>(s, k_tile, q_tile + step % 2 * QTile::BYTES);
    // alibi
    #pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < S::COLS; ++j) {
        s[i][j] = s[i][j] * args.scale - exp2_approx(float(head + 1) * (-8.0f * reciprocal(float(args.heads)))) * float(q_start + S::col(j) + (args.seqlen_k - args.seqlen_q) - (kv_start + S::row(i)));
      }
    }
    // only tiles on a boundary are masked
    if (kv_start + (BLOCK_KV - 1) >= args.seqlen_k || kv_start + (BLOCK_KV - 1) > q_start + (args.seqlen_k - args.seqlen_q)) {
      #pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        #pragma unroll
        for (int j = 0; j < S::COLS; ++j) {
          s[i][j] = kv_start + S::row(i) < args.seqlen_k && kv_start + S::row(i) <= q_start + S::col(j) + (args.seqlen_k - args.seqlen_q) ? s[i][j] : -INF;
        }
      }
    }
    #pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < S::COLS; ++j) {
        p[i][j] = exp2_approx(s[i][j] * 1.4426950408889634f - lse_tile[step % 2 * BLOCK_Q + S::col(j)]);
      }
    }
    wait_group<0>();
    // dout_tile landed
    __syncthreads();
    fill(dp, 0.0f);
    multiply_shared<element, UNROLLED_DEPTH, S, VTile, false, DoutTile, true>(dp, v_tile, dout_tile);
    #pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < S::PAIRS; ++j) {
        p_operand[i][j] = pack<element>(p[i][2 * j], p[i][2 * j + 1]);
      }
    }
    // its readers are other warps
    store_fragment<S, PTile>(p_tile, p_operand);
    __syncthreads();
    multiply_shared<element, UNROLLED_DEPTH, DvAcc, PTile, false, DoutTile, false>(dv_acc, p_tile, dout_tile);
    #pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < S::COLS; ++j) {
        ds[i][j] = p[i][j] * (dp[i][j] - delta_tile[S::col(j)]);
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
    store_fragment<S, DsTile>(ds_tile, ds_operand);
    __syncthreads();
    multiply_shared<element, UNROLLED_DEPTH, DkAcc, DsTile, false, QTile, false>(dk_acc, ds_tile, q_tile + step % 2 * QTile::BYTES);
    fill(dq_acc, 0.0f);
    multiply_shared<element, UNROLLED_DEPTH, DqAcc, DsTile, true, KTile, false>(dq_acc, ds_tile, k_tile);
    // other blocks of keys add to the same rows
    add_fragment<REDUCTION_WIDTH>(args.dq_workspace.at(batch, head, q_start), dq_acc);
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
  wait_group<0>();
  // nothing is in flight any more
  __syncthreads();
  store_fragment<DkAcc, DkTile>(dk_tile, dk_out);
  store_fragment<DvAcc, DvTile>(dv_tile, dv_out);
  __syncthreads();
  store_tile<DkTile, TRUE_HEAD_DIM, THREADS>(args.dk.at(batch, head_kv, kv_start), args.dk.row_stride, args.seqlen_k - kv_start, dk_tile);
  store_tile<DvTile, TRUE_HEAD_DIM_V, THREADS>(args.dv.at(batch, head_kv, kv_start), args.dv.row_stride, args.seqlen_k - kv_start, dv_tile);
}
