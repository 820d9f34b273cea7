// The selection bias of an expert that got fewer rows than the mean rises; one thread an expert.
//   delta = coeff * sign(mean - count);  bias += delta - mean(delta)
// The simple algorithm, but that the sign is found in integers, so that a count equal to the mean is seen as equal on
// every adapter. UPDATE or ACCUMULATE is 1.

struct ExpertBias {
  experts: u32,
  coeff: f32,
}

@group(0) @binding(0) var<uniform> p: ExpertBias;
@group(0) @binding(1) var<storage, read> counts: array<u32>;
//!repeat i UPDATE
@group(0) @binding(2) var<storage, read_write> bias: array<f32>;

@compute @workgroup_size(64)
fn update(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let expert = wg.x * 64u + li;
  if expert >= p.experts {
    return;
  }
  var rows = 0u;
  for (var e = 0u; e < p.experts; e++) {
    rows += counts[e];
  }
  let below = rows / p.experts; // mean, rounded down
  let exact = rows % p.experts == 0u;
  var fewer = 0u;
  var more = 0u;
  for (var e = 0u; e < p.experts; e++) {
    fewer += select(0u, 1u, counts[e] < below || (counts[e] == below && !exact));
    more += select(0u, 1u, counts[e] > below);
  }
  let count = counts[expert];
  var delta = 0.0;
  if count > below {
    delta = -p.coeff;
  } else if count < below || !exact {
    delta = p.coeff;
  }
  let drift = p.coeff * (f32(fewer) - f32(more)) / f32(p.experts);
  bias[expert] += delta - drift;
}
//!end
//!repeat i ACCUMULATE
@group(0) @binding(2) var<storage, read_write> sums: array<u32>;

@compute @workgroup_size(64)
fn accumulate(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let expert = wg.x * 64u + li;
  if expert < p.experts {
    sums[expert] += counts[expert];
  }
}
//!end
