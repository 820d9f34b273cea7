// Rotary position embedding: a quad is two pairs (x, y), each turned by the angle of its position and place in the head.
// The table holds cos, sin of two pairs in a quad; SIGN 1 turns back (the backward pass).
// It is a table because WGSL leaves the precision of sin and cos of large angles to the adapter.
// The simple algorithm is one thread a quad. What this adds: LANES threads share a row and take HELD quads at a time, so
// that positions are found once a row and several loads are on their way; with ALIGNED all of a thread's quads are at one
// place of their heads, and it reads the table once.

struct Rope {
  rows: u32,
  row_quads: u32,  // of a row: all heads
  head_quads: u32, // of a head, and of a row of the table
  seq: u32,        // rows of one sequence
}

@group(0) @binding(0) var<uniform> p: Rope;
@group(0) @binding(1) var<storage, read> x: array<X>;
@group(0) @binding(2) var<storage, read> table: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> y: array<X>;

@compute @workgroup_size(ROWS * LANES)
fn rotate(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let row = grid_index(wg, nwg) * ROWS + li / LANES;
  let lane = li % LANES;
  if row >= p.rows {
    return;
  }
  let base = row * p.row_quads;
  let last = p.row_quads - 1u;
  let position = row % p.seq * p.head_quads;
  var turn = table[position + lane % p.head_quads];
  for (var first = lane; first < p.row_quads; first += HELD * LANES) {
//!repeat i HELD
    let x$i = x[base + min(first + $iu * LANES, last)];
//!end
//!repeat i HELD
    let q$i = first + $iu * LANES;
    if q$i < p.row_quads {
      if ALIGNED == 0u {
        turn = table[position + q$i % p.head_quads];
      }
      let c = turn.xxzz;
      let s = select(turn.yyww, -turn.yyww, SIGN == 1u) * vec4<f32>(-1.0, 1.0, -1.0, 1.0);
      let v = x_get(x$i);
      y[base + q$i] = x_put(v * c + v.yxwz * s);
    }
//!end
  }
}
