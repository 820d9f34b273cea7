// What attention_coop.wgsl and attention_coop_backward.wgsl share beside lib/attention.wgsl: tiles, places, masks, and texts.

@group(0) @binding(4) var<storage, read> docs: array<u32>;

const LOG2E = 1.4426950408889634;

const ROWS = EDGE * RF;           // rows (queries; by keys: keys) of a subgroup
const SPAN = ROWS * SG;           // of a workgroup
const THREADS = SG * LANES;
const ROUND = 16u;                // positions of a round, PIECES fragments
const STEP = ROUND * ROUNDS;      // of a step
const PER = LANES / EDGE;         // lanes of a row
const HQ = 4u * DF;               // quads of a head, which is DF times 16 elements
const H16 = 2u * DF;              // 16 bytes of a head
const TW = H16 + 1u;              // of a row of a tile: rows of an odd number meet in no bank
const APART = EDGE * TW;          // from fragment to fragment of a tile, across and along its rows
const ALONG = EDGE / 8u;
const CHUNKS = STEP * H16;        // of a tile
// Keys and values that a cache holds beside the rest: 24 MiB.
const ROWS_CACHED = (24u << 20u) / (H16 * 32u);
const SW = 4u + SCORE_PAD;        // quads of a row of scores
const PW = 4u + PROB_PAD;         // quads of a row of probabilities
const NOTE = 4u;                  // the quad of a row of scores for what belongs to the row
const HEAD_STRIDE = HQ * QUAD;    // from row to row, for fragments: of an operand, a tile, scores, probabilities
const TILE_STRIDE = 2u * TW * QUAD;
const SCORE_STRIDE = SW * QUAD;
const PROB_STRIDE = PW * QUAD;

var<workgroup> ta: array<H8, STEP * TW>;
var<workgroup> tb: array<H8, STEP * TW>;
var<workgroup> scores: array<F4, SG * EDGE * SW>;
var<workgroup> probs: array<H4, SG * EDGE * PW>;

fn eight(v: vec4<u32>) -> H8 {
  return $H8_PUT(
    vec4<f16>(vec2<f16>(unpack2x16float(v.x)), vec2<f16>(unpack2x16float(v.y))),
    vec4<f16>(vec2<f16>(unpack2x16float(v.z)), vec2<f16>(unpack2x16float(v.w))));
}

// What a workgroup does: positions `first` to first + SPAN, of one head of one sequence.
struct Place {
  batch: u32,
  head: u32,
  first: u32,
}

// Workgroups that run at a time are to find keys and values in the cache: tile after tile of all heads, but first of as many
// sequences as it holds, then of the next ones.
fn place(n: u32, heads: u32) -> Place {
  let some = clamp(ROWS_CACHED / (p.kv_heads * p.padded), 1u, p.batch);
  let before = n / (some * div_up(p.seq, SPAN) * heads) * some;
  let m = n - before * div_up(p.seq, SPAN) * heads;
  let here = min(some, p.batch - before);
  return Place(before + m / heads % here, m % heads, m / (heads * here) * SPAN);
}

fn workgroups(heads: u32) -> u32 {
  return div_up(p.seq, SPAN) * p.batch * heads;
}

// The row of position `i` among those of an operand.
fn operand_row(batch: u32, head: u32, heads: u32, i: u32) -> u32 {
  return (batch * heads + head) * p.padded + i;
}

// Thread-chunk `x` of a tile: where it goes.
fn tile_place(x: u32) -> u32 {
  return x / H16 * TW + x % H16;
}

fn four(i: u32) -> vec4<u32> {
  return vec4<u32>(i, i + 1u, i + 2u, i + 3u);
}

fn total(v: vec4<f32>) -> f32 {
  return dot(v, vec4<f32>(1.0));
}

fn document(base: u32, i: u32) -> u32 {
  if DOCS == 0u {
    return 0u;
  }
  return docs[base + min(i, p.seq - 1u)];
}

fn documents(base: u32, i: u32) -> vec4<u32> {
  return vec4<u32>(document(base, i), document(base, i + 1u), document(base, i + 2u), document(base, i + 3u));
}

// Whether query `i` sees keys j to j + 3.
fn sees(base: u32, i: u32, doc: u32, j: u32) -> vec4<bool> {
  let keys = four(j);
  return keys <= vec4<u32>(i) & keys >= vec4<u32>(block_start(i)) & documents(base, j) == vec4<u32>(doc);
}

// Whether queries i to i + 3 see key `j`.
fn seen(base: u32, i: u32, doc: u32, j: u32) -> vec4<bool> {
  let queries = four(i);
  let until = block_start(j) + p.block;
  return queries >= vec4<u32>(j) & queries < vec4<u32>(until) & documents(base, i) == vec4<u32>(doc);
}

// Whether a mask may cut EDGE queries from `i` and ROUND keys from `j`.
fn cut(i: u32, j: u32) -> bool {
  return DOCS == 1u || j + ROUND > i + 1u || j < block_start(i + (EDGE - 1u));
}

// The same for EDGE keys from `j` and ROUND queries from `i`.
fn cut_by_key(j: u32, i: u32) -> bool {
  return DOCS == 1u || i + 1u < j + EDGE || i + ROUND > block_start(j) + p.block;
}

// What stands in more than one of the kernels, each of which says by words what differs: `$TILE_A` and `$TILE_B`, the operands that come
// in tiles, from `$FROM` and then from `$NEXT` on; in the backward kernels `$LSE` and `$LESS`, the statistics of a quad of scores (lse and D),
// `$CUT`, whether a mask may cut a round, and `$SEES`, what it leaves of a quad; `$RESULT`, whose fragments leave by way of `scores`.

// Where a lane stands, and which rows are its subgroup's.
//!text LANE
  let base = at.batch * p.seq;
  let lane = li % LANES;
  let part = lane % PER;
  let row = lane / PER;
  let own0 = li / LANES * EDGE * SW;
  let own_p0 = li / LANES * EDGE * PW;
//!repeat y EDGE8
  let own1 = own0 + 2u;
  let own_p1 = own_p0 + 2u;
//!end
  let wide = SCORE_STRIDE;
  let first = at.first + li / LANES * ROWS;
//!end

// The fragment of a round's tile at piece $g of its positions and piece $h of 16 elements $d of a head.
//!let FRAGMENT $ou * ROUND * TW + $gu * APART + $du * 2u + $hu * ALONG

//!text FIRST_TILE
//!repeat r LOADS
  let to$r = tile_place(li + $ru * THREADS);
  let from$r = min(li + $ru * THREADS, CHUNKS - 1u);
  var aw$r = $TILE_A[$FROM + from$r];
  var bw$r = $TILE_B[$FROM + from$r];
//!end
//!end

//!text KEEP_TILE
    workgroupBarrier();
//!repeat r LOADS
    if CHUNKS % THREADS == 0u || li + $ru * THREADS < CHUNKS {
      ta[to$r] = eight(aw$r);
      tb[to$r] = eight(bw$r);
    }
//!end
//!end

//!text NEXT_TILE
//!repeat r LOADS
    aw$r = $TILE_A[$NEXT + from$r];
    bw$r = $TILE_B[$NEXT + from$r];
//!end
//!end

// Scores and d_p of a round, of rows x and y.
//!text PRODUCTS
//!repeat i RF
//!repeat g PIECES
      s$i_$g = FragmentC();
      dp$i_$g = FragmentC();
//!end
//!end
//!repeat d DF
//!repeat h PIECES
//!repeat g PIECES
      let at$d_$h_$g = coopLoad<FragmentB>(&ta[$FRAGMENT].x, TILE_STRIDE);
      let bt$d_$h_$g = coopLoad<FragmentB>(&tb[$FRAGMENT].x, TILE_STRIDE);
//!repeat i RF
      s$i_$g = coopMultiplyAdd(x$i_$d_$h, at$d_$h_$g, s$i_$g);
      dp$i_$g = coopMultiplyAdd(y$i_$d_$h, bt$d_$h_$g, dp$i_$g);
//!end
//!end
//!end
//!end
//!end

// Probabilities e from scores.
//!text PROBABILITIES
//!repeat g PIECES
        coopStoreT(s$i_$g, &scores[own$g]$AT, wide);
//!end
        subgroupBarrier();
//!repeat t KQ
        var e$t = exp2($F4_GET(scores[own0 + row * SW + part + $tu * PER]) * factor - $LSE);
//!end
        if $CUT {
//!repeat t KQ
          e$t = select(vec4<f32>(0.0), e$t, $SEES);
//!end
        }
//!end

// Gradients of scores from d_p and e.
//!text GRADIENTS
//!repeat g PIECES
        coopStoreT(dp$i_$g, &scores[own$g]$AT, wide);
//!end
        subgroupBarrier();
//!repeat t KQ
        let d$t = $F4_GET(scores[own0 + row * SW + part + $tu * PER]) * GRADIENT - $LESS;
        probs[own_p0 + row * PW + part + $tu * PER] = $H4_PUT(e$t * d$t);
//!end
        subgroupBarrier();
//!repeat g PIECES
        ds$i_$g = coopLoadT<FragmentA>(&probs[own_p$g]$AT, PROB_STRIDE);
//!end
//!end

//!text RESULT
  subgroupBarrier();
//!repeat h PIECES
  coopStoreT($RESULT$i_$d_$h, &scores[own$h]$AT, wide);
//!end
  subgroupBarrier();
//!end
