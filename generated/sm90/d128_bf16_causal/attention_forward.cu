// attention_forward: d128_bf16_causal.
// Written by flashgen; edit the IR or the templates, not this file.
//
// plan attention_forward for sm_90a
//   tile q 128 x kv 176, 12 warps, 2 stages (chosen by measurement: NVIDIA H200, 2026-11-30, 520 TFLOP/s, the model's choice 496: python -m flashgen tune --arch sm_90a --direction fwd --head-dim 128 --causal)
//   block_q = 128, block_kv = 176, head_dim = 128, head_dim_v = 128
//   384 threads, about 226 registers each, 1 a multiprocessor
//   shared memory 213072 of 232448 bytes
//          0 ..  90112  k_tile, 2 x 45056 bytes, 256 bytes a row
//          0 ..  34816  o_tile, 1 x 34816 bytes, 272 bytes a row
//      90112 .. 180224  v_tile, 2 x 45056 bytes, 256 bytes a row
//     180224 .. 212992  q_tile, 1 x 32768 bytes, 256 bytes a row
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
constexpr int BLOCK_KV = 176;
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int TRUE_HEAD_DIM_V = 128;  // before padding

// shared memory: rows x columns, bytes from row to row
using KTile = PanelTile<BLOCK_KV, HEAD_DIM>;
constexpr int K_TILE_OFFSET = 0;
using OTile = SharedTile<BLOCK_Q, HEAD_DIM_V, 272>;
constexpr int O_TILE_OFFSET = 0;
using VTile = PanelTile<BLOCK_KV, HEAD_DIM_V>;
constexpr int V_TILE_OFFSET = 90112;
using QTile = PanelTile<BLOCK_Q, HEAD_DIM>;
constexpr int Q_TILE_OFFSET = 180224;
constexpr int K_TILE_FULL_OFFSET = 212992;
constexpr int K_TILE_EMPTY_OFFSET = 213008;
constexpr int V_TILE_FULL_OFFSET = 213024;
constexpr int V_TILE_EMPTY_OFFSET = 213040;
constexpr int Q_TILE_FULL_OFFSET = 213056;
constexpr int Q_TILE_EMPTY_OFFSET = 213064;

// register tiles: rows x columns, warps along each
using S = Fragment<BLOCK_Q, BLOCK_KV, 8, 1>;
using OAcc = Fragment<BLOCK_Q, HEAD_DIM_V, 8, 1>;

// acc (+)= a b, 64 x 176 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x176x16_shared(float (&acc)[2][44], uint64 a, uint64 b, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %90, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87"
      "}, %88, %89, p, 1, 1, 0, 0; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]),
  "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]),
  "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]),
  "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]),
  "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15]),
  "+f"(acc[0][16]), "+f"(acc[0][17]), "+f"(acc[1][16]), "+f"(acc[1][17]),
  "+f"(acc[0][18]), "+f"(acc[0][19]), "+f"(acc[1][18]), "+f"(acc[1][19]),
  "+f"(acc[0][20]), "+f"(acc[0][21]), "+f"(acc[1][20]), "+f"(acc[1][21]),
  "+f"(acc[0][22]), "+f"(acc[0][23]), "+f"(acc[1][22]), "+f"(acc[1][23]),
  "+f"(acc[0][24]), "+f"(acc[0][25]), "+f"(acc[1][24]), "+f"(acc[1][25]),
  "+f"(acc[0][26]), "+f"(acc[0][27]), "+f"(acc[1][26]), "+f"(acc[1][27]),
  "+f"(acc[0][28]), "+f"(acc[0][29]), "+f"(acc[1][28]), "+f"(acc[1][29]),
  "+f"(acc[0][30]), "+f"(acc[0][31]), "+f"(acc[1][30]), "+f"(acc[1][31]),
  "+f"(acc[0][32]), "+f"(acc[0][33]), "+f"(acc[1][32]), "+f"(acc[1][33]),
  "+f"(acc[0][34]), "+f"(acc[0][35]), "+f"(acc[1][34]), "+f"(acc[1][35]),
  "+f"(acc[0][36]), "+f"(acc[0][37]), "+f"(acc[1][36]), "+f"(acc[1][37]),
  "+f"(acc[0][38]), "+f"(acc[0][39]), "+f"(acc[1][38]), "+f"(acc[1][39]),
  "+f"(acc[0][40]), "+f"(acc[0][41]), "+f"(acc[1][40]), "+f"(acc[1][41]),
  "+f"(acc[0][42]), "+f"(acc[0][43]), "+f"(acc[1][42]), "+f"(acc[1][43])
  : "l"(a), "l"(b), "r"(accumulate));
}
// acc (+)= a b, 64 x 128 x 16 a warpgroup
__device__ __forceinline__ void wgmma_64x128x16_registers(float (&acc)[2][32], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
  :
  "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[1][0]), "+f"(acc[1][1]),
  "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][2]), "+f"(acc[1][3]),
  "+f"(acc[0][4]), "+f"(acc[0][5]), "+f"(acc[1][4]), "+f"(acc[1][5]),
  "+f"(acc[0][6]), "+f"(acc[0][7]), "+f"(acc[1][6]), "+f"(acc[1][7]),
  "+f"(acc[0][8]), "+f"(acc[0][9]), "+f"(acc[1][8]), "+f"(acc[1][9]),
  "+f"(acc[0][10]), "+f"(acc[0][11]), "+f"(acc[1][10]), "+f"(acc[1][11]),
  "+f"(acc[0][12]), "+f"(acc[0][13]), "+f"(acc[1][12]), "+f"(acc[1][13]),
  "+f"(acc[0][14]), "+f"(acc[0][15]), "+f"(acc[1][14]), "+f"(acc[1][15]),
  "+f"(acc[0][16]), "+f"(acc[0][17]), "+f"(acc[1][16]), "+f"(acc[1][17]),
  "+f"(acc[0][18]), "+f"(acc[0][19]), "+f"(acc[1][18]), "+f"(acc[1][19]),
  "+f"(acc[0][20]), "+f"(acc[0][21]), "+f"(acc[1][20]), "+f"(acc[1][21]),
  "+f"(acc[0][22]), "+f"(acc[0][23]), "+f"(acc[1][22]), "+f"(acc[1][23]),
  "+f"(acc[0][24]), "+f"(acc[0][25]), "+f"(acc[1][24]), "+f"(acc[1][25]),
  "+f"(acc[0][26]), "+f"(acc[0][27]), "+f"(acc[1][26]), "+f"(acc[1][27]),
  "+f"(acc[0][28]), "+f"(acc[0][29]), "+f"(acc[1][28]), "+f"(acc[1][29]),
  "+f"(acc[0][30]), "+f"(acc[0][31]), "+f"(acc[1][30]), "+f"(acc[1][31])
  : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));
}

struct Args {
  TensorMap q;  // batches, heads, seqlen_q, head_dim
  TensorMap k;  // batches, heads, seqlen_k, head_dim
  TensorMap v;  // batches, heads, seqlen_k, head_dim_v
  Tensor<element> o;  // batches, heads, seqlen_q, head_dim_v
  Vector<float> lse;  // batches, heads, seqlen_q
  int seqlen_q;
  int seqlen_k;
  int heads;
  int heads_kv;
  int group;
  int batches;
  float scale_log2;
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER_THREADS, MIN_BLOCKS) attention_forward(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const SharedAddress k_tile = {shared + K_TILE_OFFSET};
  const SharedAddress o_tile = {shared + O_TILE_OFFSET};
  const SharedAddress v_tile = {shared + V_TILE_OFFSET};
  const SharedAddress q_tile = {shared + Q_TILE_OFFSET};
  uint64* const k_tile_full = reinterpret_cast<uint64*>(shared + K_TILE_FULL_OFFSET);
  uint64* const k_tile_empty = reinterpret_cast<uint64*>(shared + K_TILE_EMPTY_OFFSET);
  uint64* const v_tile_full = reinterpret_cast<uint64*>(shared + V_TILE_FULL_OFFSET);
  uint64* const v_tile_empty = reinterpret_cast<uint64*>(shared + V_TILE_EMPTY_OFFSET);
  uint64* const q_tile_full = reinterpret_cast<uint64*>(shared + Q_TILE_FULL_OFFSET);
  uint64* const q_tile_empty = reinterpret_cast<uint64*>(shared + Q_TILE_EMPTY_OFFSET);

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

  if (threadIdx.x == 0) {
    init_barriers<2>(k_tile_full, 1);
    init_barriers<2>(k_tile_empty, 8);
    init_barriers<2>(v_tile_full, 1);
    init_barriers<2>(v_tile_empty, 8);
    init_barriers<1>(q_tile_full, 1);
    init_barriers<1>(q_tile_empty, 8);
    fence_barrier_init();
  }
  __syncthreads();
  const int head_kv = head / args.group;
  const int q_start = q_block * BLOCK_Q;
  // later blocks are not seen
  const int last_kv_block = min((args.seqlen_k + BLOCK_KV - 1) / BLOCK_KV, max(q_start + (args.seqlen_k - args.seqlen_q) + (BLOCK_Q - 1) + BLOCK_KV, 0) / BLOCK_KV);
  // one thread keeps the stages full
  if (threadIdx.x >= THREADS) {
    give_registers<24>();
    if (threadIdx.x == THREADS) {
      tma_load<QTile>(q_tile, q_tile_full, args.q, q_start, head, batch);
      for (int kv_block = 0; kv_block < last_kv_block; ++kv_block) {
        const int kv_start = kv_block * BLOCK_KV;
        wait_barrier(k_tile_empty + kv_block % 2, (kv_block / 2 + 1) % 2);
        tma_load<KTile>(k_tile + kv_block % 2 * KTile::BYTES, k_tile_full + kv_block % 2, args.k, kv_start, head_kv, batch);
        wait_barrier(v_tile_empty + kv_block % 2, (kv_block / 2 + 1) % 2);
        tma_load<VTile>(v_tile + kv_block % 2 * VTile::BYTES, v_tile_full + kv_block % 2, args.v, kv_start, head_kv, batch);
      }
    }
  }

  if (threadIdx.x < THREADS) {
    take_registers<240>();
    wait_barrier(q_tile_full, 0);
    fill(o_acc, 0.0f);
    fill(row_max, -INF);
    fill(row_sum, 0.0f);
    fill(offset, 0.0f);
    // the first step has no product to overlap with
    if (0 < last_kv_block) {
      wait_barrier(k_tile_full, 0);
      begin_products();
      #pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) {
        wgmma_64x176x16_shared(s, QTile::k_major(q_tile, 64 * warpgroup(), k), KTile::k_major(k_tile, k), k > 0);
      }
      commit_products();
      wait_products<0>();
      settle(s);
      arrive_warp(k_tile_empty);
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
        offset[i] = row_max[i] == -INF ? 0.0f : row_max[i] * args.scale_log2;
      }
      #pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        rescale[i] = exp2_approx(row_max_old[i] * args.scale_log2 - offset[i]);
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
      wait_barrier(k_tile_full + kv_block % 2, kv_block / 2 % 2);
      begin_products();
      #pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) {
        wgmma_64x176x16_shared(s, QTile::k_major(q_tile, 64 * warpgroup(), k), KTile::k_major(k_tile + kv_block % 2 * KTile::BYTES, k), k > 0);
      }
      commit_products();
      wait_barrier(v_tile_full + (kv_block - 1) % 2, (kv_block - 1) / 2 % 2);
      begin_products();
      #pragma unroll
      for (int k = 0; k < BLOCK_KV / 16; ++k) {
        wgmma_64x128x16_registers(o_acc, p_operand[0][2 * k], p_operand[1][2 * k], p_operand[0][2 * k + 1], p_operand[1][2 * k + 1], VTile::mn_major(v_tile + (kv_block - 1) % 2 * VTile::BYTES, k), 1);
      }
      commit_products();
      wait_products<1>();
      settle(s);
      arrive_warp(k_tile_empty + kv_block % 2);
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
        offset[i] = row_max[i] == -INF ? 0.0f : row_max[i] * args.scale_log2;
      }
      #pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        rescale[i] = exp2_approx(row_max_old[i] * args.scale_log2 - offset[i]);
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
      wait_products<0>();
      settle(o_acc);
      arrive_warp(v_tile_empty + (kv_block - 1) % 2);
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

    // the product of the last step
    if (0 < last_kv_block) {
      wait_barrier(v_tile_full + (last_kv_block - 1) % 2, (last_kv_block - 1) / 2 % 2);
      begin_products();
      #pragma unroll
      for (int k = 0; k < BLOCK_KV / 16; ++k) {
        wgmma_64x128x16_registers(o_acc, p_operand[0][2 * k], p_operand[1][2 * k], p_operand[0][2 * k + 1], p_operand[1][2 * k + 1], VTile::mn_major(v_tile + (last_kv_block - 1) % 2 * VTile::BYTES, k), 1);
      }
      commit_products();
      wait_products<0>();
      settle(o_acc);
      arrive_warp(v_tile_empty + (last_kv_block - 1) % 2);
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
    // every warp is done with the tiles that this one lies over
    consumer_barrier<THREADS>();
    store_fragment<OAcc, OTile>(o_tile, o_out);
    consumer_barrier<THREADS>();
    store_tile<OTile, TRUE_HEAD_DIM_V, THREADS>(args.o.at(batch, head, q_start), args.o.row_stride, args.seqlen_q - q_start, o_tile);
  }
}
