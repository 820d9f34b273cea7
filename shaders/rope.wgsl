// Rotary position embedding, one thread a quad, which is two pairs (x, y): each is turned by the angle of its position
// and place in the head. The table holds cos, sin of two pairs in a quad; SIGN 1 turns back (the backward pass).
// It is a table because WGSL leaves the precision of sin and cos of large angles to the adapter.

struct Rope {
  quads: u32,      // of the whole tensor
  row_quads: u32,  // of a row: all heads
  head_quads: u32, // of a head, and of a row of the table
  seq: u32,        // rows of one sequence
}

@group(0) @binding(0) var<uniform> p: Rope;
@group(0) @binding(1) var<storage, read> x: array<X>;
@group(0) @binding(2) var<storage, read> table: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> y: array<X>;

@compute @workgroup_size(WG)
fn rotate(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let i = grid_index(wg, nwg) * WG + li;
  if i < p.quads {
    let t = (i / p.row_quads) % p.seq;
    let turn = table[t * p.head_quads + (i % p.row_quads) % p.head_quads];
    let c = turn.xxzz;
    let s = select(turn.yyww, -turn.yyww, SIGN == 1u) * vec4<f32>(-1.0, 1.0, -1.0, 1.0);
    let v = x_get(x[i]);
    y[i] = x_put(v * c + v.yxwz * s);
  }
}
