// attention_forward: d128_bf16_causal_alibi.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_forward for sm_80
//   tile q 128 x kv 32, 4 warps, 2 stages (chosen by cost model)
//   block_q = 128, block_kv = 32, head_dim = 128, head_dim_v = 128
//   128 threads, about 248 registers each, 2 a multiprocessor
//   shared memory 69632 of 166912 bytes
//          0 ..  34816  o_tile, 1 x 34816 bytes, 272 bytes a row
//          0 ..  34816  q_tile, 1 x 34816 bytes, 272 bytes a row
//      34816 ..  52224  k_tile, 2 x 8704 bytes, 272 bytes a row
//      52224 ..  69632  v_tile, 2 x 8704 bytes, 272 bytes a row
//   warps of s: 4 along rows, 1 along columns
//   warps of p: 4 along rows, 1 along columns
//   warps of p_operand: 4 along rows, 1 along columns
//   warps of o_acc: 4 along rows, 1 along columns
//   warps of o_out: 4 along rows, 1 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm80.cuh"

using element = bf16;

constexpr int THREADS = 128;  // 4 warps
constexpr int MIN_BLOCKS = 2;  // blocks a multiprocessor
constexpr int UNROLLED_DEPTH = 4;  // steps of 16 in depth, of products from shared memory
constexpr int BLOCK_Q = 128;
constexpr int BLOCK_KV = 32;
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int TRUE_HEAD_DIM = 128;  // before padding
constexpr int TRUE_HEAD_DIM_V = 128;  // before padding

// shared memory: rows x columns, bytes from row to row
using OTile = SharedTile<BLOCK_Q, HEAD_DIM_V, 272>;
constexpr int O_TILE_OFFSET = 0;
using QTile = SharedTile<BLOCK_Q, HEAD_DIM, 272>;
constexpr int Q_TILE_OFFSET = 0;
using KTile = SharedTile<BLOCK_KV, HEAD_DIM, 272>;
constexpr int K_TILE_OFFSET = 34816;
using VTile = SharedTile<BLOCK_KV, HEAD_DIM_V, 272>;
constexpr int V_TILE_OFFSET = 52224;

// register tiles: rows x columns, warps along each
using S = Fragment<BLOCK_Q, BLOCK_KV, 4, 1>;
using OAcc = Fragment<BLOCK_Q, HEAD_DIM_V, 4, 1>;

struct Args {
  Tensor<element> q;  // batches, heads, seqlen_q, head_dim
  Tensor<element> k;  // batches, heads, seqlen_k, head_dim
  Tensor<element> v;  // batches, heads, seqlen_k, head_dim_v
  Tensor<element> o;  // batches, heads, seqlen_q, head_dim_v
  Vector<float> lse;  // batches, heads, seqlen_q
  int seqlen_q;
  int seqlen_k;
  int heads;
  int heads_kv;
  int group;
  int batches;
  float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_forward(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const SharedAddress o_tile = {shared + O_TILE_OFFSET};
  const SharedAddress q_tile = {shared + Q_TILE_OFFSET};
  const SharedAddress k_tile = {shared + K_TILE_OFFSET};
  const SharedAddress v_tile = {shared + V_TILE_OFFSET};

  const int q_block_count = (args.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
  const int q_block = q_block_count - 1 - blockIdx.x;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;

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

  const int head_kv = head / args.group;
  const int q_start = q_block * BLOCK_Q;
  copy_tile_async<QTile, TRUE_HEAD_DIM, THREADS>(q_tile, args.q.at(batch, head, q_start), args.q.row_stride, args.seqlen_q - q_start);
  commit_group();
  fill(o_acc, 0.0f);
  fill(row_max, -INF);
  fill(row_sum, 0.0f);
  fill(offset, 0.0f);
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
    // alibi
    #pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      #pragma unroll
      for (int j = 0; j < S::COLS; ++j) {
        s[i][j] = s[i][j] * args.scale - exp2_approx(float(head + 1) * (-8.0f * reciprocal(float(args.heads)))) * (float(q_start + S::row(i) + (args.seqlen_k - args.seqlen_q) - kv_start - S::lane_col()) - float(S::col_offset(j)));
      }
    }
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
      row_max_old[i] = row_max[i];
    }
    reduce_rows<Row_max>(row_max, s);
    combine_lanes<Row_max>(row_max);
    // a row that has seen no key yet keeps exp2(-inf - 0) = 0 instead of NaN
    #pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      offset[i] = row_max[i] == -INF ? 0.0f : row_max[i] * 1.4426950408889634f;
    }
    #pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      rescale[i] = exp2_approx(row_max_old[i] * 1.4426950408889634f - offset[i]);
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
    multiply_packed<element, OAcc, VTile, false>(o_acc, p_operand, v_tile + kv_block % 2 * VTile::BYTES);
  }

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
  store_rows<S>(args.lse.at(batch, head, q_start), lse_row, args.seqlen_q - q_start);
  #pragma unroll
  for (int i = 0; i < OAcc::ROWS; ++i) {
    #pragma unroll
    for (int j = 0; j < OAcc::PAIRS; ++j) {
      o_out[i][j] = pack<element>(o_acc[i][2 * j] * inverse[i], o_acc[i][2 * j + 1] * inverse[i]);
    }
  }
  wait_group<0>();
  // nothing is in flight any more
  __syncthreads();
  store_fragment<OAcc, OTile>(o_tile, o_out);
  __syncthreads();
  store_tile<OTile, TRUE_HEAD_DIM_V, THREADS>(args.o.at(batch, head, q_start), args.o.row_stride, args.seqlen_q - q_start, o_tile);
}
