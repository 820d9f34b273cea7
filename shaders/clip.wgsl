// Sums in a fixed order, and the clip factor made of one. The variant's SUM or COEFFICIENT is 1.
//
// sum: one thread adds 64 values as a tree, and the host calls it on the partial sums until one is left. So the order
// depends on the lengths only, and the error grows with the logarithm of the length. Large inputs are read with a
// stride, so that neighbouring threads read neighbouring quads.

//!repeat i SUM
struct Sum {
  count: u32,  // values
  stride: u32, // quads between two of a thread's loads
  threads: u32,
  out_at: u32, // where this input's partial sums begin
  factor: f32, // multiplied into each partial sum
}

@group(0) @binding(0) var<uniform> p: Sum;
@group(0) @binding(1) var<storage, read> x: array<X>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

// Quad `q`, squared if SQUARE; zero past the end.
fn term(q: u32) -> vec4<f32> {
  let v = x_get(x[min(q, max(div_up(p.count, 4u), 1u) - 1u)]);
  let at = vec4<u32>(4u * q) + vec4<u32>(0u, 1u, 2u, 3u);
  let kept = select(vec4<f32>(0.0), v, at < vec4<u32>(p.count));
  if SQUARE == 1u {
    return kept * kept;
  }
  return kept;
}

@compute @workgroup_size(64)
fn sum(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let thread = grid_index(wg, n) * 64u + li;
  if thread >= p.threads {
    return;
  }
  let first = thread / p.stride * 16u * p.stride + thread % p.stride;
//!repeat j 16
  let t$j = term(first + $ju * p.stride);
//!end
  let left = ((t0 + t1) + (t2 + t3)) + ((t4 + t5) + (t6 + t7));
  let right = ((t8 + t9) + (t10 + t11)) + ((t12 + t13) + (t14 + t15));
  let v = left + right;
  out[p.out_at + thread] = ((v.x + v.y) + (v.z + v.w)) * p.factor;
}
//!end
//!repeat i COEFFICIENT
struct Clip {
  max_norm: f32,
}

@group(0) @binding(0) var<uniform> p: Clip;
@group(0) @binding(1) var<storage, read> sum_squares: array<f32>;
@group(0) @binding(2) var<storage, read_write> norm: array<f32>;
@group(0) @binding(3) var<storage, read_write> coefficient: array<f32>;

@compute @workgroup_size(1)
fn main() {
  let length = sqrt(sum_squares[0]);
  let c = p.max_norm / (length + 1e-6);
  norm[0] = length;
  // A NaN norm must give a NaN factor, as in PyTorch: by its bits, since a driver may take a comparison for min().
  let is_nan = (bitcast<u32>(length) & 0x7fffffffu) > 0x7f800000u;
  coefficient[0] = select(select(c, 1.0, c > 1.0), length, is_nan);
}
//!end
