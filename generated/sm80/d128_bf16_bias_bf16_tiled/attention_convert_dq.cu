// attention_convert_dq: d128_bf16_bias_bf16.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_convert_dq for sm_80
//   tile q 32, 8 warps (chosen by the blocks of attention_backward)
//   block_q = 32, head_dim = 128
//   256 threads, about 56 registers each, 4 a multiprocessor
//   shared memory 8704 of 166912 bytes
//          0 ..   8704  dq_tile, 1 x 8704 bytes, 272 bytes a row
//   warps of dq_acc: 1 along rows, 8 along columns
//   warps of dq_out: 1 along rows, 8 along columns

#include "flashgen/common.cuh"
#include "flashgen/sm80.cuh"

using element = bf16;

constexpr int THREADS = 256;  // 8 warps
constexpr int MIN_BLOCKS = 4;  // blocks a multiprocessor
constexpr int BLOCK_Q = 32;
constexpr int HEAD_DIM = 128;
constexpr int TRUE_HEAD_DIM = 128;  // before padding
constexpr int REDUCTION_WIDTH = 1;  // floats in one atomic addition

// shared memory: rows x columns, bytes from row to row
using DqTile = SharedTile<BLOCK_Q, HEAD_DIM, 272>;
constexpr int DQ_TILE_OFFSET = 0;

// register tiles: rows x columns, warps along each
using DqAcc = Fragment<BLOCK_Q, HEAD_DIM, 1, 8>;

struct Args {
  Tensor<float> dq_workspace;  // batches, heads, seqlen_q_padded, head_dim
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_convert_dq(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const SharedAddress dq_tile = {shared + DQ_TILE_OFFSET};

  const int q_block = blockIdx.x;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;

  float dq_acc[DqAcc::ROWS][DqAcc::COLS];
  uint32 dq_out[DqAcc::ROWS][DqAcc::PAIRS];

  const int q_start = q_block * BLOCK_Q;
  load_fragment<REDUCTION_WIDTH>(dq_acc, args.dq_workspace.at(batch, head, q_start));
  #pragma unroll
  for (int i = 0; i < DqAcc::ROWS; ++i) {
    #pragma unroll
    for (int j = 0; j < DqAcc::PAIRS; ++j) {
      dq_out[i][j] = pack<element>(dq_acc[i][2 * j] * args.scale, dq_acc[i][2 * j + 1] * args.scale);
    }
  }
  store_fragment<DqAcc, DqTile>(dq_tile, dq_out);
  __syncthreads();
  store_tile<DqTile, TRUE_HEAD_DIM, THREADS>(args.dq.at(batch, head, q_start), args.dq.row_stride, args.seqlen_q - q_start, dq_tile);
}
